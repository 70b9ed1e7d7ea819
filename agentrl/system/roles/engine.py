"""The engine's program: the embedded engine behind SGLang's HTTP API."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.engine.app import EngineServer
from agentrl.system.http import serve_app
from agentrl.system.process import OnReady, ProcessSpec, StopSignal

__all__ = ["main"]


def main(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    """Serve until stopped. Payload: model_dir."""
    recipe = Recipe.model_validate(spec.recipe)
    server = EngineServer(
        Path(spec.payload["model_dir"]),
        slots=recipe.engine.slots,
        context_tokens=recipe.engine.context_tokens,
        threads=recipe.engine.threads,
        device=recipe.engine.device,
        dtype=recipe.model.dtype,
        deterministic=recipe.run.deterministic,
    )
    serve_app(server.app, on_ready=on_ready, stop=stop)
