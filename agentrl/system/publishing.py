"""Every snapshot to the engines that live, and every engine that comes to the newest snapshot. Learner rank 0's.

    snapshots ──publish loop──> all members, at once, by the publisher ──────────────> version_published
    roster    ──follow loop──>  a keeper per engine: cold sync ─> member ─> current
                                  └─ fenced: whatever failed; with backoff it is tried again, and given up after GIVE_UP_AFTER failures in a row

A member holds weights that we brought it and takes part in the next publishing. It is current while they are those of the newest version that
is published. An engine is never cold-synced while it takes part in a publishing.

Where engines share the learner's GPUs they sleep while it trains (`lie_down`, `rise`). Falling asleep waits until nothing is published, checked or
cold-synced and holds nothing back meanwhile; whatever comes after that waits until they are awake.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import trio

from agentrl.buffer_api import BufferClient, EngineEntry
from agentrl.engine_api import EngineClient
from agentrl.errors import AgentRLError, EngineError, EngineRefused, PublishError
from agentrl.system.snapshots import SnapshotDirectories
from agentrl.weights import Published, Publisher, Snapshot

__all__ = ["Publishing"]

log = logging.getLogger(__name__)

ROSTER_POLL_S = 30.0  # one long poll; the next follows at once
GIVE_UP_AFTER = 3  # failures in a row, after which an engine is to be restarted
ATTEMPTS = 6  # to bring a version to any engine: each with engines that had just been cold-synced
BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 30.0)  # after so many failures in a row
TELL_EVERY_S = 60.0  # while publishing waits for an engine
# A cold sync that took t seconds and was overtaken by a publishing: versions come every t seconds or more often, so the next publishing brings the
# engine along within this many t. Cold syncs alone might run behind for ever.
PATIENCE = 2.0

Listener = Callable[[Snapshot, Sequence[EngineClient]], Awaitable[None]]


class Publishing:
    """The engines of a run as the learner sees them.

    Args:
        directories: where snapshots are for cold syncs.
        connect: makes the client of an engine, from its URL and index.
        listen: told of every version that is out, with the engines that have it, before the next one is sent.
        sharing: what engines on the learner's GPUs do while it trains: give their memory away, or only pause. None: they have GPUs of their own.
    """

    def __init__(
        self,
        buffer: BufferClient,
        publisher: Publisher,
        directories: SnapshotDirectories,
        *,
        connect: Callable[[str, int], EngineClient],
        listen: Listener,
        sharing: Literal["release", "pause"] | None = None,
    ) -> None:
        self._buffer, self._publisher, self._connect, self._listen = buffer, publisher, connect, listen
        self._directories = directories
        self._engines: dict[tuple[int, int], _Engine] = {}  # by (index, incarnation): those that live
        self._newest: Snapshot | None = None  # the version that engines are brought to
        self._changed = trio.Event()  # replaced at every change
        self._metrics: dict[str, float] = {}
        self._stopped = False
        self._sharing = sharing
        self._night = False  # engines are asleep, or falling asleep
        self._works = 0  # that engines must be awake for and that go on now
        self._expected = -1  # the last version that was handed to the publish loop

    async def first(self, snapshot: Snapshot) -> None:
        """Bring initial or restored weights to every engine by disk. Returns when all that live have them, or failed, and at least one has.

        Raises:
            PublishError: every engine refuses them.
        """
        self._newest, started = snapshot, trio.current_time()
        self._wake()
        await self._until(self._answered, "for an engine to take the first weights")
        if not self._current:
            raise PublishError(f"version {snapshot.version}: every engine refuses it: {'; '.join(e.trouble for e in self._engines.values())}")
        engines = self._current
        await self._listen(snapshot, [engine.client for engine in engines])
        await self._buffer.version_published(
            version=snapshot.version,
            engines=[engine.entry.index for engine in engines],
            seconds=trio.current_time() - started,
            bytes=snapshot.nbytes,
        )

    async def follow_loop(self) -> None:
        """Follow the roster: a keeper for every engine that lives.

        consumes      the buffer's roster
        produces      keepers; their end, and that of their part in a publishing, when an engine is gone
        waits for     a change of the roster
        unblocked by  cancellation at the end of the work
        """
        revision = 0
        try:
            async with trio.open_nursery() as keepers:
                while True:
                    roster = await self._buffer.engines(after=revision, wait_s=ROSTER_POLL_S)
                    revision = roster.revision
                    await self._follow(roster.engines, keepers)
        finally:
            with trio.CancelScope(shield=True):
                await self._close(list(self._engines.values()))

    async def publish_loop(self, snapshots: trio.MemoryReceiveChannel[Snapshot]) -> None:
        """Bring every member to the newest snapshot.

        consumes      snapshots (capacity 1)
        produces      version_published records; engine_current and engine_fenced on the roster
        waits for     a snapshot; then a member; then the members, as long as the publisher's deadlines say
        unblocked by  the train loop closing its end, which ends this loop after the last snapshot is out; the supervisor, where engines stay dead
        """
        async with snapshots:
            async for snapshot in snapshots:
                await self._until(lambda: not self._night)
                with self._working():
                    published = await self._publish(snapshot)
                    if published is None:
                        continue
                    await self._buffer.version_published(
                        version=published.version, engines=list(published.engines), seconds=published.seconds, bytes=published.nbytes
                    )
                    await self._listen(snapshot, [engine.client for engine in self._current])

    def expect(self, version: int) -> None:
        """This version has been handed to the publish loop: engines do not fall asleep before it is out."""
        self._expected = version

    async def lie_down(self) -> None:
        """Put every engine that lives to sleep, when what was handed over is out and no other work goes on. One that does not obey is fenced."""
        await self._until(lambda: not self._works and self._newest is not None and self._newest.version >= self._expected)
        self._night = True
        await _each(list(self._engines.values()), self._put_to_sleep)

    async def rise(self) -> None:
        """Wake those that sleep; in a shielded scope, for they must not sleep on. One that does not wake up is fenced."""
        if self._night:
            with trio.CancelScope(shield=True):
                await _each([engine for engine in self._engines.values() if engine.asleep], self._rouse)
            self._night = False
            self._wake()

    def stop(self) -> None:
        """The run was stopped: wait for no engine any more. The next start publishes its checkpoint's weights anyway."""
        self._stopped = True
        self._wake()

    def take_metrics(self) -> dict[str, float]:
        """The numbers of the last publishing, once."""
        told, self._metrics = self._metrics, {}
        return told

    async def aclose(self) -> None:
        """Leave the publisher's group. The engines' connections close with the follow loop."""
        await self._publisher.aclose()

    async def _publish(self, snapshot: Snapshot) -> Published | None:
        """Send it until at least one engine has it; None where there is none and the run was stopped.

        Raises:
            PublishError: none could be brought to it in ATTEMPTS attempts.
        """
        for attempt in itertools.count(1):
            await self._until(lambda: self._stopped or bool(self._members), f"for an engine, to publish version {snapshot.version}")
            sent = self._members
            if not sent:
                log.warning("version %d is not published: the run was stopped, and no engine lives", snapshot.version)
                return None
            try:
                published = await self._send(snapshot, sent)
            except PublishError as error:
                if attempt == ATTEMPTS:
                    raise
                for engine in sent:
                    await self._fence(engine, str(error))
                continue
            await self._published(snapshot, sent, published)
            return published
        raise AssertionError("unreachable: itertools.count has no end")

    async def _published(self, snapshot: Snapshot, sent: Sequence[_Engine], published: Published) -> None:
        """A version is out: say which engines have it, fence the others."""
        self._newest, self._metrics = snapshot, published.metrics
        reached = [engine for engine in sent if engine.entry.index in published.engines]
        for engine in reached:
            engine.version, engine.failures = snapshot.version, 0
        for engine in reached:
            await self._tell_current(engine)
        for engine in sent:
            if engine not in reached:
                await self._fence(engine, published.fenced.get(engine.entry.index, f"it was not brought to version {snapshot.version}"))
        for engine in self._members:  # that came while it was sent to the others
            if engine not in sent and self._behind(engine):
                await self._tell_fenced(engine, f"version {snapshot.version} overtook it")
        await self._tidy()

    async def _send(self, snapshot: Snapshot, engines: Sequence[_Engine]) -> Published:
        for engine in engines:
            engine.sending = True
        try:
            self._publisher.set_engines([engine.client for engine in engines])
            return await self._publisher.publish(snapshot)
        finally:
            for engine in engines:
                engine.sending = False
            self._wake()

    async def _keep(self, engine: _Engine) -> None:
        """Bring one engine to the newest version whenever it is behind.

        consumes      the newest snapshot, from disk
        produces      a member, that is current; or a fenced engine
        waits for     being behind, and in no publishing; the engine's answer, at most the publisher's deadline; then, where it failed, a while
        unblocked by  the engine leaving the roster; cancellation at the end of the work
        """
        with engine.scope:
            while True:
                await self._until(lambda: self._behind(engine) and not engine.sending and not self._night)
                if engine.member:  # overtaken: the next publishing brings it along, if it comes soon
                    with trio.move_on_after(engine.patience_s):
                        await self._until(lambda: not engine.member or not self._behind(engine))
                    await self._until(lambda: not engine.sending and not self._night)
                if self._behind(engine):
                    engine.member = False
                    with self._working():
                        synced = await self._cold_sync(engine)
                    if not synced:
                        await trio.sleep(BACKOFF_S[min(engine.failures, len(BACKOFF_S)) - 1])

    async def _cold_sync(self, engine: _Engine) -> bool:
        snapshot, began = self._newest, trio.current_time()
        assert snapshot is not None, "an engine is behind something"
        engine.reading = snapshot.version
        try:
            await self._require_awake(engine)
            await self._publisher.cold_sync(engine.client, snapshot.version, await self._directories.path(snapshot))
        except AgentRLError as error:
            engine.refused = isinstance(error, EngineRefused)
            await self._fence(engine, str(error))
            return False
        finally:
            engine.reading = None
        engine.member, engine.patience_s = True, PATIENCE * (trio.current_time() - began)
        engine.version = snapshot.version
        if snapshot is self._newest:
            await self._tell_current(engine)
        self._wake()
        await self._tidy()
        return True

    async def _require_awake(self, engine: _Engine) -> None:
        """Wake an engine that a call without an answer may have left asleep."""
        if engine.released and engine.asleep is None and not await engine.client.ready():
            await engine.client.resume_memory()
        engine.asleep = engine.released = False

    async def _put_to_sleep(self, engine: _Engine) -> None:
        engine.asleep = None
        with trio.CancelScope() as engine.calls:
            try:
                await engine.client.pause("retract")
                if self._sharing == "release":
                    await self._release(engine)
                engine.asleep = True
            except EngineError as error:
                await self._fence(engine, f"it did not fall asleep: {error}")

    async def _release(self, engine: _Engine) -> None:
        before, engine.released = engine.released, True  # also where its answer is lost
        try:
            await engine.client.release_memory()
        except EngineRefused:
            engine.released = before  # nothing was: SGLang ends where it is told to take back what it has not given
            raise

    async def _rouse(self, engine: _Engine) -> None:
        engine.asleep = None
        with trio.CancelScope() as engine.calls:
            try:
                if engine.released:
                    await engine.client.resume_memory()
                    engine.released = False
                if engine.member:  # another may hold half a version: it generates when it has been cold-synced
                    await engine.client.continue_()
                engine.asleep = False
            except EngineError as error:
                await self._fence(engine, f"it did not wake up: {error}")

    async def _follow(self, roster: Sequence[EngineEntry], keepers: trio.Nursery) -> None:
        live = {(entry.index, entry.incarnation): entry for entry in roster}
        gone = [self._engines.pop(key) for key in list(self._engines) if key not in live]
        if any(engine.sending for engine in gone):
            self._publisher.set_engines([engine.client for engine in self._members if engine.sending])
        for key in live.keys() - self._engines.keys():
            entry = live[key]
            engine = self._engines[key] = _Engine(entry=entry, client=self._connect(entry.url, entry.index))
            keepers.start_soon(self._keep, engine)
        self._wake()
        await self._close(gone)

    async def _close(self, engines: Sequence[_Engine]) -> None:
        for engine in engines:  # all of them before anything is awaited: what is told of one that is gone is refused
            engine.scope.cancel()
            engine.calls.cancel()
        for engine in engines:
            await engine.client.aclose()

    async def _tell_current(self, engine: _Engine) -> None:
        engine.trouble = ""
        async with engine.telling:
            if engine.version is not None and not self._behind(engine):  # else whoever fenced or overtook it says so, after us
                await self._buffer.engine_current(engine.entry.index, engine.entry.incarnation, engine.version)
        self._wake()

    async def _tell_fenced(self, engine: _Engine, reason: str, *, give_up: bool = False) -> None:
        async with engine.telling:
            await self._buffer.engine_fenced(engine.entry.index, engine.entry.incarnation, reason, give_up=give_up)

    async def _fence(self, engine: _Engine, reason: str) -> None:
        if engine.scope.cancel_called:
            return  # it is gone, and nothing is left to be fenced
        engine.member, engine.version, engine.trouble = False, None, reason
        engine.failures += 1
        give_up = engine.failures >= GIVE_UP_AFTER
        log.warning("%s is fenced%s: %s", engine.client, ", and given up" if give_up else "", reason)
        await self._tell_fenced(engine, reason, give_up=give_up)
        self._wake()

    async def _tidy(self) -> None:
        if self._newest is not None:
            await self._directories.tidy(self._newest.version, read={e.reading for e in self._engines.values() if e.reading is not None})

    @property
    def _members(self) -> list[_Engine]:
        return [self._engines[key] for key in sorted(self._engines) if self._engines[key].member]

    @property
    def _current(self) -> list[_Engine]:
        return [engine for engine in self._members if not self._behind(engine)]

    def _behind(self, engine: _Engine) -> bool:
        return self._newest is not None and engine.version != self._newest.version

    def _answered(self) -> bool:
        """Whether every engine has the first weights or failed, and one has them or all refuse them."""
        engines = list(self._engines.values())
        answered = bool(engines) and all(engine.member or engine.trouble for engine in engines)
        return answered and (bool(self._current) or all(engine.refused for engine in engines))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Engines do not fall asleep before the end of this. Entered while they are awake."""
        self._works += 1
        try:
            yield
        finally:
            self._works -= 1
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def _until(self, true: Callable[[], bool], why: str = "") -> None:
        """Wait until something is true; with a `why`, say now and then that it is waited for."""
        while not true():
            with trio.move_on_after(TELL_EVERY_S if why else float("inf")) as silence:
                await self._changed.wait()
            if silence.cancelled_caught:
                log.warning("the learner waits %s: %d live, %d have weights", why, len(self._engines), len(self._members))


async def _each(engines: Sequence[_Engine], act: Callable[[_Engine], Awaitable[None]]) -> None:
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(act, engine)


@dataclass(eq=False, kw_only=True)
class _Engine:
    """An engine that lives."""

    entry: EngineEntry
    client: EngineClient
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)  # of its keeper
    version: int | None = None  # it holds, brought there by us
    member: bool = False
    sending: bool = False  # it takes part in the publishing that is going on
    reading: int | None = None  # the version whose directory it loads
    failures: int = 0  # in a row: since a publishing reached it
    trouble: str = ""  # the last failure
    refused: bool = False  # ... was a refusal
    telling: trio.Lock = field(default_factory=trio.Lock)  # what is said of it arrives in the order in which it became true
    asleep: bool | None = False  # None: not known
    released: bool = False  # its memory, or it may have
    calls: trio.CancelScope = field(default_factory=trio.CancelScope)  # of those by which it falls asleep or wakes up
    patience_s: float = 0.0  # how long it waits for a publishing that brings it along
