"""Bringing a snapshot to the engines: by process groups (NCCL, gloo) or by disk.

    begin ─> buckets by broadcast ─> end: commit                     engines that stage updates (embedded): generation rests for the commit only
    pause ─> begin ─> buckets ─> end ─> continue ─> checksums        engines that do not (SGLang)

A version's reservation is in the journal before the first byte leaves. An engine that fails is fenced: it is left out of this version, and comes
back by `cold_sync`. With gloo every engine has a group of its own, because a gloo broadcast cannot be given up and one that hangs would hold up
the others. NCCL has one group for all; it is dissolved after any failure and formed anew by the survivors, under a fresh name and port, and the
version is sent once more. No engine generates with half a version: it is paused until it has a whole one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from agentrl.config.weights import WeightsRecipe
from agentrl.engine_api import EngineClient
from agentrl.errors import EngineError, PublishError
from agentrl.weights.group import UpdateGroup
from agentrl.weights.member import Member
from agentrl.weights.replicas import confirmed
from agentrl.weights.snapshot import Snapshot, save_snapshot
from agentrl.weights.transfer import Failures, Transfer

__all__ = ["Published", "Publisher"]

log = logging.getLogger(__name__)

_ATTEMPTS = 3  # a session that somebody left open costs one, an engine that dies in a common group another


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A version that `engines` report."""

    version: int
    engines: tuple[int, ...]
    fenced: Mapping[int, str] = field(default_factory=dict)  # index -> why it was left out
    seconds: float
    nbytes: int
    pause_s: Mapping[int, float] = field(default_factory=dict)  # by engine: generation rested so long; computing keys and values anew comes after
    broadcast_s: float = 0.0  # from the first bucket to the last, of the slowest group
    gather_s: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """By the names of docs/metrics.md."""
        pause_s = max(self.pause_s.values(), default=0.0)
        return {"weights/pause_s": pause_s, "weights/broadcast_s": self.broadcast_s, "weights/gather_s": self.gather_s}


class Publisher:
    """Publishes snapshots to a changing set of engines, one at a time. For use under trio, on learner rank 0.

    Args:
        model_dir: where the files besides the weights are taken from when a version goes by disk.
        directory: where versions that go by disk are written.
        device_backend: "nccl" or "gloo", what `backend: auto` means here.
        address: of this machine, as engines reach it.
    """

    def __init__(self, recipe: WeightsRecipe, *, model_dir: Path, directory: Path, device_backend: str = "gloo", address: str = "127.0.0.1") -> None:
        self._recipe = recipe
        self._model_dir, self._directory, self._address = model_dir, directory, address
        self._backend = device_backend if recipe.backend == "auto" else recipe.backend
        self._together = recipe.fan_out == "one" or (recipe.fan_out == "auto" and self._backend == "nccl")
        self._engines: tuple[EngineClient, ...] = ()
        self._members: dict[EngineClient, Member] = {}  # those that were introduced
        self._groups: list[UpdateGroup] = []  # those that are formed
        self._transfers: list[Transfer] = []  # those under way
        self._turn = trio.Lock()

    @property
    def engines(self) -> tuple[EngineClient, ...]:
        """Those of the next publishing."""
        return self._engines

    def set_engines(self, clients: Sequence[EngineClient]) -> None:
        """The engines of the next publishing. From one under way those that are not among them are left out at once."""
        self._engines = tuple(clients)
        self._members = {client: member for client, member in self._members.items() if client in clients}
        for transfer in self._transfers:
            if not any(member.engine in clients for member in transfer.group.members):
                transfer.scope.cancel()

    async def cold_sync(self, engine: EngineClient, version: int, path: Path) -> None:
        """Have one engine load a Hugging Face directory as `version`. Whatever a failed update left it in is put right.

        Raises:
            EngineError: it does not.
        """
        member = await Member.introduced(engine, self._recipe)
        await member.load(str(path), version)
        if (told := (await engine.model_info()).version) != version:
            raise EngineError(f"{engine} reports version {told} after it loaded version {version} from {path}")

    async def publish(self, snapshot: Snapshot) -> Published:
        """Bring the engines to `snapshot`. One that fails costs the others nothing (in a common group: a bucket's deadline and 5 s at most).

        Raises:
            PublishError: not one could be brought to it.
        """
        async with self._turn:
            started = time.monotonic()
            attempt = _Attempt(self._engines)
            for _ in range(_ATTEMPTS):
                await self._try(snapshot, attempt)
                if not attempt.open:
                    break
            fenced = attempt.fenced | {engine.index: attempt.reasons.get(engine, "it was not reached") for engine in attempt.open}
            reached = tuple(sorted(member.engine.index for member in attempt.reached))
            for index, reason in fenced.items():
                log.warning("engine %d was not brought to version %d: %s", index, snapshot.version, reason)
            _require_one(snapshot.version, reached, fenced)
            return Published(
                version=snapshot.version,
                engines=reached,
                fenced=fenced,
                seconds=time.monotonic() - started,
                nbytes=snapshot.nbytes,
                pause_s={member.engine.index: member.pause_s for member in attempt.reached},
                broadcast_s=attempt.broadcast_s,
                gather_s=snapshot.gather_s,
            )

    async def aclose(self) -> None:
        """Leave all groups. The engines' connections are their owner's."""
        await self._dissolve(self._groups)

    async def _try(self, snapshot: Snapshot, attempt: _Attempt) -> None:
        """Once more for the engines that are open."""
        members = await self._introduced(attempt)
        if not members:
            return
        failures = await (self._by_disk(snapshot, members) if self._recipe.transport == "disk" else self._by_groups(snapshot, members, attempt))
        missing = failures.guilty.keys() | failures.again.keys()
        arrived = [member for member in members if member not in missing]
        wrong = await confirmed(arrived, snapshot.version, checked=self._recipe.transport == "group")
        attempt.note(arrived, Failures.of([failures, Failures(guilty=wrong)]))

    async def _introduced(self, attempt: _Attempt) -> list[Member]:
        """The open engines as members; one that does not answer is fenced."""

        async def introduce(engine: EngineClient) -> None:
            try:
                self._members[engine] = await Member.introduced(engine, self._recipe)
            except EngineError as error:
                attempt.fence(engine, str(error))

        async with trio.open_nursery() as nursery:
            for engine in attempt.open:
                if engine not in self._members:
                    nursery.start_soon(introduce, engine)
        return [self._members[engine] for engine in attempt.open if engine in self._members]

    async def _by_groups(self, snapshot: Snapshot, members: Sequence[Member], attempt: _Attempt) -> Failures:
        """Each group on its own; groups that cover other members than these are dissolved."""
        wanted = [tuple(members)] if self._together else [(member,) for member in members]
        kept = {group.members: group for group in self._groups if group.members in wanted}
        await self._dissolve([group for group in self._groups if group.members not in kept])
        failures: list[Failures] = []
        new = partial(UpdateGroup, backend=self._backend, address=self._address, deadline_s=self._recipe.bucket_deadline_s)
        self._transfers = [Transfer(kept.get(wants) or new(wants), snapshot, self._recipe) for wants in wanted]

        async def transfer(one: Transfer) -> None:
            failed = await one.run(formed=one.group in self._groups)
            self._groups = [group for group in self._groups if group is not one.group] + ([] if failed.any else [one.group])
            failures.append(failed)

        async with trio.open_nursery() as nursery:
            for one in self._transfers:
                nursery.start_soon(transfer, one)
        attempt.broadcast_s = max(attempt.broadcast_s, *(one.broadcast_s for one in self._transfers))
        self._transfers = []
        return Failures.of(failures)

    async def _by_disk(self, snapshot: Snapshot, members: Sequence[Member]) -> Failures:
        path = await trio.to_thread.run_sync(save_snapshot, snapshot, self._directory / f"v{snapshot.version}", self._model_dir)
        failures = Failures()

        async def load(member: Member) -> None:
            try:
                await member.load(str(path), snapshot.version)
            except EngineError as error:
                failures.guilty[member] = str(error)

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(load, member)
        return failures

    async def _dissolve(self, groups: Sequence[UpdateGroup]) -> None:
        self._groups = [group for group in self._groups if group not in groups]
        async with trio.open_nursery() as nursery:
            for group in groups:
                nursery.start_soon(group.dissolve)


class _Attempt:
    """What has become of the engines of one publishing."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        self.open = list(engines)
        self.reached: list[Member] = []
        self.fenced: dict[int, str] = {}
        self.reasons: dict[EngineClient, str] = {}  # of the open ones
        self.broadcast_s = 0.0

    def fence(self, engine: EngineClient, reason: str) -> None:
        self.open.remove(engine)
        self.fenced[engine.index] = reason

    def note(self, arrived: Sequence[Member], failures: Failures) -> None:
        for member, reason in failures.guilty.items():
            self.fence(member.engine, reason)
        for member, reason in failures.again.items():
            self.reasons[member.engine] = reason
        for member in arrived:
            if member not in failures.guilty:
                self.open.remove(member.engine)
                self.reached.append(member)


def _require_one(version: int, reached: Sequence[int], fenced: Mapping[int, str]) -> None:
    if not reached:
        raise PublishError(f"version {version} could not be brought to any engine: {'; '.join(dict.fromkeys(fenced.values())) or 'there is none'}")
