"""Serve an app on a socket of our own until a signal, the end of standard input, or a failed start: one `ready URL` line, a clean end.

The socket answers at once, `/health` with 200 and all else with 503 as long as the index is being opened; `ready URL` is printed when it is
open. SIGHUP opens it again. TLS is not ours: put a proxy in front.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from retriever.connections import bounded_protocol
from retriever.local import Reloaded
from retriever.query import Refused

__all__ = ["is_loopback", "serve"]

BACKLOG = 2048  # hundreds of episodes may connect in the same moment
KEEP_ALIVE_S = 75
GRACE_S = 5
# Python's default is 5 ms: as long as a GPU takes for a batch, and the worker may wait for it after every call that released the lock. Measured
# with 4,000 cached answers a second beside a worker on a CPU: 6 to 10 % more of both at half a millisecond.
SWITCH_S = 0.0005
DESCRIPTORS = 65_536  # a connection is one; many systems begin with 1,024
WHY_NOT_BOUND = {
    errno.EADDRINUSE: "something else listens there: give another --port, or --port 0 for a free one",
    errno.EADDRNOTAVAIL: "it is no address of this machine: give another --host",
    errno.EACCES: "ports below 1024 are not everybody's: give another --port, or --port 0 for a free one",
}


async def _at_once() -> None:
    pass


def serve(
    app: Starlette,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    end_with_stdin: bool = False,
    opened: Callable[[], Awaitable[None]] = _at_once,
    reload: Callable[[], Awaitable[Reloaded]] | None = None,
) -> None:
    """Serve `app` until SIGINT or SIGTERM. When it answers queries, `ready http://HOST:PORT` is printed.

    Args:
        port: 0 for a free one.
        end_with_stdin: end, too, when standard input ends: with the process that holds its other side.
        opened: waits until the app's service answers queries. What it raises ends the server and is raised here.
        reload: called at SIGHUP; without, the signal ends the process.

    Raises:
        OSError: the port is in use, or the host is not this machine's.
        Exception: what `opened` raised.
    """
    _allow_connections()
    sys.setswitchinterval(SWITCH_S)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:  # named, or asyncio does not set TCP_NODELAY
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(listener, host, port)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        config = uvicorn.Config(
            app,
            http=bounded_protocol(),
            log_level="warning",
            access_log=False,
            lifespan="on",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        server = _Server(config, f"http://{shown}:{listener.getsockname()[1]}", end_with_stdin, opened, reload)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:  # uvloop's, where it is installed
            runner.run(server.serve(sockets=[listener]))
    if server.failure is not None:
        raise server.failure


def _bind(listener: socket.socket, host: str, port: int) -> None:
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except socket.gaierror as error:
        raise OSError(f"--host {host} does not resolve to an address of this machine: {error.strerror}") from error
    except OSError as error:
        raise OSError(f"{host}:{port} cannot be listened on: {WHY_NOT_BOUND.get(error.errno or 0, error.strerror)}") from error


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can connect to it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        url: str,
        end_with_stdin: bool,
        opened: Callable[[], Awaitable[None]],
        reload: Callable[[], Awaitable[Reloaded]] | None,
    ) -> None:
        super().__init__(config)
        self._url = url
        self._end_with_stdin = end_with_stdin
        self._opened, self._reload = opened, reload
        self._hung_up = asyncio.Event()
        self.failure: Exception | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal ends the server and not, once more afterwards, the process: the end is a clean one."""
        loop = asyncio.get_running_loop()
        handlers: dict[int, Callable[[], None]] = {signal.SIGINT: self._end, signal.SIGTERM: self._end}
        before = signal.getsignal(signal.SIGINT)
        if self._reload is not None:
            handlers[signal.SIGHUP] = self._hung_up.set
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
            signal.signal(signal.SIGINT, before)  # removing sets Python's own, which raises KeyboardInterrupt

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            raise RuntimeError("the server's start-up failed: see the lines above")
        if self._end_with_stdin:
            self._watch_stdin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # open requests were not waited for; the service still ends as it should
            await self.lifespan.shutdown()

    async def main_loop(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._tell_ready()), tasks.create_task(self._reload_loop())]
                await super().main_loop()
                for task in beside:
                    task.cancel()
        except ExceptionGroup as group:  # the index cannot be opened
            self.failure = group.exceptions[0]

    async def _tell_ready(self) -> None:
        print(f"retriever: listening on {self._url}", file=sys.stderr, flush=True)  # it answers how far the opening is
        await self._opened()
        print(f"ready {self._url}", flush=True)

    async def _reload_loop(self) -> None:
        """Open the index again when the process is told to.

        consumes      SIGHUP; several that come while the index is being opened are one
        produces      a swapped index and a line on standard error
        waits for     the signal; the index
        unblocked by  cancellation, when the server ends
        """
        while self._reload is not None:
            await self._hung_up.wait()
            self._hung_up.clear()
            try:
                reloaded = await self._reload()
            except Refused as error:
                print(f"retriever: not reloaded: {error}", file=sys.stderr, flush=True)
            else:
                what = "another index" if reloaded.changed else "the same index again"
                told = f"{what}, searched by {', '.join(reloaded.modes)}: {reloaded.identity}"
                print(f"retriever: reloaded in {reloaded.seconds:.1f} s, {told}", file=sys.stderr, flush=True)

    def _watch_stdin(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(sys.stdin.fileno(), self._read_stdin)
        except (AttributeError, OSError):  # closed, or a file or /dev/null, which epoll refuses: nobody holds its other side
            print("retriever: standard input has ended already, and so does the server (--end-with-stdin)", file=sys.stderr, flush=True)
            loop.call_soon(self._end)

    def _read_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._end()

    def _end(self) -> None:
        self.force_exit = self.should_exit  # a second signal does not wait for open requests
        self.should_exit = True


def _allow_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
