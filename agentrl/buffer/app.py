"""The replay buffer over HTTP: one POST route per call of `buffer_api.BufferClient`, msgpack in and out.

A reply leaves when the records it rests on are acknowledged; calls of one turn of the event loop share one write (and one fsync). Long
polls wait on signals, which fire when something they wait for may be there.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.buffer.buffer import Caller, ReplayBuffer
from agentrl.buffer_api import Outcome
from agentrl.errors import AgentRLError, Failure, JournalError, StaleIncarnation, WireError
from agentrl.wire import pack, unpack

__all__ = ["create_app", "spare_the_held"]

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 60.0  # of a long poll, whatever the client asks for
RETRY_WRITE_S = 0.5  # while the disk is full
NEVER = 1 << 30  # collections of the younger objects between two of all
CLIENT_GONE = 499  # nginx's word for it: nobody gets to read it


def create_app(buffer: ReplayBuffer) -> Starlette:
    """The buffer as an application. The journal is closed at its end."""
    server = _Server(buffer)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(server.commit_loop()), tasks.create_task(server.evaluation_loop())]
            server.background = background
            yield
            for task in background:
                task.cancel()
        buffer.close()

    async def health(_: Request) -> Response:
        alive = not any(task.done() for task in server.background)
        return Response(b"ok" if alive else b"a background loop has ended", status_code=200 if alive else 503, media_type="text/plain")

    routes = [Route(f"/{name}", server.endpoint(call), methods=["POST"]) for name, call in server.calls.items()]
    return Starlette(routes=[*routes, Route("/health", health, methods=["GET"])], lifespan=lifespan)


def spare_the_held() -> None:
    """Have Python look for garbage among young objects alone, from now on in this process.

    What the buffer holds has no cycles, and there may be a million objects of it: looking through all of them again and again took a tenth of
    the buffer's time and stopped every caller for an eighth of a second.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


_CHANGES = (
    *("close_tickets", "batch_trained", "reserve_version", "version_published", "version_superseded", "checkpoint_committed"),
    *("rollback", "register", "worker_died", "stop", "fail"),
)
_ROSTER_CHANGES = ("engine_died", "engine_current", "engine_fenced")  # and `register`
# Nobody waits for what these change, but for the roster, which has a signal of its own.
_QUESTIONS = ("take_tickets", "take_batch", "sync_journal", "heartbeat", "status", "events", "engines", *_ROSTER_CHANGES)
_UNRECORDED = ("heartbeat", "status", "engines", *_ROSTER_CHANGES)  # answered also while the journal cannot be written

T = TypeVar("T")
Body = Mapping[str, Any]
Call = Callable[[Caller, Body], Coroutine[Any, Any, Any]]


class _Server:
    """The calls, and the two loops beside them."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._changed = asyncio.Event()  # replaced at every change: see `_wake`
        self._roster_changed = asyncio.Event()  # replaced when the roster changes, which is seldom: every worker waits for it
        self._append = asyncio.Event()  # something waits to be written
        self._written: asyncio.Future[None] | None = None  # of the next write
        self._acknowledged = buffer.journal.written  # bytes of the journal
        self.background: list[asyncio.Task[None]] = []
        self.calls: dict[str, Call] = {name: getattr(self, name) for name in (*_CHANGES, *_QUESTIONS)}

    def endpoint(self, call: Call) -> Callable[[Request], Awaitable[Response]]:
        """The route's handler: decode, refuse outdated callers, call, wait for the journal, encode; errors as the client expects them."""

        changes = call.__name__ in _CHANGES

        async def handle(request: Request) -> Response:
            try:
                body = unpack(await request.body())
                caller = _caller(body)
                self._buffer.check(caller)
                try:
                    reply = await call(caller, body)
                finally:
                    if changes:  # also where it failed in the middle
                        self._wake()
                if call.__name__ not in _UNRECORDED:
                    await self._committed()
                return _response(reply)
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            except (AgentRLError, KeyError, TypeError, ValueError) as error:
                return _refusal(error)

        return handle

    # -- calls --------------------------------------------------------------------------------------------------------------------

    async def take_tickets(self, caller: Caller, body: Body) -> Any:
        request, want = int(body["request"]), int(body["want"])

        def attempt() -> Any:
            found = self._buffer.take_tickets(caller, request=request, want=want)
            return found if found.grants or found.ended or found.cancelled else None

        found = await self._poll(caller, attempt, body)
        return {"grants": [], "ended": False, "cancelled": []} if found is None else found.to_plain()

    async def close_tickets(self, caller: Caller, body: Body) -> Any:
        return list(self._buffer.close_tickets([Outcome.from_plain(value) for value in body["outcomes"]]))

    async def take_batch(self, caller: Caller, body: Body) -> Any:
        number = int(body["number"])
        found = await self._poll(caller, lambda: self._buffer.take_batch(caller, number=number), body)
        return None if found is None else found.to_plain()

    async def batch_trained(self, caller: Caller, body: Body) -> Any:
        started_s, ended_s = body["seconds"]
        reply = self._buffer.batch_trained(
            caller,
            batch=body["batch"],
            updates_done=body["updates_done"],
            updates_skipped=body["updates_skipped"],
            seconds=(started_s, ended_s),
            metrics=body["metrics"],
        )
        return asdict(reply)

    async def reserve_version(self, caller: Caller, body: Body) -> Any:
        return self._buffer.reserve_version(caller, reason=body["reason"])

    async def version_published(self, caller: Caller, body: Body) -> Any:
        arguments = {name: body[name] for name in ("version", "engines", "seconds", "bytes")}
        self._buffer.version_published(**arguments)

    async def version_superseded(self, caller: Caller, body: Body) -> Any:
        self._buffer.version_superseded(body["version"])

    async def sync_journal(self, caller: Caller, body: Body) -> Any:
        mark = self._buffer.mark()
        await self._committed(always=True)
        await asyncio.to_thread(self._buffer.journal.sync)
        return asdict(mark)

    async def checkpoint_committed(self, caller: Caller, body: Body) -> Any:
        self._buffer.checkpoint_committed(body["manifest"])

    async def rollback(self, caller: Caller, body: Body) -> Any:
        return asdict(self._buffer.rollback(caller, body["manifest"], bad_after=body["bad_after"]))

    async def heartbeat(self, caller: Caller, body: Body) -> Any:
        return self._buffer.heartbeat(caller, body["note"])

    async def register(self, caller: Caller, body: Body) -> Any:
        role, index, incarnation = body["who"]
        self._buffer.register(role=role, index=index, incarnation=incarnation, url=body["url"])
        self._wake_roster()

    async def worker_died(self, caller: Caller, body: Body) -> Any:
        self._buffer.worker_died(body["worker"])

    async def engine_died(self, caller: Caller, body: Body) -> Any:
        index, incarnation = body["engine"]
        self._buffer.engines.dead(index, incarnation)
        self._wake_roster()

    async def engine_current(self, caller: Caller, body: Body) -> Any:
        index, incarnation = body["engine"]
        told = self._buffer.engines.current(index, incarnation, int(body["version"]))
        self._wake_roster()
        return told

    async def engine_fenced(self, caller: Caller, body: Body) -> Any:
        index, incarnation = body["engine"]
        told = self._buffer.engines.fenced(index, incarnation, str(body["reason"]), give_up=bool(body["give_up"]))
        self._wake_roster()
        return told

    async def engines(self, caller: Caller, body: Body) -> Any:
        after = int(body["after"])
        deadline = _deadline(body)
        while (roster := self._buffer.engines.roster).revision == after:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._roster_changed.wait()
            except TimeoutError:
                break
            self._buffer.check(caller)
        return roster.to_plain()

    async def stop(self, caller: Caller, body: Body) -> Any:
        self._buffer.stop(body["reason"])

    async def fail(self, caller: Caller, body: Body) -> Any:
        self._buffer.fail(Failure(**body["failure"]))

    async def status(self, caller: Caller, body: Body) -> Any:
        return self._buffer.status()

    async def events(self, caller: Caller, body: Body) -> Any:
        after = int(body["after"])
        found = await self._poll(caller, lambda: self._buffer.events(after) or None, body) or []
        return [found, found[-1]["seq"] if found else after]

    # -- loops --------------------------------------------------------------------------------------------------------------------

    async def commit_loop(self) -> None:
        """Bring appended records to the file.

        consumes      records appended by calls
        produces      acknowledgements: the future all calls of one turn of the event loop wait for
        waits for     the first append since the last write; half a second while the disk is full
        unblocked by  cancellation at the end of the server
        """
        while True:
            await self._append.wait()
            await asyncio.sleep(0)  # let the other calls of this turn join
            self._append.clear()
            written, self._written = self._written, None
            try:
                self._buffer.journal.write()
                reached = self._buffer.journal.written
                if self._buffer.settings.acknowledge == "fsync":
                    await asyncio.to_thread(self._buffer.journal.sync)
            except JournalError as error:
                log.error("%s", error)
                _settle(written, error)
                await asyncio.sleep(RETRY_WRITE_S)
                self._append.set()
            else:
                self._acknowledged = reached
                _settle(written, None)

    async def evaluation_loop(self) -> None:
        """Have finished evaluations reported.

        consumes      evaluations that have all their outcomes
        produces      evaluation_ended records, or the end of the run where reporting failed
        waits for     a change; then the hook, in a thread
        unblocked by  cancellation at the end of the server
        """
        while True:
            changed = self._changed
            result = self._buffer.evaluation_due()
            if result is None:
                await changed.wait()
                continue
            hook = self._buffer.on_evaluation
            try:
                payload = dict(await asyncio.to_thread(hook, result)) if hook is not None else {}
            except Exception as error:  # somebody's hook: a run whose evaluation cannot be reported has no result
                log.exception("the evaluation %s could not be reported", result.evaluation)
                self._buffer.fail(Failure.of(error))
                self._wake()
                await asyncio.Event().wait()  # the run is over
            self._buffer.evaluation_ended(result.evaluation, payload)
            self._wake()

    # -- waiting ------------------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Wake those who wait for a change, which has just been made, and have its records written."""
        self._append.set()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _wake_roster(self) -> None:
        """Wake those who wait for the roster, which may have changed."""
        changed, self._roster_changed = self._roster_changed, asyncio.Event()
        changed.set()

    async def _poll(self, caller: Caller, attempt: Callable[[], T | None], body: Body) -> T | None:
        """What `attempt` finds, tried again at every change for at most `wait_s`."""
        deadline = _deadline(body)
        while True:
            changed = self._changed
            self._buffer.check(caller)  # it may have been replaced while it waited: what it takes would be lost
            found = attempt()
            if found is not None:
                return found
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return None

    async def _committed(self, *, always: bool = False) -> None:
        """Wait until what was appended so far is acknowledged.

        Raises:
            JournalError: it could not be written now. It is not lost: the same call again gets its answer when it is.
        """
        target = self._buffer.journal.appended
        while self._acknowledged < target:
            if self._written is None:
                self._written = asyncio.get_running_loop().create_future()
            self._append.set()
            if self._buffer.settings.acknowledge == "memory" and not always:
                return
            await asyncio.shield(self._written)


def _caller(body: Body) -> Caller:
    return Caller(role=str(body["role"]), index=int(body["index"]), incarnation=int(body["incarnation"]))


def _deadline(body: Body) -> float:
    """The end of a long poll, by the loop's clock."""
    return asyncio.get_running_loop().time() + min(float(body["wait_s"]), LONGEST_WAIT_S)


def _settle(written: asyncio.Future[None] | None, error: JournalError | None) -> None:
    if written is None or written.done():
        return
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)
        written.exception()  # seen, also where every waiter has gone


def _response(reply: Any, status_code: int = 200) -> Response:
    return Response(pack(reply), status_code=status_code, media_type="application/msgpack")


def _refusal(error: Exception) -> Response:
    if isinstance(error, AgentRLError):
        status_code = 409 if isinstance(error, StaleIncarnation) else 503 if isinstance(error, JournalError) else 400
        return _response({"kind": type(error).__name__, "error": str(error)}, status_code)
    log.error("a malformed call", exc_info=error)
    return _response({"kind": WireError.__name__, "error": f"a malformed call: {error!r}"}, 400)
