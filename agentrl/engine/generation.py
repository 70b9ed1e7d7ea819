"""`POST /generate`: from a body to sequences in the scheduler and back, and what happens when the client goes away.

Plain ASGI: at a few hundred requests per second a request object and its machinery cost as much as the model.
"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from agentrl.engine.replies import failure_status, generate_reply
from agentrl.engine.request import GenerateRequest, Limits, RequestRefused, malformed, parse_generate
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sequence import Sequence
from agentrl.engine.stops import TokenText
from agentrl.engine.thread import EngineThread
from agentrl.errors import EngineUnavailable

__all__ = ["Generation"]

_STOPPED = "the engine has stopped"


class Generation:
    """The requests in flight, and the ASGI endpoint that brings them. Lives on one event loop."""

    def __init__(self, scheduler: Scheduler, limits: Limits, text: TokenText | None, *, threads: int) -> None:
        self.thread = EngineThread(scheduler, threads=threads, deliver=self._deliver, on_failure=self._engine_failed)
        self._scheduler = scheduler
        self._limits = limits
        self._text = text
        self._inflight: dict[str, tuple[Sequence, asyncio.Future[Sequence]]] = {}
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
        try:
            body = await _read_json(receive)
            requests, batched = parse_generate(body, self._limits, self._text)
            finished = await self._generate(requests, receive)
        except RequestRefused as refusal:
            await _send_json(send, refusal.status, refusal.body)
        except ClientDisconnect:
            return
        except EngineUnavailable as error:
            await _send_json(send, 503, {"error": {"message": str(error)}})
        else:
            if finished is not None:
                await self._answer(send, finished, batched)

    async def _generate(self, requests: list[GenerateRequest], receive: Receive) -> list[Sequence] | None:
        """The finished sequences; None if the client left, which aborts them."""
        futures = self._submit(requests)
        everything = asyncio.gather(*futures) if len(futures) > 1 else futures[0]
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(_gone(receive))
            await asyncio.wait((everything, watcher), return_when=asyncio.FIRST_COMPLETED)
            watcher.cancel()
        if not everything.done():
            everything.cancel()
            self._abandon(requests)
            return None
        result = everything.result()
        return result if isinstance(result, list) else [result]

    def _submit(self, requests: list[GenerateRequest]) -> list[asyncio.Future[Sequence]]:
        taken = {request.rid for request in requests if request.rid in self._inflight}
        if taken or len({request.rid for request in requests}) < len(requests):
            raise RequestRefused(f"Duplicate request ID detected: {min(taken, default=requests[0].rid)}")
        sequences = [Sequence.of(request, self._text) for request in requests]
        for sequence in sequences:
            self.thread.post(partial(self._scheduler.submit, sequence))
        loop = asyncio.get_running_loop()
        self._inflight |= {sequence.request.rid: (sequence, loop.create_future()) for sequence in sequences}
        return [self._inflight[sequence.request.rid][1] for sequence in sequences]

    def _abandon(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._inflight.pop(request.rid, None)
            self.thread.post(partial(self._scheduler.abort, request.rid))

    async def _answer(self, send: Send, finished: list[Sequence], batched: bool) -> None:
        for sequence in finished:
            status = failure_status(sequence)
            if status is not None:
                await _send_json(send, status, {"error": {"message": (sequence.finish or {}).get("message", "")}})
                return
        replies = [generate_reply(sequence, self._text) for sequence in finished]
        await _send_json(send, 200, replies if batched else replies[0])

    def _deliver(self, finished: list[Sequence]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._resolve, finished)

    def _resolve(self, finished: list[Sequence]) -> None:
        for sequence in finished:
            rid = sequence.request.rid
            # an abandoned request's name may be in use again
            if rid in self._inflight and self._inflight[rid][0] is sequence:
                _, future = self._inflight.pop(rid)
                if not future.done():
                    future.set_result(sequence)

    def _engine_failed(self, error: BaseException) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._fail_all, EngineUnavailable(f"the engine failed: {type(error).__name__}: {error}"))

    def _fail_all(self, error: EngineUnavailable) -> None:
        for _, future in self._inflight.values():
            if not future.done():
                future.set_exception(error)
        self._inflight.clear()


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


async def _send_json(send: Send, status: int, body: Any) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
