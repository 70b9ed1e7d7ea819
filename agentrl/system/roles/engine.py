"""The engine's program: the embedded engine, or an SGLang server, behind SGLang's HTTP API."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.engine_messages import EngineKeys
from agentrl.errors import EngineUnavailable
from agentrl.system.address import bind_address
from agentrl.system.process import OnReady, ProcessSpec, StopSignal

__all__ = ["main"]


def main(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    """Serve until stopped. Payload: model_dir."""
    recipe, model_dir = Recipe.model_validate(spec.recipe), Path(spec.payload["model_dir"])
    serve = _serve_sglang if recipe.engine.kind == "sglang" else _serve_embedded
    serve(spec, recipe, model_dir, on_ready, stop)


def _serve_embedded(spec: ProcessSpec, recipe: Recipe, model_dir: Path, on_ready: OnReady, stop: StopSignal) -> None:
    from agentrl.engine.app import EngineServer  # torch: not where SGLang has its own
    from agentrl.system.http import serve_app

    keys = EngineKeys.of_environment(recipe.engine.api_key_variable, recipe.engine.admin_key_variable)
    server = EngineServer(
        model_dir,
        slots=recipe.engine.slots,
        context_tokens=recipe.engine.context_tokens,
        threads=recipe.engine.threads,
        device=recipe.engine.device,
        dtype=recipe.model.dtype,
        deterministic=recipe.run.deterministic,
        api_key=keys.api,
        admin_key=keys.admin,
    )
    serve_app(server.app, on_ready=on_ready, stop=stop, host=bind_address(recipe))


def _serve_sglang(spec: ProcessSpec, recipe: Recipe, model_dir: Path, on_ready: OnReady, stop: StopSignal) -> None:
    from agentrl.system.sglang import SGLangServer

    stopped = False

    def end() -> None:
        nonlocal stopped
        stopped = True
        server.stop()

    with SGLangServer.start(recipe, model_dir, log=spec.log.with_suffix(".sglang.log"), host=bind_address(recipe)) as server:
        stop.subscribe(end)
        server.wait_ready(recipe.engine.start_deadline_s)
        on_ready({"url": server.url})
        code = server.wait()
        if not stopped:
            raise EngineUnavailable(f"the SGLang server ended with code {code}. {server.last_lines()}")
