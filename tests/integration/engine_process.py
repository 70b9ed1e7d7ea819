"""An embedded engine in a process of its own: python engine_process.py MODEL_DIR SLOTS CONTEXT_TOKENS."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START_DEADLINE_S = 60.0


@contextmanager
def engine_process(model_dir: Path, *, slots: int = 8, context_tokens: int = 512, faults: str = "") -> Iterator[httpx.Client]:
    """A client of a running engine. One with `faults` (agentrl.faults) is killed at the end, for it may be frozen."""
    command = [sys.executable, __file__, str(model_dir), str(slots), str(context_tokens)]
    environment = os.environ | ({"AGENTRL_FAULTS": faults} if faults else {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            with httpx.Client(base_url=process.stdout.readline().strip(), timeout=60.0, trust_env=False) as client:
                await_ready(client)
                yield client
        finally:
            (process.kill if faults else process.terminate)()
            process.wait(20)


def await_ready(client: httpx.Client) -> None:
    """Return when the engine answers."""
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            client.get("/ready").raise_for_status()
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline, "the engine did not start"


def main(model_dir: str, slots: str, context_tokens: str) -> None:
    """Serve on a free port and print its URL first."""
    import torch
    import uvicorn

    from agentrl.engine.app import EngineServer

    torch.set_num_threads(1)
    server = EngineServer(Path(model_dir), slots=int(slots), context_tokens=int(context_tokens))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio does not set TCP_NODELAY: 40 ms a call
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(server.app, log_level="warning", access_log=False)).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
