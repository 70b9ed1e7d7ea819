"""One HTTP/1.1 connection of a client: requests out, answers in, by h11, and past it where an answer is plain.

A plain answer is a head and as many bytes as the head says. Nearly all are, and reading one takes a few lines; whatever else HTTP allows is h11's.
"""

from __future__ import annotations

import re
import select
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import h11
import httpx
import trio

__all__ = ["Answer", "Connection", "Endpoint", "Origin", "ResponseTooLarge", "origin_of"]

READ_BYTES = 64 * 1024
MAX_HEADER_BYTES = 64 * 1024

Origin = tuple[bytes, bytes, int]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    status_code: int
    headers: Mapping[bytes, bytes]  # names in lower case
    content: bytes

    @property
    def text(self) -> str:
        """The content, where it is text for people."""
        return self.content.decode(errors="replace")


class ResponseTooLarge(httpx.TransportError):
    """A response's body exceeded its cap, or is compressed so that a cap would not bound what it unpacks to."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go that differ in their content only."""

    origin: Origin
    method: str
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    head: bytes  # of a request, up to the content's length

    @classmethod
    def of(cls, request: httpx.Request) -> Endpoint:
        """That of a request without content."""
        headers = tuple((name, value) for name, value in request.headers.raw if name.lower() != b"content-length")
        try:
            started = h11.Connection(h11.CLIENT).send(h11.Request(method=request.method, target=request.url.raw_path, headers=list(headers)))
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error), request=request) from error
        head = (started or b"").removesuffix(b"\r\n") + b"content-length: "
        return cls(origin_of(request.url), request.method, request.url.raw_path, headers, head)


class Connection:
    """One stream and its h11 state machine, which plain answers to `exchange` pass by."""

    def __init__(self, origin: Origin, stream: trio.abc.Stream) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self.answered = False  # anything of the current response has come
        self.closed = False
        self._plain = False  # the last answer passed h11 by, and is read to its end
        self._more = True  # the server has not ended the stream
        self._stream = stream
        self._tls = isinstance(stream, trio.SSLStream)
        self._socket = _socket_of(stream)
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)

    async def exchange(self, endpoint: Endpoint, content: bytes, cap: int | None) -> Answer | h11.Response:
        """The answer. One that is not plain (chunked, interim, the server's last, ...) is left to h11: then its head, and `data` has the rest."""
        self.answered = self._plain = False
        try:
            await self._send(b"%b%d\r\n\r\n%b" % (endpoint.head, len(content), content))
            received = await self._receive()
            while (end := received.find(b"\r\n\r\n")) < 0 and b"\n\n" not in received and self._more and len(received) <= MAX_HEADER_BYTES:
                received += await self._receive()
            plain = None if end < 0 or endpoint.method == "HEAD" else _plain_head(received[:end])
            if plain is None:
                return await self._left_to_h11(endpoint, content, received)
            status_code, length, headers = plain
            if cap is not None and length > cap:
                raise ResponseTooLarge(f"a response of {length} bytes exceeds the limit of {cap}")
            pieces, missing = [received[end + 4 :]], length - (len(received) - end - 4)
            while missing > 0 and self._more:
                pieces.append(await self._receive())
                missing -= len(pieces[-1])
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            kind = httpx.ReadError if self.answered else httpx.WriteError
            raise kind(f"the connection broke in an exchange: {error}") from error
        if missing > 0:
            raise httpx.RemoteProtocolError("the server closed the connection within a response")
        self._plain = missing == 0  # more than the answer: nobody knows what it is
        return Answer(status_code, headers, b"".join(pieces)[:length])

    async def _left_to_h11(self, endpoint: Endpoint, content: bytes, received: bytes) -> h11.Response:
        """Let h11 catch up: it is told of the request, which is sent, and of what has been received."""
        headers = (*endpoint.headers, (b"content-length", b"%d" % len(content)))
        self._http.send(h11.Request(method=endpoint.method, target=endpoint.target, headers=list(headers)))
        self._body(content)
        self._http.receive_data(received)
        if not self._more and received:
            self._http.receive_data(b"")
        return await self.head()

    async def _send(self, data: bytes) -> None:
        sent = 0 if self._tls else await self._socket.send(data)  # nearly always all of it; the stream's own way is slower
        if sent < len(data):
            await self._stream.send_all(memoryview(data)[sent:])

    async def _receive(self) -> bytes:
        data = bytes(await self._stream.receive_some(READ_BYTES)) if self._tls else await self._socket.recv(READ_BYTES)
        self._more = bool(data)
        self.answered = self.answered or self._more
        return data

    async def send(self, request: httpx.Request) -> None:
        self.answered = self._plain = False
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
                self._http.receive_data(await self._receive())
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from error
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise httpx.ReadError(f"the connection broke while waiting for the response: {error}") from error
        return event

    def reusable(self) -> bool:
        """Whether another request can follow; makes ready for it."""
        if self.closed or self._plain:
            return not self.closed
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
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


def origin_of(url: httpx.URL) -> Origin:
    scheme = url.raw_scheme
    if scheme not in (b"http", b"https"):
        raise httpx.UnsupportedProtocol(f"expected an http:// or https:// URL, got {url!r}")
    return scheme, url.raw_host, url.port or (443 if scheme == b"https" else 80)


def _socket_of(stream: trio.abc.Stream) -> trio.socket.SocketType:
    plain = stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
    return cast(trio.SocketStream, plain).socket


def _plain_head(head: bytes) -> tuple[int, int, dict[bytes, bytes]] | None:
    """Status, length and headers of a response that is nothing but a head and as many bytes as it says; None of any other."""
    status, *lines = head.split(b"\r\n")
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        headers[name.lower()] = value.strip()
        if not colon or not name.isascii() or name.strip() != name:
            return None
    length = headers.get(b"content-length", b"")
    plain = _PLAIN_STATUS.match(status) and length.isdigit() and len(headers) == len(lines) and _NOT_PLAIN.isdisjoint(headers)
    return (int(status[9:12]), int(length), headers) if plain else None


_PLAIN_STATUS = re.compile(rb"HTTP/1\.1 (?!204|304)[2-5]\d\d( |$)")
_NOT_PLAIN = frozenset({b"connection", b"transfer-encoding", b"content-encoding", b"upgrade"})
