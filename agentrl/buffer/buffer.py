"""The replay buffer, without any HTTP: admits work, holds groups, gives out batches, writes the journal.

    call ──> check ──> record ──> journal.append ──> RunState.apply ──> reply (after journal.write)
                                       └── recovery: read ──────^

Every change is a record first, then applied by the fold that recovery uses. A method that changes something returns before its records
are in the file: reply only after `commit()`. Single-threaded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl.buffer import journal as journals
from agentrl.buffer.batches import within
from agentrl.buffer.engines import Engines
from agentrl.buffer.evaluation import FINAL, INITIAL, PERIODIC
from agentrl.buffer.filters import Judge
from agentrl.buffer.journal import Journal
from agentrl.buffer.records import EvaluationEnded, EvaluationOpened, Halt, IncarnationBegun, Record, Rollback
from agentrl.buffer.replay import resolve_select
from agentrl.buffer.settings import BufferSettings, EvalSettings
from agentrl.buffer.state import DRIVER, RunState
from agentrl.buffer.status import status
from agentrl.buffer.supply import AdaptiveOrder, Supply, TaskOrder
from agentrl.buffer.training import Training
from agentrl.buffer_api import BatchGrant, EvaluationResult, JournalMark, Outcome, RollbackReply, TicketGrants, TrainedReply
from agentrl.errors import ConfigError, Failure, JournalError, RecipeCodeError, StaleIncarnation
from agentrl.types import CloseCause, Task, Trajectory
from agentrl.wire import decode_trajectory

__all__ = ["BufferSettings", "Caller", "EvalSettings", "ReplayBuffer"]

EvaluationHook = Callable[[EvaluationResult], Mapping[str, Any]]
T = TypeVar("T")
ENGINE = "engine"  # the role whose incarnations are on the roster


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who calls."""

    role: str
    index: int
    incarnation: int


class ReplayBuffer:
    """The one process that admits work, holds groups, gives out batches and writes the journal.

    Args:
        directory: of the journal. An existing one is folded: the buffer goes on where it ended.
        tasks: the training tasks; None where the run only evaluates. An `AdaptiveOrder` is told of every group.
        eval_tasks: tasks by held-out set.
        incarnation: of this buffer, newer than any before.
        run: incarnation of the run. A newer one than the journal's is a resume: every open ticket is lost. The same one is a restart of
            this process alone: workers and learner go on.
        on_evaluation: told of every finished evaluation (in a thread); what it returns becomes the event's payload.
        clock: seconds since the epoch.

    Raises:
        JournalError: another process holds the journal, or it was altered.
        ConfigError: the settings name something that is not there.
        RecipeCodeError: the adaptive order failed on what the journal told it.
    """

    def __init__(
        self,
        directory: Path,
        settings: BufferSettings,
        *,
        tasks: TaskOrder | None,
        eval_tasks: Mapping[str, Sequence[Task]] | None = None,
        incarnation: int,
        run: int,
        on_evaluation: EvaluationHook | None = None,
        clock: Callable[[], float] = time.time,
        lock_deadline_s: float = 5.0,
    ) -> None:
        self.settings, self.on_evaluation, self._clock = settings, on_evaluation, clock
        self._eval_tasks = dict(eval_tasks or {})
        if missing := settings.eval_sets.keys() - self._eval_tasks.keys():
            raise ConfigError(f"no tasks were given for eval sets {sorted(missing)}")
        select, judge = resolve_select(settings.select), Judge(settings)
        self._adaptive = tasks if isinstance(tasks, AdaptiveOrder) else None
        self._heartbeats: dict[tuple[str, int], tuple[float, dict[str, Any]]] = {}
        self._directory = directory
        self.engines = Engines()
        self.journal = Journal(directory, incarnation=incarnation, segment_bytes=settings.segment_bytes, lock_deadline_s=lock_deadline_s)
        try:
            self.state = self._fold(keep=settings.keep_checkpoints)
            self._tell_order()
            self._supply = Supply(self.state, self._write, clock, tasks, self._eval_tasks, judge)
            self._training = Training(self.state, self._write, clock, self.journal, select)
            self._write(IncarnationBegun(t=clock(), role="buffer", index=0, incarnation=incarnation))
            if run > self.state.incarnations.get((DRIVER, 0), -1):
                self._write(IncarnationBegun(t=clock(), role=DRIVER, index=0, incarnation=run))
            self._supply.lose_outdated()
            self._advance()
            self.commit()
        except BaseException:
            self.journal.abandon()
            raise

    # -- callers ------------------------------------------------------------------------------------------------------------------

    def check(self, caller: Caller) -> None:
        """Refuse a caller that a newer incarnation of its role has replaced.

        Raises:
            StaleIncarnation: it must end itself.
        """
        newest = self.state.incarnations.get((caller.role, caller.index), -1)
        if caller.incarnation < newest:
            raise StaleIncarnation(f"{caller.role} {caller.index} incarnation {caller.incarnation} was replaced by incarnation {newest}")

    def register(self, *, role: str, index: int, incarnation: int, url: str = "") -> None:
        """A process is about to work. Open tickets of older incarnations of a worker are lost; of role "driver", all of before.

        An older incarnation of an engine leaves the roster; one with a URL answers, and is on it.

        Raises:
            StaleIncarnation: a newer one is registered.
        """
        self.check(Caller(role=role, index=index, incarnation=incarnation))
        known = (self.state.incarnations.get((role, index)), self.state.urls.get((role, index)))
        if known != (incarnation, url):
            self._write(IncarnationBegun(t=self._clock(), role=role, index=index, incarnation=incarnation, url=url))
        if role == ENGINE:
            self.engines.dead(index, incarnation - 1)
            if url:
                self.engines.live(index, incarnation, url)
        self._supply.lose_outdated()
        self._advance()

    def worker_died(self, index: int) -> None:
        """A worker's open tickets are lost."""
        self._supply.lose(index)
        self._advance()

    def heartbeat(self, caller: Caller, note: Mapping[str, Any]) -> bool:
        """Keep what a caller says of itself. False: it should end."""
        self._heartbeats[(caller.role, caller.index)] = (self._clock(), dict(note))
        return self.state.phase != "failed"

    # -- workers ------------------------------------------------------------------------------------------------------------------

    def take_tickets(self, caller: Caller, *, request: int, want: int) -> TicketGrants:
        """Up to `want` tickets. Idempotent by (worker incarnation, request). While the journal cannot be written, none."""
        if self.journal.trouble is not None:
            raise JournalError(f"admission is closed: the journal cannot be written: {self.journal.trouble}")
        return self._or_end(lambda: self._supply.take(worker=caller.index, incarnation=caller.incarnation, request=request, want=want))

    def close_tickets(self, outcomes: Sequence[Outcome]) -> tuple[bool, ...]:
        """Take outcomes; False where the ticket had one already. Idempotent by ticket."""
        taken = self._or_end(lambda: self._supply.close(outcomes))
        self._advance()
        return taken

    # -- the learner --------------------------------------------------------------------------------------------------------------

    def take_batch(self, caller: Caller, *, number: int) -> BatchGrant | None:
        """The learner's `number`-th batch, where it is there. Idempotent by (learner incarnation, number), the same for every rank."""
        return self._or_end(lambda: self._training.take(incarnation=self._group(caller), number=number))

    def batch_trained(
        self,
        caller: Caller,
        *,
        batch: int,
        updates_done: int,
        updates_skipped: int,
        seconds: tuple[float, float],
        metrics: Mapping[str, float],
    ) -> TrainedReply:
        """A batch was trained on; the reply names the version it makes. Idempotent by batch."""
        reply = self._training.trained(
            incarnation=self._group(caller),
            batch=batch,
            updates_done=updates_done,
            updates_skipped=updates_skipped,
            seconds=seconds,
            metrics=metrics,
        )
        self._advance()
        return reply

    def reserve_version(self, caller: Caller, *, reason: str) -> int:
        """A version for initial or restored weights. Idempotent by (caller's incarnation, reason)."""
        return self._training.reserve(role=caller.role, incarnation=caller.incarnation, reason=reason)

    def version_published(self, *, version: int, engines: Sequence[int], seconds: float, bytes: int) -> None:
        """Every live engine reports a version."""
        self._training.published(version=version, engines=list(engines), seconds=seconds, bytes=bytes)
        self._advance()

    def version_superseded(self, version: int) -> None:
        """A version will never be published."""
        self._training.superseded(version)

    def mark(self) -> JournalMark:
        """The end of the journal and what stands before it."""
        return self._training.mark()

    def checkpoint_committed(self, manifest: Mapping[str, Any]) -> None:
        """A checkpoint is in its place. Idempotent by its id."""
        self._training.committed(manifest)

    def rollback(self, caller: Caller, manifest: Mapping[str, Any] | None, *, bad_after: int | None = None) -> RollbackReply:
        """Annul every batch a manifest does not name consumed. Idempotent by (learner incarnation, manifest id) until a batch is taken.

        Args:
            bad_after: of the weights that are abandoned, those of later steps than this are bad: groups with tokens of theirs are dropped.
        """
        if self._training.forgot(manifest):
            self.commit()
            self.state = self._supply.state = self._training.state = self._fold(keep=None)
            if self.state.groups.news is not None:
                self.state.groups.news.clear()  # all of it was told when it happened
        reply = self._training.rollback(incarnation=self._group(caller), manifest=manifest, bad_after=bad_after)
        self._advance()
        return reply

    # -- the driver ---------------------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End the run here."""
        if self.state.halt is None:
            self._write(Halt(t=self._clock(), phase="stopping", reason=reason))

    def fail(self, failure: Failure) -> None:
        """End the run with a cause."""
        if self.state.halt is None or self.state.halt.phase != "failed":
            self._write(Halt(t=self._clock(), phase="failed", reason=f"{failure.kind}: {failure.message}", failure=asdict(failure)))

    def events(self, after: int) -> list[dict[str, Any]]:
        """What happened since event number `after`."""
        return self.state.events.after(after)

    def status(self) -> dict[str, Any]:
        """All counters, plain."""
        return status(self.state, self.journal, self._heartbeats, self._clock()) | {"engines": self.engines.roster.to_plain()["engines"]}

    # -- evaluations --------------------------------------------------------------------------------------------------------------

    def evaluation_due(self) -> EvaluationResult | None:
        """The evaluation that has all its outcomes and is not reported yet."""
        running = self.state.evaluations.running
        if running is None or running.unfinished:
            return None
        tasks, opened = self._eval_tasks[running.opened.set], running.opened
        rows: list[tuple[Task, Trajectory | CloseCause]] = []
        for index, sample in enumerate(running.samples):
            cause = sample.cause or CloseCause.LOST
            outcome = cause if sample.held is None else decode_trajectory(self._training.trajectory(sample.held))
            rows.append((tasks[index // opened.n], outcome))
        seen = {version for sample in running.samples if sample.held is not None for version in sample.held.versions}
        interval = (min(seen), max(seen)) if seen else (-1, -1)
        return EvaluationResult(
            evaluation=opened.evaluation, set=opened.set, step=opened.step, stage=opened.stage, versions=interval, rows=tuple(rows)
        )

    def evaluation_ended(self, evaluation: str, payload: Mapping[str, Any]) -> None:
        """An evaluation was reported."""
        running = self.state.evaluations.running
        if running is not None and running.opened.evaluation == evaluation:
            self._write(EvaluationEnded(t=self._clock(), evaluation=evaluation, payload=dict(payload)))
            self._advance()

    # -- the journal --------------------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Bring all records to the file (and at `fsync` level to the disk)."""
        self.journal.write()
        if self.settings.acknowledge == "fsync":
            self.journal.sync()

    def close(self) -> None:
        """Let go of the journal."""
        self.journal.close()

    def _group(self, caller: Caller) -> int:
        """The incarnation of a rank's learner group: that of rank 0, where the ranks were given their own."""
        return caller.incarnation if caller.index == 0 else self.state.incarnations.get((caller.role, 0), caller.incarnation)

    def _write(self, record: Record) -> None:
        if self.journal.trouble is not None:
            raise JournalError(f"the journal cannot be written: {self.journal.trouble}")
        self.state.apply(record, self.journal.append(record))
        self._tell_order()

    def _tell_order(self) -> None:
        """Tell an adaptive order what has happened to groups, each thing once. Where it failed, the next buffer tells it all from the journal."""
        news = self.state.groups.news
        while self._adaptive is not None and news and self.state.phase != "failed":
            one = news.popleft()
            if one.rewards is None:
                self._adaptive.issued(one.ordinal, one.task)
            else:
                self._adaptive.finished(one.ordinal, one.rewards)

    def _or_end(self, call: Callable[[], T]) -> T:
        """The answer to a call that may run the recipe's own code. Where that fails, the run ends, and the call is answered as in a failed run."""
        try:
            return call()
        except RecipeCodeError as error:
            self.fail(Failure.of(error))
            return call()

    def _fold(self, *, keep: int | None) -> RunState:
        """The state the journal's records make.

        Args:
            keep: checkpoints; batches that all of them name consumed are forgotten on the way. None forgets nothing.
        """
        state = RunState(self.settings, keep=keep)
        state.keeps_data = False
        state.groups.news = None if self._adaptive is None else deque()
        for location, record in journals.read(self._directory):
            if isinstance(record, Rollback) and not within(state.batches.settled, record.consumed):
                return self._fold(keep=None)  # it gives back what has been forgotten
            state.apply(record, location)
        state.keeps_data, state.batches.keep = True, self.settings.keep_checkpoints
        return state

    def _advance(self) -> None:
        """Do what follows by itself: end what is over, open what is due."""
        state = self.state
        if state.halt is None and state.tickets.failed_share > self.settings.max_failed_share:
            allowed = f"the recipe allows {self.settings.max_failed_share:.0%} (buffer.max_failed_share)"
            reasons = f"{state.tickets.failures()}; {allowed}. More is in logs/worker-*.log"
            self.fail(Failure(kind="TooManyFailures", message=reasons))
        if state.halt is None and state.groups.filtered_in_row >= self.settings.filtered_limit:
            self.fail(Failure(kind="NothingToTrainOn", message=self._nothing_left()))
        if state.halt is not None:
            return
        if state.versions.serving and state.training_over:
            self._supply.end_training()
        if state.evaluations.running is None and (due := self._evaluation_to_open()) is not None:
            stage, name, step = due
            self._write(
                EvaluationOpened(
                    t=self._clock(),
                    evaluation=state.evaluations.name(name, step),
                    set=name,
                    step=step,
                    stage=stage,
                    tasks=len(self._eval_tasks[name]),
                    n=self.settings.eval_sets[name].n,
                )
            )

    def _nothing_left(self) -> str:
        settings, groups = self.settings, self.state.groups
        part = f" of {settings.filter_part}" if settings.filter_part else ""
        rule = f"buffer.filter is {settings.filter}{part}" + (
            f", buffer.stops drops {', '.join(settings.dropped_stops)}" if settings.dropped_stops else ""
        )
        return (
            f"the last {groups.filtered_in_row} complete groups were dropped before training, {groups.filtered} of {groups.completed} in all "
            f"(samples dropped by cause: {groups.ledger.dropped()}): {rule}. Are the tasks all too easy or all too hard for the policy"
            f"{f', or is there no reward part {settings.filter_part}' if settings.filter_part else ''}? "
            "buffer.max_filtered_in_row is the bound"
        )

    def _evaluation_to_open(self) -> tuple[str, str, int] | None:
        """(stage, set, step): a periodic one is of the step that called for it, also where the learner has gone on since."""
        state, step = self.state, self.state.batches.step
        stage = {"initial_eval": INITIAL, "final_eval": FINAL}.get(state.phase)
        if stage is not None:
            name = state.evaluations.missing(stage, step)
            return None if name is None else (stage, name, step)
        published = state.versions.published
        for wanted in state.evaluations.wanted:
            if state.phase == "training" and published is not None and published >= wanted.version:
                return PERIODIC, wanted.set, wanted.step
        return None
