"""`POST /generate`: from a body to sequences in the scheduler and back, and what happens when the client goes away.

Plain ASGI: at a few hundred requests per second a request object and its machinery cost as much as the model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from agentrl.engine.replies import failure_status, generate_reply, stream_reply
from agentrl.engine.request import GenerateRequest, Limits, RequestRefused, malformed, parse_generate
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sequence import Progress, Sequence
from agentrl.engine.stops import TokenText
from agentrl.engine.thread import EngineThread
from agentrl.errors import EngineUnavailable

__all__ = ["Generation"]

_STOPPED = "the engine has stopped"
_DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class _Flight:
    """A sequence in the engine, as the event loop knows it."""

    sequence: Sequence
    index: int  # in its batch
    outcome: asyncio.Future[Sequence]
    news: asyncio.Event | None  # of the stream it belongs to
    progress: Progress | None = None  # the newest that was not sent: chunks are cumulative, so a slow reader misses nothing


class Generation:
    """The requests in flight, and the ASGI endpoint that brings them. Lives on one event loop."""

    def __init__(self, scheduler: Scheduler, limits: Limits, text: TokenText | None, *, threads: int) -> None:
        self.thread = EngineThread(
            scheduler,
            threads=threads,
            deliver=partial(self._on_loop, self._resolve),
            on_failure=partial(self._on_loop, self._engine_failed),
            tell=partial(self._on_loop, self._note),
        )
        self._scheduler = scheduler
        self._limits = limits
        self._text = text
        self._inflight: dict[str, _Flight] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to serve, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    async def stop(self) -> None:
        """End the engine thread and fail what is in flight."""
        await asyncio.to_thread(self.thread.stop)
        self._fail_all(EngineUnavailable(_STOPPED))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        streamed = False
        try:
            body = await _read_json(receive)
            streamed = isinstance(body, dict) and body.get("stream") is True
            requests, batched = parse_generate(body, self._limits, self._text)
            if streamed:
                await self._stream(requests, batched, receive, send)
            else:
                await self._answer(requests, batched, receive, send)
        except RequestRefused as refusal:
            if streamed and not refusal.at_the_gate:
                await _send_events(send, _error_event(str(refusal), refusal.status), start=True, end=True)
            else:
                await _send_json(send, refusal.status, refusal.body)
        except ClientDisconnect:
            return
        except EngineUnavailable as error:
            await _send_json(send, 503, {"error": {"message": str(error)}})

    async def _answer(self, requests: list[GenerateRequest], batched: bool, receive: Receive, send: Send) -> None:
        """Wait for the sequences and send them; a client that leaves aborts them."""
        futures = [flight.outcome for flight in self._submit(requests, None)]
        everything = asyncio.gather(*futures) if len(futures) > 1 else futures[0]
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(_gone(receive))
            await asyncio.wait((everything, watcher), return_when=asyncio.FIRST_COMPLETED)
            watcher.cancel()
        if not everything.done():
            everything.cancel()
            self._abandon(requests)
            return
        result = everything.result()
        finished = result if isinstance(result, list) else [result]
        for sequence in finished:
            status = failure_status(sequence)
            if status is not None:
                await _send_json(send, status, {"error": {"message": (sequence.finish or {}).get("message", "")}})
                return
        replies = [generate_reply(sequence, self._text) for sequence in finished]
        await _send_json(send, 200, replies if batched else replies[0])

    async def _stream(self, requests: list[GenerateRequest], batched: bool, receive: Receive, send: Send) -> None:
        """Send what the sequences have, as they have it.

        consumes      progress and outcomes of the sequences
        produces      server-sent events
        waits for     the next news of any of them, and for the client to read
        unblocked by  the last outcome, or the client's leaving, which aborts them
        """
        news = asyncio.Event()
        flights = self._submit(requests, news)
        await _send_events(send, b"", start=True)
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(_gone(receive))
            watcher.add_done_callback(lambda _: news.set())
            while flights and not watcher.done():
                await news.wait()
                news.clear()
                ended = [flight for flight in flights if flight.outcome.done()]
                for flight in flights:
                    event = self._event(flight, batched)
                    if event is not None:
                        await _send_events(send, event)
                flights = [flight for flight in flights if flight not in ended]
            watcher.cancel()
        if flights:
            self._abandon([flight.sequence.request for flight in flights])
        else:
            await _send_events(send, b"", end=True)

    def _event(self, flight: _Flight, batched: bool) -> bytes | None:
        """What is new of a sequence: its end, or how far it has come."""
        progress, flight.progress = flight.progress, None
        if flight.outcome.done():
            error = flight.outcome.exception()
            if error is not None:
                return _error_event(str(error), 503)
            sequence = flight.outcome.result()
            status = failure_status(sequence)
            if status is not None:
                return _error_event((sequence.finish or {}).get("message", ""), status)
            reply = generate_reply(sequence, self._text)
        elif progress is not None:
            reply = stream_reply(flight.sequence, progress, self._text)
        else:
            return None
        return _data_event(reply | {"index": flight.index} if batched else reply)

    def _submit(self, requests: list[GenerateRequest], news: asyncio.Event | None) -> list[_Flight]:
        taken = [request.rid for request in requests if request.rid in self._inflight]
        if taken:
            raise RequestRefused(f"Duplicate request ID detected: {min(taken)}")
        loop = asyncio.get_running_loop()
        flights = [
            _Flight(sequence=Sequence.of(request, self._text), index=index, outcome=loop.create_future(), news=news)
            for index, request in enumerate(requests)
        ]
        for flight in flights:
            self.thread.post(partial(self._scheduler.submit, flight.sequence))
            if news is not None:
                self.thread.follow(flight.sequence)
        self._inflight |= {flight.sequence.request.rid: flight for flight in flights}
        return flights

    def _abandon(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._inflight.pop(request.rid, None)
            with suppress(EngineUnavailable):  # it has ended, and its requests with it
                self.thread.post(partial(self._scheduler.abort, request.rid))

    def _on_loop(self, callback: Callable[[T], None], value: T) -> None:
        """Called in the engine thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(callback, value)

    def _resolve(self, finished: list[Sequence]) -> None:
        for sequence in finished:
            flight = self._flight(sequence)
            if flight is not None:
                del self._inflight[sequence.request.rid]
                _settle(flight, sequence)

    def _note(self, news: list[tuple[Sequence, Progress]]) -> None:
        for sequence, progress in news:
            flight = self._flight(sequence)
            if flight is not None and flight.news is not None:
                flight.progress = progress
                flight.news.set()

    def _flight(self, sequence: Sequence) -> _Flight | None:
        """None for one that was abandoned, whose name may be in use again."""
        flight = self._inflight.get(sequence.request.rid)
        return flight if flight is not None and flight.sequence is sequence else None

    def _engine_failed(self, error: BaseException) -> None:
        self._fail_all(EngineUnavailable(f"the engine failed: {type(error).__name__}: {error}"))

    def _fail_all(self, error: EngineUnavailable) -> None:
        for flight in self._inflight.values():
            _settle(flight, error)
        self._inflight.clear()


def _settle(flight: _Flight, outcome: Sequence | EngineUnavailable) -> None:
    if not flight.outcome.done():
        if isinstance(outcome, Sequence):
            flight.outcome.set_result(outcome)
        else:
            flight.outcome.set_exception(outcome)
    if flight.news is not None:
        flight.news.set()


async def _read_json(receive: Receive) -> Any:
    """The body.

    Raises:
        ClientDisconnect: the client left before it was whole.
        RequestRefused: it is not JSON.
    """
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    try:
        return json.loads(b"".join(parts))
    except ValueError as error:
        raise malformed(f"the body is not JSON: {error}") from error


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _data_event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _error_event(message: str, status: int) -> bytes:
    """An error in a stream, which has been answered 200."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _data_event({"error": {"message": message, "type": kind, "code": status, "retryable": status == 503}})


async def _send_events(send: Send, data: bytes, *, start: bool = False, end: bool = False) -> None:
    """A piece of an event stream. `start` sends the headers before it, `end` the closing event after it."""
    if start:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
    if data or end:
        await send({"type": "http.response.body", "body": data + (_DONE if end else b""), "more_body": not end})


async def _send_json(send: Send, status: int, body: Any) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
