"""One snapshot over one group, once.

    open ─> bucket 0 ─> bucket 1 ─> ... ─> close             per member: [pause] begin ... end [continue]
              └ while it travels its checksum is made, and the next one gathered (members that stage; others pause when all are)

A bucket is one message of metadata to every member and one broadcast, or several of its pieces where all members know that. It has one deadline.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from agentrl.config.weights import WeightsRecipe
from agentrl.errors import EngineError, EngineRefused, PublishError
from agentrl.weights.group import UpdateGroup
from agentrl.weights.joint import JointFailure, together
from agentrl.weights.member import Member, if_stopped
from agentrl.weights.snapshot import Bucket, Snapshot

__all__ = ["Failures", "Transfer"]

# Beyond the deadline of the collective, for the answer to it.
_ANSWER_S = 1.0


@dataclass(kw_only=True, slots=True)
class Failures:
    """What came of it for the members that did not get there."""

    guilty: dict[Member, str] = field(default_factory=dict)  # left out from now on
    again: dict[Member, str] = field(default_factory=dict)  # may be tried once more

    @property
    def any(self) -> bool:
        """Whether somebody did not get there."""
        return bool(self.guilty or self.again)

    @classmethod
    def of(cls, parts: Sequence[Failures]) -> Failures:
        """Those of several groups."""
        failures = cls()
        for part in parts:
            failures.guilty |= part.guilty
            failures.again |= part.again
        return failures


class Transfer:
    """A snapshot's way to the members of a group. `scope` cancels it."""

    def __init__(self, group: UpdateGroup, snapshot: Snapshot, recipe: WeightsRecipe) -> None:
        self.group, self.scope = group, trio.CancelScope()
        self.broadcast_s = 0.0
        self._snapshot, self._recipe = snapshot, recipe
        self._half: set[Member] = set()  # may hold a part of the version
        self._done: set[Member] = set()

    async def run(self, *, formed: bool) -> Failures:
        """Send it. After a failure the group is dissolved, and no member is left in a session; where the run is stopped, none is left paused."""
        async with if_stopped(partial(self._settle, stopped=True)):
            failures = await self._tried(formed=formed)
            if failures.any:
                await self._settle(stopped=False)
            return failures

    async def _tried(self, *, formed: bool) -> Failures:
        try:
            with self.scope:
                if not formed:
                    await self.group.form()
                await self._send()
                return Failures()
            return Failures(guilty=dict.fromkeys(self.group.members, "it left while it was sent to"))
        except JointFailure as failure:
            return self._of(failure)
        except PublishError as error:  # ours alone: the snapshot
            return Failures(guilty={member: str(error) for member in self.group.members})

    def _of(self, failure: JointFailure) -> Failures:
        """A refusal before the first bucket may have a cause that settling takes away; others may do as they did in vain before."""
        rest = {member: str(failure) for member in self.group.members if member not in failure.guilty and member not in self._done}
        if isinstance(failure, _Refused) and not self._half:
            return Failures(again=rest | failure.guilty)
        return Failures(guilty=failure.guilty, again=rest)

    async def _send(self) -> None:
        if not all(member.staged for member in self.group.members):  # they pause first of all, which gathering must not make longer
            await trio.to_thread.run_sync(lambda: self._snapshot.buckets, abandon_on_cancel=True)
        ready = await self._beside(lambda: _all(self.group.members, lambda member: member.open()), 0)
        started, number = time.perf_counter(), 0
        while ready is not None:
            # The last one names the version, so it is known to be the last before it leaves.
            last = await trio.to_thread.run_sync(self._snapshot.bucket, number + 1, abandon_on_cancel=True) is None
            self._half.update(self.group.members)
            number += 1
            ready = await self._beside(partial(self._bucket, ready, last=last), number)
        self.broadcast_s = time.perf_counter() - started
        checksums = [self._snapshot.bucket_checksum(done) for done in range(number)]
        await _all(self.group.members, lambda member: member.close(checksums), done=self._done)

    async def _beside(self, act: Callable[[], Awaitable[None]], number: int) -> Bucket | None:
        """`act`, while the checksum of the bucket before `number` is made and that one gathered. It, None behind the last."""
        ready: Bucket | None = None
        error: PublishError | None = None

        async def prepare() -> None:
            nonlocal ready, error
            try:
                ready = await trio.to_thread.run_sync(_prepared, self._snapshot, number, abandon_on_cancel=True)
            except PublishError as broken:
                error = broken

        async with trio.open_nursery() as nursery:
            nursery.start_soon(prepare)
            try:
                await act()
            except PublishError as failure:
                error = failure
                nursery.cancel_scope.cancel()
        if error is not None:
            raise error
        return ready

    async def _bucket(self, bucket: Bucket, *, last: bool) -> None:
        async def call(member: Member) -> None:
            await member.engine.update_from_distributed(
                bucket.header,
                group=self.group.name,
                version=self._snapshot.version if last else None,
                flush_cache=last and self._recipe.pause != "in_place",
                piece_bytes=self.group.piece_bytes,
                deadline_s=self.group.deadline_s + _ANSWER_S,
            )

        await together(self.group.members, call, lambda: self.group.broadcast(bucket.flat))

    async def _settle(self, *, stopped: bool) -> None:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for member in self.group.members:
                    if member not in self._done:
                        nursery.start_soon(member.settle_stopped if stopped else partial(member.settle, whole=member not in self._half))
                nursery.start_soon(self.group.dissolve)


def _prepared(snapshot: Snapshot, number: int) -> Bucket | None:
    if number:
        snapshot.bucket_checksum(number - 1)
    return snapshot.bucket(number)


class _Refused(JointFailure):
    """Members refused; nothing else is wrong."""


async def _all(members: Sequence[Member], act: Callable[[Member], Awaitable[None]], *, done: set[Member] | None = None) -> None:
    """A step of every member, side by side, each to its end."""
    errors: dict[Member, EngineError] = {}

    async def one(member: Member) -> None:
        try:
            await act(member)
            if done is not None:
                done.add(member)
        except EngineError as error:
            errors[member] = error

    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(one, member)
    if errors:
        kind = _Refused if all(isinstance(error, EngineRefused) for error in errors.values()) else JointFailure
        raise kind({member: str(error) for member, error in errors.items()}, "; ".join(str(error) for error in errors.values()))
