"""The state of the buffer: the fold of the journal's records, the same live and in recovery.

`RunState.apply` is the only thing that changes it. Whatever the settings of a later run say, what was recorded stands: decisions
(attempts, drops, batches, versions) are in the records; settings decide only what comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentrl.buffer.admission import Admission
from agentrl.buffer.batches import Batch, Batches
from agentrl.buffer.evaluation import FINAL, INITIAL, PERIODIC, Evaluations
from agentrl.buffer.events import Events
from agentrl.buffer.groups import Groups, Held
from agentrl.buffer.journal import Location
from agentrl.buffer.records import (
    BatchTaken,
    BatchTrained,
    Checkpoint,
    EvaluationEnded,
    EvaluationOpened,
    Halt,
    IncarnationBegun,
    Record,
    Rollback,
    TaskIssued,
    TicketClosed,
    TicketLate,
    TicketsIssued,
    TrajectoryAdded,
    VersionPublished,
    VersionReserved,
    VersionSuperseded,
)
from agentrl.buffer.settings import BufferSettings
from agentrl.buffer.tickets import Tickets
from agentrl.buffer.versions import Versions
from agentrl.errors import ReplayBufferError
from agentrl.types import CloseCause, Purpose, Ticket

__all__ = ["DRIVER", "RunState"]

DRIVER = "driver"  # the role whose incarnation is the run's
_BUFFER = "buffer"


class RunState:
    """Everything the buffer knows.

    Args:
        keep: checkpoints whose batches are remembered; None keeps every batch.
    """

    def __init__(self, settings: BufferSettings, *, keep: int | None) -> None:
        self.settings = settings
        self.groups = Groups(admission=Admission(limit=settings.group_limit))
        self.tickets = Tickets(window=settings.samples_per_batch)
        self.batches = Batches(keep=keep)
        self.versions = Versions()
        self.reserved: dict[tuple[str, int, str], int] = {}  # (role, incarnation, reason) -> version
        self.evaluations = Evaluations(sets=tuple(settings.eval_sets))
        self.events = Events()
        self.incarnations: dict[tuple[str, int], int] = {}
        self.urls: dict[tuple[str, int], str] = {}
        self.halt: Halt | None = None
        self.training_s = 0.0  # time spent in phase training, over all resumes
        self.last_t: float | None = None  # of the newest record of this process's life
        self.keeps_data = True  # in memory; in recovery trajectories stay in the journal until they are needed
        self._told_phase = "starting"
        self._fold: dict[type[Record], Callable[[Any, Location], None]] = {
            IncarnationBegun: self._incarnation,
            TaskIssued: lambda r, _: self.groups.issue(r),
            TicketsIssued: self._issued,
            TrajectoryAdded: self._trajectory,
            TicketClosed: self._closed,
            TicketLate: lambda r, _: self.tickets.refuse(r.ticket, r.cause),
            BatchTaken: self._taken,
            BatchTrained: self._trained,
            VersionReserved: self._reserved,
            VersionPublished: self._published,
            VersionSuperseded: lambda r, _: None,
            Checkpoint: self._checkpoint,
            Rollback: self._rollback,
            EvaluationOpened: lambda r, _: self.evaluations.open(r),
            EvaluationEnded: self._evaluation_ended,
            Halt: self._halt,
        }

    def apply(self, record: Record, location: Location) -> None:
        """Fold one record in."""
        down = isinstance(record, IncarnationBegun) and record.role == _BUFFER  # the time before it was no time of the run
        if self.last_t is not None and not down and self.phase == "training":
            self.training_s += max(0.0, record.t - self.last_t)
        self.last_t = record.t
        self._fold[type(record)](record, location)
        if self.phase != self._told_phase:
            self._told_phase = self.phase
            self.events.tell("phase", record.t, phase=self.phase, step=self.batches.step)
        if self.settings.debug:
            self.check()

    def check(self) -> None:
        """Recount everything. Raises ReplayBufferError where the accounts are wrong."""
        self.groups.check()
        self.evaluations.ledger.balance()
        tickets = self.tickets
        if tickets.issued != len(tickets.open) + tickets.closed.total():
            raise ReplayBufferError(f"{tickets.issued} tickets were issued, but {len(tickets.open)} are open and {tickets.closed.total()} closed")

    @property
    def phase(self) -> str:
        """starting, initial_eval, training, final_eval, finished; or stopping, failed."""
        if self.halt is not None:
            return self.halt.phase
        if not self.versions.serving:
            return "starting"
        settings, evaluations = self.settings, self.evaluations
        if not settings.evaluate_only:
            if settings.eval_initial and self.batches.step == 0 and evaluations.missing(INITIAL, 0) is not None:
                return "initial_eval"
            if not self.training_over:
                return "training"
        running = evaluations.running is not None
        final = settings.eval_final or settings.evaluate_only
        if running or (final and evaluations.missing(FINAL, self.batches.step) is not None):
            return "final_eval"
        return "finished"

    @property
    def trained_enough(self) -> bool:
        """The run has its last step, by what the settings say now: a longer run goes on where a shorter one ended."""
        total, hours = self.settings.total_steps, self.settings.hours
        if total is not None:
            return self.batches.step >= total
        return self.batches.last and hours is not None and self.training_s >= hours * 3600.0

    @property
    def training_over(self) -> bool:
        """... and its version is published."""
        return self.trained_enough and not any(batch.trained is not None and not batch.left for batch in self.batches.by_id.values())

    def progress(self, now: float) -> float:
        """Share of the run that is done, 0..1."""
        total, hours = self.settings.total_steps, self.settings.hours
        if total is not None:
            return min(1.0, self.batches.step / total) if total else 1.0
        return min(1.0, self.elapsed_s(now) / (hours * 3600.0)) if hours is not None else 0.0

    def elapsed_s(self, now: float) -> float:
        """Time in phase training, summed over resumes."""
        running = self.phase == "training" and self.last_t is not None
        return self.training_s + (max(0.0, now - self.last_t) if running and self.last_t is not None else 0.0)

    def _incarnation(self, record: IncarnationBegun, _: Location) -> None:
        self.incarnations[(record.role, record.index)] = record.incarnation
        self.urls[(record.role, record.index)] = record.url
        if record.role == "worker":
            self.tickets.forget(record.index, record.incarnation)
        elif record.role == DRIVER:  # new engines, which hold no version yet
            self.versions.serving, self.halt = False, None
            self.tickets.new_window()
            self.groups.filtered_in_row = 0

    def _issued(self, record: TicketsIssued, _: Location) -> None:
        run = self.incarnations.get((DRIVER, 0), 0)
        self.tickets.issue(record.tickets, worker=record.worker, incarnation=record.incarnation, request=record.request, run=run)
        for ticket in record.tickets:
            (self.groups if ticket.purpose is Purpose.TRAIN else self.evaluations).start(ticket)

    def _trajectory(self, record: TrajectoryAdded, location: Location) -> None:
        held = Held(location=location, versions=record.versions, summary=record.summary, data=record.data if self.keeps_data else None)
        if record.ticket.purpose is Purpose.TRAIN:
            self.groups.add(record.ticket, held, record.verdict)
        else:
            self.evaluations.add(record.ticket, held)
        self.tickets.close(record.ticket, CloseCause.TRAJECTORY, trajectory=record.data, told=True)

    def _closed(self, record: TicketClosed, _: Location) -> None:
        ticket, cause, goes_on = record.ticket, record.cause, record.next is not None
        by_buffer = cause in (CloseCause.LOST, CloseCause.RUN_END, CloseCause.GROUP_CLOSED)
        self.tickets.close(ticket, cause, detail=record.detail, told=not by_buffer)
        if ticket.purpose is Purpose.TRAIN:
            self._cancelled(self.groups.close(ticket, cause, goes_on=goes_on, drop=record.drop, verdict=record.verdict))
        else:
            self.evaluations.close(ticket, cause, goes_on=goes_on)

    def _cancelled(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self.tickets.close(ticket, CloseCause.GROUP_CLOSED)

    def _taken(self, record: BatchTaken, _: Location) -> None:
        self.batches.take(record)
        for ordinal, use, _staleness in record.groups:
            self.groups.take(ordinal, first=use == 0)

    def _trained(self, record: BatchTrained, _: Location) -> None:
        batch = self.batches.train(record)
        for ordinal, use, _staleness in batch.taken.groups:
            self.groups.trained(ordinal, first=use == 0, finite=batch.finite, reuse=self.settings.reuse)
        if record.version is not None:
            self.versions.reserve(record.version, record.step)
        self._leave()
        every = self.settings.eval_every
        if every is not None and record.step % every == 0 and not self.trained_enough:
            self.evaluations.want(record.step, self.versions.next - 1)
        self._tell_step(batch, record)

    def _tell_step(self, batch: Batch, record: BatchTrained) -> None:
        admission = self.groups.admission
        self.events.tell(
            "step",
            record.t,
            step=record.step,
            batch=record.batch,
            version=record.version,
            updates_done=record.updates_done,
            updates_skipped=record.updates_skipped,
            started_s=record.started_s,
            ended_s=record.ended_s,
            metrics=dict(record.metrics),
            progress=batch.taken.progress,
            elapsed_s=self.training_s,
            running=admission.running,
            buffered=admission.buffered,
            training=admission.training,
            completed=self.groups.completed,
            filtered=self.groups.filtered,
            dropped=self.groups.ledger.dropped(),
            late=self.tickets.late.total(),
            reused=sum(use > 0 for _, use, _ in batch.taken.groups),
        )

    def _leave(self) -> None:
        for batch in self.batches.leave(self.versions.published):
            self.groups.admission.leave(len(batch.first_uses))

    def _reserved(self, record: VersionReserved, _: Location) -> None:
        self.versions.reserve(record.version, record.step)
        self.reserved[(record.role, record.incarnation, record.reason)] = record.version

    def _published(self, record: VersionPublished, _: Location) -> None:
        self.versions.publish(record.version)
        self._leave()
        running = self.evaluations.running
        if running is not None and running.opened.stage != PERIODIC:  # it must be of one version: it begins anew
            self._cancelled(self.evaluations.cancel(running))
        self.events.tell("published", record.t, version=record.version, engines=list(record.engines), seconds=record.seconds, bytes=record.bytes)

    def _checkpoint(self, record: Checkpoint, _: Location) -> None:
        for batch in self.batches.commit(record):
            for ordinal in batch.first_uses:
                self.groups.settle(ordinal)
        self.groups.expire(self._outdated(self.batches.checkpoints[0].step))
        self.events.tell("checkpoint", record.t, id=record.id, step=record.step)

    def _outdated(self, step: int) -> list[int]:
        """Trained groups with uses left that hold a token older than `max_token_age` already at `step`."""
        limit, groups = self.settings.max_token_age, self.groups
        if limit is None:
            return []
        return [ordinal for ordinal in groups.reusable if self.versions.staleness(groups.by_ordinal[ordinal].versions, step) > limit]

    def _rollback(self, record: Rollback, _: Location) -> None:
        annulled = self.batches.roll_back(record)
        for batch in annulled:
            for ordinal, use, _staleness in batch.taken.groups:
                self.groups.give_back(ordinal, first=use == 0, trained=batch.trained is not None, finite=batch.finite, left=batch.left)
        self.versions.roll_back(record.step, bad_after=record.bad_after)
        if record.bad_after is not None:
            self._cancelled(self.groups.condemn(self.versions.bad))
        self._cancelled(self.evaluations.roll_back(record.step))
        self.events.tell("rollback", record.t, step=record.step, annulled=[batch.taken.batch for batch in annulled])

    def _evaluation_ended(self, record: EvaluationEnded, _: Location) -> None:
        running = self.evaluations.running
        if running is not None and running.opened.evaluation == record.evaluation:
            opened = running.opened
            self.evaluations.end()
            self.events.tell(
                "evaluation",
                record.t,
                evaluation=record.evaluation,
                set=opened.set,
                step=opened.step,
                stage=opened.stage,
                payload=dict(record.payload),
            )

    def _halt(self, record: Halt, _: Location) -> None:
        self.halt = record
        if record.phase == "failed":
            self.events.tell("failure", record.t, reason=record.reason, failure=dict(record.failure))
