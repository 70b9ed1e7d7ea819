import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from retriever.connections import HEAD_S, MAX_HEAD_BYTES, SILENT_S, bounded_protocol

parsers = pytest.mark.parametrize("httptools", [True, False])
REQUEST = b"POST /retrieve HTTP/1.1\r\nhost: r\r\ncontent-length: 4\r\n\r\n"


class Wire(asyncio.Transport):
    """The other end of a connection: what was written, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is set by hand."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(3):  # a timer, the task it wakes, and what that one calls
            self.run_until_complete(_nothing())


async def _nothing() -> None:
    pass


async def echo(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": message["body"]})


class Connection:
    def __init__(self, httptools: bool) -> None:
        self.clock, self.wire = Clock(), Wire()
        config = uvicorn.Config(echo, lifespan="off", log_config=None)
        config.load()
        state: Any = {}
        self.protocol: Any = bounded_protocol(httptools=httptools)(config=config, server_state=ServerState(), app_state=state, _loop=self.clock)  # type: ignore[call-arg]
        self.protocol.connection_made(self.wire)

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *raised: object) -> None:
        self.protocol.connection_lost(None)
        self.clock.pass_by(0)
        self.clock.close()

    def send(self, data: bytes, *, then_s: float = 0.0) -> None:
        self.protocol.data_received(data)
        self.clock.pass_by(then_s)


@parsers
def test_a_connection_that_says_nothing_is_closed(httptools: bool):
    with Connection(httptools) as connection:
        connection.clock.pass_by(SILENT_S - 1)
        assert not connection.wire.closed
        connection.clock.pass_by(2)
        assert connection.wire.closed


@parsers
def test_a_head_that_comes_byte_by_byte_is_cut_off_in_time(httptools: bool):
    with Connection(httptools) as connection:
        for i in range(int(HEAD_S) - 1):
            connection.send(REQUEST[i : i + 1], then_s=1.0)
            assert not connection.wire.closed
        connection.send(b"x", then_s=2.0)
        assert connection.wire.closed


@parsers
def test_requests_on_one_connection_are_answered_however_long_it_lives(httptools: bool):
    with Connection(httptools) as connection:
        for number in range(1, 6):
            connection.send(REQUEST[:30], then_s=HEAD_S - 1)
            connection.send(REQUEST[30:], then_s=HEAD_S + 1)  # the body takes longer: its reader's affair
            connection.send(b"body", then_s=1.0)
            assert connection.wire.written.count(b"body") == number
            assert not connection.wire.closed


@parsers
@pytest.mark.parametrize("first", [b"", REQUEST + b"body"])
def test_a_head_without_end_is_cut_off(httptools: bool, first: bytes):
    with Connection(httptools) as connection:
        if first:
            connection.send(first)
            assert connection.wire.written.endswith(b"body")
        connection.send(b"GET / HTTP/1.1\r\nx: ")
        sent = 0
        while not connection.wire.closed:
            connection.send(b"x" * 1024)
            sent += 1024
        assert 16_000 < sent <= MAX_HEAD_BYTES
