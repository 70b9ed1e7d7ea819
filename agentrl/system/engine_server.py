"""`agentrl engine serve`: the embedded engine alone, for any client that speaks SGLang's native API."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from agentrl.engine.app import EngineServer
from agentrl.system.http import serve_app
from agentrl.system.process import StopSignal

__all__ = ["serve"]


def serve(model_dir: Path, *, host: str, port: int, slots: int, context_tokens: int, threads: int, device: str) -> None:
    """Serve a Hugging Face directory until Ctrl-C or SIGTERM; prints `ready URL` when it answers."""
    stop = StopSignal()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    server = EngineServer(model_dir, slots=slots, context_tokens=context_tokens, threads=threads, device=device, weight_version="0")

    def ready(info: dict[str, Any]) -> None:
        print(f"ready {info['url']}", flush=True)

    serve_app(server.app, on_ready=ready, stop=stop, host=host, port=port)
