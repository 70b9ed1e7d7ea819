"""The HTTP seam of every client: `trio_client()`, an `httpx.AsyncClient` over a small trio + h11 transport of our own.

    async with trio_client() as client:
        answer = await client.exchange("POST", url, content)    # whole bytes out, whole bytes in
        response = await client.post(url, content=content)      # everything httpx can do

httpx's default pool looks through all connections for every request: with hundreds of requests in flight one client falls to about a
hundred requests a second. Here an idle connection is popped from the end of a list (benchmarks/http_client.py has the figures). What is left
is mostly httpx's and h11's own work, so calls that are made hundreds of times a second take the short way of `TrioClient.exchange`.

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

import ssl
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import h11
import httpx
import trio

from retriever.connection import Answer, Connection, Endpoint, Origin, ResponseTooLarge, origin_of

__all__ = ["KEEPALIVE_S", "Answer", "PooledTransport", "ResponseTooLarge", "TrioClient", "trio_client"]

KEEPALIVE_S = 3.0  # uvicorn and SGLang close idle connections after 5 s: ours must give up first
CONNECT_S = 5.0
KNOWN_ENDPOINTS = 1024  # heads of requests that are kept, by client

T = TypeVar("T")


def trio_client(
    *,
    base_url: str = "",
    max_connections: int = 256,
    max_response_bytes: int | None = None,
    replay_posts: bool = True,
    headers: Mapping[str, str] | None = None,
    ssl_context: ssl.SSLContext | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> TrioClient:
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
    return TrioClient(
        base_url=base_url,
        transport=transport,
        trust_env=False,
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        headers={"accept-encoding": "identity", **(headers or {})},
    )


class TrioClient(httpx.AsyncClient):
    """An `httpx.AsyncClient` with a short way for calls that are whole bytes in both directions."""

    def __init__(self, *, transport: httpx.AsyncBaseTransport, **options: Any) -> None:
        super().__init__(transport=transport, **options)
        self._pool = transport if isinstance(transport, PooledTransport) else None
        self._endpoints: dict[tuple[str, str, tuple[tuple[str, str], ...]], Endpoint] = {}

    async def exchange(self, method: str, url: str, content: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request, read its answer. As `request` without redirects, cookies, authentication and timeouts, at a sixth of the cost.

        Raises:
            httpx.TransportError: of the kind that says what failed (ConnectError, ReadError, ...).
        """
        if self._pool is None:
            response = await self.request(method, url, content=content, headers=headers)
            return Answer(response.status_code, {name.lower(): value for name, value in response.headers.raw}, response.content)
        key = (method, url, tuple(headers.items()) if headers else ())
        endpoint = self._endpoints.get(key)
        if endpoint is None:
            if len(self._endpoints) >= KNOWN_ENDPOINTS:
                self._endpoints.clear()
            endpoint = self._endpoints[key] = Endpoint.of(self.build_request(method, url, headers=headers))
        return await self._pool.exchange(endpoint, content)


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
        self._idle: dict[Origin, deque[Connection]] = defaultdict(deque)  # oldest left, newest right
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

        async def ask(connection: Connection) -> h11.Response:
            with _within(timeouts.get("write"), httpx.WriteTimeout):
                await connection.send(request)
            with _within(timeouts.get("read"), httpx.ReadTimeout):
                return await connection.head()

        await self._take_slot(timeouts.get("pool"))
        replayable = isinstance(request.stream, httpx.ByteStream) and self._replayable(request.method)
        try:
            connection, head = await self._asked(origin_of(request.url), ask, replayable=replayable, connect_s=timeouts.get("connect"))
        except BaseException:
            self._slots.release()
            raise
        cap = request.extensions.get("max_response_bytes", self._max_response_bytes)
        body = await self._body(connection, head, cap, timeouts.get("read"))
        return httpx.Response(head.status_code, headers=head.headers.raw_items(), stream=body, extensions={"http_version": b"HTTP/1.1"})

    async def exchange(self, endpoint: Endpoint, content: bytes) -> Answer:
        """Send `content`, read the whole answer.

        Raises:
            httpx.TransportError: as `handle_async_request`.
        """

        async def ask(connection: Connection) -> Answer | h11.Response:
            return await connection.exchange(endpoint, content, self._max_response_bytes)

        await self._take_slot(None)
        try:
            replayable = self._replayable(endpoint.method)
            connection, answer = await self._asked(endpoint.origin, ask, replayable=replayable, connect_s=CONNECT_S)
        except BaseException:
            self._slots.release()
            raise
        if isinstance(answer, Answer):
            self._release(connection)
            return answer
        body = await self._body(connection, answer, self._max_response_bytes, None)
        try:
            headers = dict(answer.headers)
            if headers.get(b"content-encoding", b"identity") != b"identity":
                raise httpx.RemoteProtocolError(f"an answer compressed by {headers[b'content-encoding']!r}, which nobody asked for")
            return Answer(answer.status_code, headers, b"".join([data async for data in body]))
        finally:
            await body.aclose()

    async def aclose(self) -> None:
        """Close the idle connections now, and those in use when they come free."""
        self._closed = True
        for idle in self._idle.values():
            while idle:
                self._close(idle.pop())

    async def _asked(
        self, origin: Origin, ask: Callable[[Connection], Awaitable[T]], *, replayable: bool, connect_s: float | None
    ) -> tuple[Connection, T]:
        """A connection and what it answered: an idle one, or a new one, also where the idle one turned out dead."""
        connection = self._take_idle(origin)
        if connection is not None:
            try:
                return connection, await self._or_close(connection, ask)
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                if connection.answered or not replayable:
                    raise
        connection = await self._connect(origin, connect_s)
        return connection, await self._or_close(connection, ask)

    async def _or_close(self, connection: Connection, ask: Callable[[Connection], Awaitable[T]]) -> T:
        try:
            return await ask(connection)
        except BaseException:
            self._close(connection)
            raise

    def _replayable(self, method: str) -> bool:
        return self._replay_posts or method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS")

    async def _body(self, connection: Connection, head: h11.Response, cap: int | None, timeout: float | None) -> _Body:
        body = _Body(connection, self._release, timeout, cap)
        try:
            body.check(head)
        except httpx.TransportError:
            await body.aclose()
            raise
        return body

    async def _take_slot(self, timeout: float | None) -> None:
        try:
            self._slots.acquire_nowait()
        except trio.WouldBlock:
            with _within(timeout, httpx.PoolTimeout):
                await self._slots.acquire()

    def _take_idle(self, origin: Origin) -> Connection | None:
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

    async def _connect(self, origin: Origin, timeout: float | None) -> Connection:
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
        return Connection(origin, stream)

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

    def _release(self, connection: Connection) -> None:
        if connection.reusable() and not self._closed:
            connection.idle_since = trio.current_time()
            self._idle[connection.origin].append(connection)
        else:
            self._close(connection)
        self._slots.release()

    def _close(self, connection: Connection) -> None:
        if not connection.closed:
            self._open -= 1
            connection.close()


class _Body(httpx.AsyncByteStream):
    """A response's body. Its connection goes back to the pool at the end of it, and is closed when it is abandoned before."""

    def __init__(self, connection: Connection, release: Callable[[Connection], None], timeout: float | None, cap: int | None) -> None:
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
