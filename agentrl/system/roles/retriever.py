"""The retriever's program: the standalone server as a subprocess of this one, so that its libraries stay its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError, ProcessDied
from agentrl.system.address import bind_address
from agentrl.system.child import die_with_parent
from agentrl.system.process import OnReady, ProcessSpec, StopSignal

__all__ = ["main", "serve_command"]


def main(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    """Serve the recipe's corpus or index until stopped."""
    command = serve_command(Recipe.model_validate(spec.recipe))
    parent = os.getpid()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: die_with_parent(parent))
    stop.subscribe(server.terminate)
    assert server.stdout is not None
    with server.stdout:
        for line in server.stdout:
            print(line, end="", flush=True)
            if line.startswith("ready "):
                on_ready({"url": line.split()[1]})
    if server.wait() not in (0, -15):
        raise ProcessDied(f"the retriever ended with code {server.returncode}; its last lines are in {spec.log}")


def serve_command(recipe: Recipe) -> list[str]:
    """What serves the recipe's corpus or index; a deterministic run searches query by query.

    Raises:
        ConfigError: the recipe has no retriever, or one that runs elsewhere.
    """
    retriever = recipe.retriever
    if retriever is None or retriever.url is not None:
        raise ConfigError("the retriever's program needs retriever.corpus or retriever.index")
    source = retriever.index or retriever.corpus
    assert source is not None
    flags = ["--cache", str(Path(recipe.run.dir) / ".cache" / "index")] if retriever.corpus else []
    flags += ["--deterministic"] if recipe.run.deterministic else []
    if recipe.run.bind == "node":
        flags += ["--host", bind_address(recipe), "--unsafe-allow-remote"]  # asked for, with what it means, by run.bind
    return [sys.executable, "-m", "retriever", "serve", source, "--topk", str(retriever.topk), *flags]
