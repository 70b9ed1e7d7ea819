"""Batches out, steps, versions, checkpoints and rollbacks in: the learner's side of the buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.buffer.batches import Batch, within
from agentrl.buffer.groups import Group, Held
from agentrl.buffer.journal import Journal
from agentrl.buffer.records import (
    BatchTaken,
    BatchTrained,
    Checkpoint,
    Ranges,
    Record,
    Rollback,
    TrajectoryAdded,
    VersionPublished,
    VersionReserved,
    VersionSuperseded,
)
from agentrl.buffer.replay import Candidate, Select, choose
from agentrl.buffer.state import RunState
from agentrl.buffer_api import BatchGrant, JournalMark, RollbackReply, TrainedReply
from agentrl.errors import CheckpointError, ReplayBufferError, WireError

__all__ = ["Training"]


class Training:
    """Gives out batches and keeps the books of steps and versions.

    Args:
        write: journals a record and folds it into `state`.
        now: seconds since the epoch.
        select: which groups are used again.
    """

    def __init__(
        self,
        state: RunState,
        write: Callable[[Record], None],
        now: Callable[[], float],
        journal: Journal,
        select: Select,
    ) -> None:
        self.state, self._write, self._now, self._journal, self._select = state, write, now, journal, select

    def take(self, *, incarnation: int, number: int) -> BatchGrant | None:
        """The batch of a request; None as long as there is none.

        Raises:
            ReplayBufferError: the batch this request was given was annulled, or another incarnation's batch was never rolled back.
        """
        state = self.state
        batch = state.batches.answer(incarnation, number)
        if batch is None and state.batches.asked(incarnation, number):
            raise ReplayBufferError(f"batch number {number} of learner incarnation {incarnation} was annulled or is long done: ask with a new number")
        if batch is None:
            if (end := self._end()) is not None:
                return end
            outstanding = state.batches.outstanding
            if outstanding is not None and outstanding.taken.incarnation != incarnation:
                raise ReplayBufferError(f"batch {outstanding.taken.batch} of an earlier learner is neither trained nor annulled: roll back first")
            if outstanding is not None or state.phase != "training" or (record := self._compose(incarnation, number)) is None:
                return None
            self._write(record)
            batch = state.batches.by_id[record.batch]
        return self._grant(batch)

    def trained(
        self, *, incarnation: int, batch: int, updates_done: int, updates_skipped: int, seconds: tuple[float, float], metrics: Mapping[str, float]
    ) -> TrainedReply:
        """A batch was trained on.

        Raises:
            ReplayBufferError: the batch was annulled or never taken.
        """
        found = self.state.batches.by_id.get(batch)
        if found is None or found.taken.incarnation != incarnation:
            raise ReplayBufferError(f"batch {batch} was not taken by learner incarnation {incarnation}, or was annulled")
        if found.trained is None:
            self._write(
                BatchTrained(
                    t=self._now(),
                    batch=batch,
                    step=self.state.batches.step + 1,
                    updates_done=updates_done,
                    updates_skipped=updates_skipped,
                    version=self.state.versions.next if found.taken.publishes else None,
                    started_s=seconds[0],
                    ended_s=seconds[1],
                    metrics=dict(metrics),
                )
            )
        assert found.trained is not None
        return TrainedReply(version=found.trained.version, step=found.trained.step)

    def reserve(self, *, role: str, incarnation: int, reason: str) -> int:
        """A version for weights no batch made."""
        if reason.partition("-")[0] not in ("initial", "restored", "rollback"):
            raise ReplayBufferError(f"a version is reserved as initial, restored or rollback-<n>, not as {reason!r}; a batch's own comes with it")
        state = self.state
        known = state.reserved.get((role, incarnation, reason))
        if known is not None:
            return known
        version = state.versions.next
        self._write(VersionReserved(t=self._now(), version=version, reason=reason, step=state.batches.step, role=role, incarnation=incarnation))
        return version

    def published(self, *, version: int, engines: list[int], seconds: float, bytes: int) -> None:
        """Every live engine reports a version.

        Raises:
            ReplayBufferError: it was never reserved, or no engine has it.
        """
        self._known(version)
        if not engines:
            raise ReplayBufferError(f"version {version} counts as published when at least one engine reports it")
        versions = self.state.versions
        if not (versions.serving and versions.published is not None and versions.published >= version):
            self._write(VersionPublished(t=self._now(), version=version, engines=tuple(engines), seconds=seconds, bytes=bytes))

    def superseded(self, version: int) -> None:
        """A version will never be published."""
        self._known(version)
        self._write(VersionSuperseded(t=self._now(), version=version))

    def mark(self) -> JournalMark:
        """The end of the journal and what stands before it."""
        batches = self.state.batches
        return JournalMark(offset=self._journal.appended, consumed=batches.consumed, frontier=self.state.groups.frontier, step=batches.step)

    def committed(self, manifest: Mapping[str, Any]) -> None:
        """A checkpoint is in its place."""
        identity, step, consumed = _essentials(manifest)
        if all(identity != known.id for known in self.state.batches.checkpoints):
            self._require_standing(identity, consumed)
            self._write(Checkpoint(t=self._now(), id=identity, step=step, consumed=consumed))

    def rollback(self, *, incarnation: int, manifest: Mapping[str, Any] | None, bad_after: int | None = None) -> RollbackReply:
        """Annul every batch the manifest does not name consumed; drop the groups that weights of later steps than `bad_after` had a part in.

        Raises:
            CheckpointError: batches it names consumed were annulled by an earlier rollback, or are not in the journal.
        """
        identity, step, consumed = ("", 0, ()) if manifest is None else _essentials(manifest)
        batches = self.state.batches
        done = batches.rolled_back
        if done is None or (done.incarnation, done.id) != (incarnation, identity):
            if not self.state.settings.evaluate_only:
                self._require_standing(identity, consumed)
            annulled = len(batches.annulled_by(consumed))
            self._write(Rollback(t=self._now(), id=identity, step=step, consumed=consumed, incarnation=incarnation, bad_after=bad_after))
            return RollbackReply(step=step, annulled=annulled)
        return RollbackReply(step=done.step)

    def forgot(self, manifest: Mapping[str, Any] | None) -> bool:
        """Whether a rollback to a manifest gives back batches that are forgotten here."""
        consumed = () if manifest is None else _essentials(manifest)[2]
        return not within(self.state.batches.settled, consumed)

    def trajectory(self, held: Held) -> bytes:
        """The bytes of a trajectory, read from the journal where they are not in memory."""
        if held.data is not None:
            return held.data
        record = self._journal.read_at(held.location)
        assert isinstance(record, TrajectoryAdded), "a trajectory's location is that of its record"
        return record.data

    def _require_standing(self, identity: str, consumed: Ranges) -> None:
        if not within(consumed, self.state.batches.consumed):
            raise CheckpointError(
                f"checkpoint {identity} was made from batches {list(consumed)}, but in the journal's surviving history stand "
                f"{list(self.state.batches.consumed)}: it was rolled back, or belongs to another run; use an older one"
            )

    def _known(self, version: int) -> None:
        if not self.state.versions.known(version):
            raise ReplayBufferError(f"version {version} was never reserved; the newest is {self.state.versions.next - 1}")

    def _end(self) -> BatchGrant | None:
        state = self.state
        if state.halt is not None:
            return BatchGrant(end="stopped", step=state.batches.step, total_steps=state.settings.total_steps, progress=state.progress(self._now()))
        if state.settings.evaluate_only or (state.trained_enough and state.batches.outstanding is None):
            return BatchGrant(end="finished", step=state.batches.step, total_steps=state.settings.total_steps, progress=1.0)
        return None

    def _compose(self, incarnation: int, number: int) -> BatchTaken | None:
        """The next batch: as many reused groups as the recipe wants and there are, the rest new, oldest dispatched first."""
        state, settings, now = self.state, self.state.settings, self._now()
        size, step, batch = settings.groups_per_batch, state.batches.step, state.batches.next
        if state.groups.ready < math.ceil(settings.fresh * size):
            return None
        candidates = self._candidates(step)
        again = choose(self._select, candidates, size - math.ceil(settings.fresh * size), seed=settings.seed, batch=batch)
        if state.groups.ready < size - len(again):
            return None
        chosen = [(group, 0) for group in state.groups.oldest_ready(size - len(again))]
        chosen += [(state.groups.by_ordinal[ordinal], state.groups.by_ordinal[ordinal].uses) for ordinal in again]
        chosen.sort(key=lambda pair: pair[0].ordinal)
        progress = state.progress(now)
        total = settings.total_steps
        last = step + 1 >= total if total is not None else progress >= 1.0
        return BatchTaken(
            t=now,
            batch=batch,
            step=step,
            incarnation=incarnation,
            number=number,
            groups=tuple((group.ordinal, use, state.versions.staleness(group.versions, step)) for group, use in chosen),
            newest=state.versions.next - 1,
            progress=progress,
            last=last,
            publishes=last or (step + 1) % settings.publish_every == 0,
        )

    def _candidates(self, step: int) -> list[Candidate]:
        state, limit = self.state, self.state.settings.max_token_age
        found = []
        for ordinal in state.groups.reusable:
            group = state.groups.by_ordinal[ordinal]
            staleness = state.versions.staleness(group.versions, step)
            if group.uses < state.settings.reuse and (limit is None or staleness <= limit):
                found.append(Candidate(ordinal=ordinal, uses=group.uses, staleness=staleness, task=group.task, rewards=group.rewards))
        return found

    def _grant(self, batch: Batch) -> BatchGrant:
        state, taken = self.state, batch.taken
        groups = [state.groups.by_ordinal[ordinal] for ordinal, _, _ in taken.groups]
        versions = sorted(set().union(*(group.versions for group in groups)))
        return BatchGrant(
            batch=taken.batch,
            step=taken.step,
            groups=tuple(self._trajectories(group) for group in groups),
            versions={version: state.versions.info(version, newest=taken.newest) for version in versions},
            total_steps=state.settings.total_steps,
            progress=taken.progress,
            publishes=taken.publishes,
        )

    def _trajectories(self, group: Group) -> tuple[bytes, ...]:
        return tuple(self.trajectory(held) for held in group.held)


def _essentials(manifest: Mapping[str, Any]) -> tuple[str, int, Ranges]:
    try:
        return str(manifest["id"]), int(manifest["step"]), tuple((int(first), int(last)) for first, last in manifest["consumed"])
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"a manifest names id, step and consumed batches; this one does not: {error!r}") from error
