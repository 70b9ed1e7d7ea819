"""The HTTP seam of every client: `trio_client()`, an `httpx.AsyncClient` over a small trio + h11 transport of our own.

httpx's default pool looks through all connections for every request: with hundreds of requests in flight one client falls to about a
hundred requests a second. Here an idle connection is popped from the end of a list (benchmarks/http_client.py has the figures).

    TransportError (httpx)
    └── ResponseTooLarge    a body exceeded the cap given to `trio_client(max_response_bytes=...)`

Rules, all tested:

* Idle connections are kept by origin, newest used first, for less than the 5 s after which uvicorn and SGLang close theirs.
* Never more than `max_connections` are open, over all origins; further requests wait for one to come free.
* An idle connection that the server closed is noticed before use. One that dies while the request is sent is replaced once, only where
  nothing of the response had come and the body can be sent again.
* Closing is synchronous, so a cancelled request leaves nothing behind.

httpx's timeouts bound a single read or write, not a request: bound a request with `trio.fail_after`.
"""

from __future__ import annotations

import select
import ssl
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import h11
import httpx
import trio

__all__ = ["KEEPALIVE_S", "PooledTransport", "ResponseTooLarge", "trio_client"]

KEEPALIVE_S = 3.0  # uvicorn and SGLang close idle connections after 5 s: ours must give up first
CONNECT_S = 5.0
READ_BYTES = 64 * 1024
MAX_HEADER_BYTES = 64 * 1024

Origin = tuple[bytes, bytes, int]


def trio_client(
    *,
    base_url: str = "",
    max_connections: int = 256,
    max_response_bytes: int | None = None,
    replay_posts: bool = True,
    headers: Mapping[str, str] | None = None,
    ssl_context: ssl.SSLContext | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """A client for use under trio. Ignores proxies and the rest of the environment; asks for uncompressed answers.

    Args:
        max_connections: open connections over all origins; requests beyond it wait.
        max_response_bytes: cap on a response's body; None for none. With a cap, compressed responses are refused.
        replay_posts: send a POST again when an idle connection turns out dead before any byte of the response. For servers whose calls
            carry idempotency keys, as all of this project's do; switch it off for others.
        transport: used instead of a `PooledTransport`, e.g. a fake.
    """
    if transport is None:
        transport = PooledTransport(
            max_connections=max_connections, max_response_bytes=max_response_bytes, replay_posts=replay_posts, ssl_context=ssl_context
        )
    return httpx.AsyncClient(
        base_url=base_url,
        transport=transport,
        trust_env=False,
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        headers={"accept-encoding": "identity", **(headers or {})},
    )


class ResponseTooLarge(httpx.TransportError):
    """A response's body exceeded its cap, or is compressed so that a cap would not bound what it unpacks to."""


class PooledTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 over trio streams with a last-in-first-out list of idle connections per origin."""

    def __init__(
        self,
        *,
        max_connections: int = 256,
        keepalive_s: float = KEEPALIVE_S,
        max_response_bytes: int | None = None,
        replay_posts: bool = True,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._slots = trio.Semaphore(max_connections)
        self._max_connections = max_connections
        self._keepalive_s = keepalive_s
        self._max_response_bytes = max_response_bytes
        self._replay_posts = replay_posts
        self._ssl_context = ssl_context
        self._idle: dict[Origin, deque[_Connection]] = defaultdict(deque)  # oldest left, newest right
        self._open = 0
        self._closed = False

    @property
    def open_connections(self) -> int:
        """Connections in use and idle."""
        return self._open

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request`; the response's body is read as it is iterated.

        Raises:
            httpx.TransportError: of the kind that says what failed (ConnectError, ReadError, ReadTimeout, ...).
        """
        timeouts = request.extensions.get("timeout", {})
        await self._take_slot(timeouts.get("pool"))
        try:
            connection, head = await self._exchange(request, timeouts)
        except BaseException:
            self._slots.release()
            raise
        body = _Body(connection, self._release, timeouts.get("read"), self._cap(request))
        try:
            body.check(head)
        except httpx.TransportError:
            await body.aclose()
            raise
        return httpx.Response(head.status_code, headers=head.headers.raw_items(), stream=body, extensions={"http_version": b"HTTP/1.1"})

    async def aclose(self) -> None:
        """Close the idle connections now, and those in use when they come free."""
        self._closed = True
        for idle in self._idle.values():
            while idle:
                self._close(idle.pop())

    async def _exchange(self, request: httpx.Request, timeouts: Mapping[str, float | None]) -> tuple[_Connection, h11.Response]:
        origin = _origin(request.url)
        connection = self._take_idle(origin)
        if connection is not None:
            try:
                return connection, await self._ask(connection, request, timeouts)
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                if connection.answered or not self._replayable(request):
                    raise
        connection = await self._connect(origin, timeouts.get("connect"))
        return connection, await self._ask(connection, request, timeouts)

    async def _ask(self, connection: _Connection, request: httpx.Request, timeouts: Mapping[str, float | None]) -> h11.Response:
        try:
            with _within(timeouts.get("write"), httpx.WriteTimeout):
                await connection.send(request)
            with _within(timeouts.get("read"), httpx.ReadTimeout):
                return await connection.head()
        except BaseException:
            self._close(connection)
            raise

    def _replayable(self, request: httpx.Request) -> bool:
        idempotent = request.method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS")
        return isinstance(request.stream, httpx.ByteStream) and (idempotent or self._replay_posts)

    def _cap(self, request: httpx.Request) -> int | None:
        return cast(int | None, request.extensions.get("max_response_bytes", self._max_response_bytes))

    async def _take_slot(self, timeout: float | None) -> None:
        try:
            self._slots.acquire_nowait()
        except trio.WouldBlock:
            with _within(timeout, httpx.PoolTimeout):
                await self._slots.acquire()

    def _take_idle(self, origin: Origin) -> _Connection | None:
        idle = self._idle[origin]
        oldest = trio.current_time() - self._keepalive_s
        while idle and idle[0].idle_since < oldest:
            self._close(idle.popleft())
        while idle:
            connection = idle.pop()
            if not connection.dead():
                return connection
            self._close(connection)
        return None

    async def _connect(self, origin: Origin, timeout: float | None) -> _Connection:
        if self._open >= self._max_connections:
            self._close_oldest_idle()  # of another origin: this request holds a slot, so not all are in use
        scheme, host, port = origin
        self._open += 1
        try:
            with _within(timeout, httpx.ConnectTimeout):
                plain = await _open_stream(host.decode("ascii"), port)
                stream = await _handshake(plain, self._context(), host.decode("ascii")) if scheme == b"https" else plain
        except BaseException:
            self._open -= 1
            raise
        return _Connection(origin, stream)

    def _context(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()  # 24 ms: once, and only where TLS is used
        return self._ssl_context

    def _close_oldest_idle(self) -> None:
        heads = [idle[0] for idle in self._idle.values() if idle]
        if heads:
            oldest = min(heads, key=lambda connection: connection.idle_since)
            self._idle[oldest.origin].popleft()
            self._close(oldest)

    def _release(self, connection: _Connection) -> None:
        if connection.reusable() and not self._closed:
            connection.idle_since = trio.current_time()
            self._idle[connection.origin].append(connection)
        else:
            self._close(connection)
        self._slots.release()

    def _close(self, connection: _Connection) -> None:
        if not connection.closed:
            self._open -= 1
            connection.close()


class _Connection:
    """One stream and its h11 state machine."""

    def __init__(self, origin: Origin, stream: trio.abc.Stream) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self.answered = False  # anything of the current response has come
        self.closed = False
        self._stream = stream
        self._socket = _socket_of(stream)
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)

    async def send(self, request: httpx.Request) -> None:
        self.answered = False
        try:
            head = self._http.send(h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw))
            if isinstance(request.stream, httpx.ByteStream):
                await self._stream.send_all(b"".join([head or b"", *self._body(request.content)]))
                return
            await self._stream.send_all(head or b"")
            async for chunk in cast(AsyncIterator[bytes], request.stream):
                await self._stream.send_all(self._http.send(h11.Data(data=chunk)) or b"")
            await self._stream.send_all(self._http.send(h11.EndOfMessage()) or b"")
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error), request=request) from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise httpx.WriteError(f"the connection broke while {request.url} was sent to: {error}", request=request) from error

    def _body(self, content: bytes) -> list[bytes]:
        data = (self._http.send(h11.Data(data=content)) or b"") if content else b""
        return [data, self._http.send(h11.EndOfMessage()) or b""]

    async def head(self) -> h11.Response:
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise httpx.RemoteProtocolError("the server closed the connection without a response")

    async def data(self) -> bytes | None:
        """The next piece of the body; None at its end."""
        event = await self._event()
        if isinstance(event, h11.Data):
            return bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            return None
        raise httpx.RemoteProtocolError("the server closed the connection within a response")

    async def _event(self) -> Any:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = await self._stream.receive_some(READ_BYTES)
                self.answered = self.answered or bool(data)
                self._http.receive_data(bytes(data))
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise httpx.ReadError(f"the connection broke while waiting for the response: {error}") from error
        return event

    def reusable(self) -> bool:
        """Whether another request can follow; makes ready for it."""
        if self.closed or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def dead(self) -> bool:
        """Whether an idle connection has something to read: the server closed it, or spoke out of turn."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.closed = True
        self._socket.close()


class _Body(httpx.AsyncByteStream):
    """A response's body. Its connection goes back to the pool at the end of it, and is closed when it is abandoned before."""

    def __init__(self, connection: _Connection, release: Callable[[_Connection], None], timeout: float | None, cap: int | None) -> None:
        self._connection = connection
        self._release = release
        self._timeout = timeout
        self._cap = cap
        self._received = 0
        self._released = False

    def check(self, head: h11.Response) -> None:
        """Refuse by its headers what the cap cannot bound or already excludes."""
        if self._cap is None:
            return
        headers = dict(head.headers)
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise ResponseTooLarge(f"a response compressed by {headers[b'content-encoding']!r} has no bound: expected an uncompressed one")
        length = headers.get(b"content-length", b"0")
        if int(length) > self._cap:
            raise ResponseTooLarge(f"a response of {int(length)} bytes exceeds the limit of {self._cap}")

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._released:
            raise StopAsyncIteration
        with _within(self._timeout, httpx.ReadTimeout):
            data = await self._connection.data()
        if data is None:
            await self.aclose()
            raise StopAsyncIteration
        self._received += len(data)
        if self._cap is not None and self._received > self._cap:
            raise ResponseTooLarge(f"a response exceeds the limit of {self._cap} bytes")
        return data

    async def aclose(self) -> None:
        if not self._released:
            self._released = True
            self._release(self._connection)


def _origin(url: httpx.URL) -> Origin:
    scheme = url.raw_scheme
    if scheme not in (b"http", b"https"):
        raise httpx.UnsupportedProtocol(f"expected an http:// or https:// URL, got {url!r}")
    return scheme, url.raw_host, url.port or (443 if scheme == b"https" else 80)


async def _open_stream(host: str, port: int) -> trio.SocketStream:
    try:
        return await trio.open_tcp_stream(host, port)
    except OSError as error:  # refused, unreachable, unknown name
        raise httpx.ConnectError(f"cannot connect to {host}:{port}: {error}") from error


async def _handshake(stream: trio.SocketStream, context: ssl.SSLContext, host: str) -> trio.SSLStream[trio.SocketStream]:
    secure = trio.SSLStream(stream, context, server_hostname=host, https_compatible=True)
    try:
        await secure.do_handshake()
    except trio.BrokenResourceError as error:
        stream.socket.close()
        raise httpx.ConnectError(f"TLS with {host} failed: {error.__cause__ or error}") from error
    except BaseException:
        stream.socket.close()
        raise
    return secure


def _socket_of(stream: trio.abc.Stream) -> trio.socket.SocketType:
    plain = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    return cast(trio.SocketStream, plain).socket


def _within(seconds: float | None, error: type[httpx.TimeoutException]) -> AbstractContextManager[object]:
    return nullcontext() if seconds is None else _Deadline(seconds, error)


class _Deadline(AbstractContextManager[None]):
    """`trio.move_on_after` that raises httpx's own timeout."""

    def __init__(self, seconds: float, error: type[httpx.TimeoutException]) -> None:
        self._seconds = seconds
        self._error = error
        self._scope = trio.CancelScope()

    def __enter__(self) -> None:
        self._scope.deadline = trio.current_time() + self._seconds
        self._scope.__enter__()

    def __exit__(self, *raised: Any) -> bool:
        swallowed = bool(self._scope.__exit__(*raised))
        if self._scope.cancelled_caught:
            raise self._error(f"no progress within {self._seconds:g} s")
        return swallowed
