"""Serving a Starlette app from a role: uvicorn on loopback, ready line, clean end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn

from agentrl.system.process import OnReady, StopSignal

__all__ = ["serve_app"]

_BACKLOG = 2048  # hundreds of episodes may connect in the same moment
_KEEP_ALIVE_S = 75  # longer than any client keeps an idle connection
_GRACE_S = 1  # for open requests (long polls, paused generations) at the end; the application's own clean-up comes after it


def serve_app(app: Any, *, on_ready: OnReady, stop: StopSignal, host: str = "127.0.0.1", port: int = 0) -> None:
    """Serve `app` until `stop` is set; tells `on_ready({"url": ...})` when it answers.

    Raises:
        OSError: the port is in use.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:  # named, or asyncio does not set TCP_NODELAY
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        url = f"http://{host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_GRACE_S, ws="none", lifespan="on"
        )
        asyncio.run(_Server(config, url, on_ready, stop).serve(sockets=[listener]))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, url: str, on_ready: OnReady, stop: StopSignal) -> None:
        super().__init__(config)
        self._url, self._on_ready, self._stop = url, on_ready, stop

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # signals are the role's business: it may not run in the main thread

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            raise RuntimeError("the server's start-up failed: see the lines above")
        loop = asyncio.get_running_loop()
        self._stop.subscribe(partial(loop.call_soon_threadsafe, self._end))
        self._on_ready({"url": self._url})

    def _end(self) -> None:
        self.should_exit = True
