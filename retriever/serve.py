"""Serve an app on a socket of our own until a signal, the end of standard input, or a stop event: one `ready URL` line, a clean end."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

__all__ = ["is_loopback", "serve"]

BACKLOG = 2048  # hundreds of episodes may connect in the same moment
KEEP_ALIVE_S = 75
GRACE_S = 5


def serve(app: Starlette, *, host: str = "127.0.0.1", port: int = 0, end_with_stdin: bool = False) -> None:
    """Serve `app` until SIGINT or SIGTERM. When it answers, `ready http://HOST:PORT` is printed.

    Args:
        port: 0 for a free one.
        end_with_stdin: end, too, when standard input ends: with the process that holds its other side.

    Raises:
        OSError: the port is in use, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:  # named, or asyncio does not set TCP_NODELAY
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="on",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        asyncio.run(_Server(config, f"http://{shown}:{listener.getsockname()[1]}", end_with_stdin).serve(sockets=[listener]))


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can connect to it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, url: str, end_with_stdin: bool) -> None:
        super().__init__(config)
        self._url = url
        self._end_with_stdin = end_with_stdin

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal ends the server and not, once more afterwards, the process: the end is a clean one."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            raise RuntimeError("the server's start-up failed: see the lines above")
        if self._end_with_stdin:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read_stdin)
        print(f"ready {self._url}", flush=True)

    def _read_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._end()

    def _end(self) -> None:
        self.force_exit = self.should_exit  # a second signal does not wait for open requests
        self.should_exit = True
