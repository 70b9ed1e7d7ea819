"""The retriever's program: the standalone server as a subprocess of this one, so that its libraries stay its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from agentrl.config.recipe import Recipe, RetrieverRecipe
from agentrl.errors import ConfigError, ProcessDied
from agentrl.system.address import bind_address
from agentrl.system.child import die_with_parent
from agentrl.system.process import OnReady, ProcessSpec, StopSignal
from agentrl.system.retriever_token import TOKEN_VARIABLE

__all__ = ["main", "relay", "serve_command"]

OWN_WORDS = "retriever: "


def main(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    """Serve the recipe's corpus or index until stopped. Payload: retriever_token."""
    command = serve_command(Recipe.model_validate(spec.recipe))
    token = spec.payload["retriever_token"]
    environment = os.environ | ({} if token is None else {TOKEN_VARIABLE: token})
    parent = os.getpid()
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # to the log through us: its last words are the driver's message
        text=True,
        env=environment,
        preexec_fn=lambda: die_with_parent(parent),
    )
    stop.subscribe(server.terminate)
    assert server.stdout is not None
    with server.stdout:
        said = relay(server.stdout, on_ready)
    if server.wait() not in (0, -15):
        raise ProcessDied(f"the retriever ended with code {server.returncode}{f', and said: {said}' if said else ''}")


def relay(lines: Iterable[str], on_ready: OnReady) -> str:
    """Print what the server says, and tell its URL. Returns the last that it said of itself: why it ended, where it knew."""
    said = ""
    for line in lines:
        print(line, end="", flush=True)
        if line.startswith("ready "):
            on_ready({"url": line.split()[1]})
        elif line.startswith(OWN_WORDS):
            said = line.removeprefix(OWN_WORDS).strip()
    return said


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
    flags += _chosen(retriever)
    flags += ["--device", _devices(recipe.resources.retriever_gpus)] if retriever.device == "cuda" else []
    flags += ["--deterministic"] if recipe.run.deterministic else []
    if recipe.run.bind == "node":
        flags += ["--host", bind_address(recipe)]
    return [sys.executable, "-m", "retriever", "serve", source, "--topk", str(retriever.topk), *flags]


def _chosen(retriever: RetrieverRecipe) -> list[str]:
    """What is not the server's own default."""
    options = {
        "--encoder": "encoder",
        "--index": "index_type",
        "--model": "model",
        "--mode": "mode",
        "--runtime": "runtime",
        "--precision": "precision",
        "--threads": "threads",
        "--reranker": "reranker",
        "--parameters": "parameters",
    }
    defaults = RetrieverRecipe.model_fields
    given = {option: getattr(retriever, name) for option, name in options.items() if getattr(retriever, name) != defaults[name].default}
    return [word for option, value in given.items() for word in (option, str(value))] + (["--bm25"] if retriever.bm25 else [])


def _devices(gpus: float) -> str:
    """The GPUs that the launcher lets this process see, as torch counts them: all that were booked, or the one of which it has a share."""
    return ",".join(f"cuda:{index}" for index in range(max(1, int(gpus))))
