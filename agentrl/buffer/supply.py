"""Tickets out, outcomes in: the workers' side of the buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from agentrl.buffer.filters import Judge
from agentrl.buffer.groups import BAD_WEIGHTS, GROUP_INCOMPLETE, Sample
from agentrl.buffer.records import Record, TaskIssued, TicketClosed, TicketLate, TicketsIssued, TrajectoryAdded, Verdict
from agentrl.buffer.state import DRIVER, RunState
from agentrl.buffer.summary import TrajectorySummary
from agentrl.buffer.tickets import digest
from agentrl.buffer_api import Grant, Outcome, TicketGrants
from agentrl.errors import RecipeCodeError, ReplayBufferError, WireError
from agentrl.seeds import sample_seed
from agentrl.types import INFRASTRUCTURE_CAUSES, CloseCause, Purpose, Task, Ticket, Trajectory
from agentrl.wire import decode_trajectory

__all__ = ["AdaptiveOrder", "Supply", "TaskOrder"]

GREEDY = 0.0  # the temperature of a group's baseline
_CAUSES_OF_WORKERS = INFRASTRUCTURE_CAUSES | {CloseCause.TRAJECTORY}
_HOPELESS = frozenset({CloseCause.PROMPT_LIMIT})  # another attempt would end the same way


class TaskOrder(Protocol):
    """The training tasks in the order of the run, over all epochs."""

    @property
    def size(self) -> int:
        """Tasks per epoch."""

    def task(self, ordinal: int) -> Task:
        """The task at a place of the order; the same every time, once it was issued."""


@runtime_checkable
class AdaptiveOrder(TaskOrder, Protocol):
    """An order that follows what happens: it is told of every group, in the order of the journal, live and in recovery alike."""

    def issued(self, ordinal: int, task: str) -> None:
        """The task of this id has the ordinal, for good."""

    def finished(self, ordinal: int, rewards: Sequence[float]) -> None:
        """The ordinal's group is complete or was dropped; it had these total rewards. Once for every ordinal."""


class Supply:
    """Grants tickets and takes their outcomes.

    Args:
        write: journals a record and folds it into `state`.
        now: seconds since the epoch.
        judge: decides on complete groups.
    """

    def __init__(
        self,
        state: RunState,
        write: Callable[[Record], None],
        now: Callable[[], float],
        tasks: TaskOrder | None,
        eval_tasks: Mapping[str, Sequence[Task]],
        judge: Judge,
    ) -> None:
        self.state, self._write, self._now, self._judge = state, write, now, judge
        self._tasks, self._eval_tasks = tasks, eval_tasks

    def take(self, *, worker: int, incarnation: int, request: int, want: int) -> TicketGrants:
        """Up to `want` tickets: of the running evaluation first, then of the oldest groups, then of groups admitted for it."""
        state = self.state
        cancelled = state.tickets.cancelled[worker]
        told = tuple(cancelled.popleft() for _ in range(len(cancelled)))
        tickets = state.tickets.answer(worker, incarnation, request)
        ended = state.phase in ("stopping", "failed", "finished")
        if tickets is None:
            tickets = () if ended else self._issue(max(0, want), worker=worker, incarnation=incarnation, request=request)
        return TicketGrants(grants=tuple(self._grant(ticket) for ticket in tickets), ended=ended and not tickets, cancelled=told)

    def close(self, outcomes: Sequence[Outcome]) -> tuple[bool, ...]:
        """Take outcomes; False where the ticket had one already.

        Raises:
            WireError, TrajectoryError: a trajectory is not what its ticket wants. No outcome of the call was taken.
            ReplayBufferError: no such ticket was ever issued, or a cause only the buffer gives.
            RecipeCodeError: the recipe's filter failed. The outcomes before it were taken.
        """
        trajectories = [self._checked(outcome) for outcome in outcomes]
        return tuple(self._close(outcome, trajectory) for outcome, trajectory in zip(outcomes, trajectories, strict=True))

    def lose(self, worker: int) -> None:
        """A worker died: its open tickets are lost."""
        for entry in self.state.tickets.of_worker(worker):
            self._close_without(entry.ticket, CloseCause.LOST, "the worker died")

    def lose_outdated(self) -> None:
        """Tickets of older incarnations of their worker or of the run are lost."""
        state = self.state
        run = state.incarnations.get((DRIVER, 0), 0)
        for entry in list(state.tickets.open.values()):
            if entry.run < run or entry.incarnation < state.incarnations.get(("worker", entry.worker), 0):
                self._close_without(entry.ticket, CloseCause.LOST, "the worker or the run began anew")

    def end_training(self) -> None:
        """The run has its last step: open training tickets close; their samples stay wanted."""
        for entry in list(self.state.tickets.open.values()):
            if entry.ticket.purpose is Purpose.TRAIN:
                self._close_without(entry.ticket, CloseCause.RUN_END, "")

    @property
    def admits(self) -> bool:
        """Whether training tickets are granted now."""
        return self.state.phase == "training" and not self.state.trained_enough

    def _issue(self, want: int, *, worker: int, incarnation: int, request: int) -> tuple[Ticket, ...]:
        picked: list[Ticket] = []
        try:
            while len(picked) < want and (ticket := self._next_ticket()) is not None:
                picked.append(ticket)
            if picked:
                self._write(TicketsIssued(t=self._now(), tickets=tuple(picked), worker=worker, incarnation=incarnation, request=request))
        except BaseException:
            for ticket in picked:  # off the queue, but never issued
                (self.state.groups if ticket.purpose is Purpose.TRAIN else self.state.evaluations).put_back(*ticket.sample)
            raise
        return tuple(picked)

    def _next_ticket(self) -> Ticket | None:
        state = self.state
        if (found := state.evaluations.next_waiting()) is not None:
            running = state.evaluations.running
            assert running is not None
            attempt = running.sample(*found).attempt + 1
            return Ticket(purpose=Purpose.EVAL, ordinal=found[0], k=found[1], attempt=attempt, evaluation=running.opened.evaluation)
        if not self.admits:
            return None
        found = state.groups.next_waiting()
        if found is None and state.groups.admission.room and self._tasks is not None:
            ordinal = state.groups.frontier
            task = self._tasks.task(ordinal)
            n, greedy = state.settings.samples_per_group, state.settings.greedy_baseline
            self._write(TaskIssued(t=self._now(), ordinal=ordinal, task=task.id, n=n, greedy=greedy))
            found = state.groups.next_waiting()
        if found is None:
            return None
        attempt = state.groups.by_ordinal[found[0]].samples[found[1]].attempt + 1
        return Ticket(purpose=Purpose.TRAIN, ordinal=found[0], k=found[1], attempt=attempt)

    def _grant(self, ticket: Ticket) -> Grant:
        settings = self.state.settings
        seed = sample_seed(settings.seed, ticket.purpose, ticket.ordinal, ticket.k)
        if ticket.purpose is Purpose.EVAL:
            name = ticket.evaluation.rpartition("@")[0]
            task, temperature = self._eval_tasks[name][ticket.ordinal], settings.eval_sets[name].temperature
        else:
            assert self._tasks is not None
            task, temperature = self._tasks.task(ticket.ordinal), settings.temperature
            group = self.state.groups.by_ordinal.get(ticket.ordinal)
            if group is not None and group.task != task.id:
                raise ReplayBufferError(
                    f"task {ticket.ordinal} of the run was {group.task!r} and is now {task.id!r}: the task files or their order changed; "
                    "start a new run (--fresh) or restore them"
                )
            if group is not None and ticket.k == group.baseline:
                temperature = GREEDY
        return Grant(ticket=ticket, task=task, temperature=temperature, seed=seed)

    def _checked(self, outcome: Outcome) -> Trajectory | None:
        """An outcome's trajectory, validated; None where it has none or its ticket is closed."""
        ticket, state = outcome.ticket, self.state
        if outcome.cause not in _CAUSES_OF_WORKERS:
            raise ReplayBufferError(f"{ticket.name}: a worker cannot close a ticket as {outcome.cause}")
        if ticket.purpose is Purpose.TRAIN and ticket.ordinal >= state.groups.frontier:
            raise ReplayBufferError(f"{ticket.name}: this ticket was never issued")
        if outcome.trajectory is None or ticket.name not in state.tickets.open:
            return None
        trajectory = decode_trajectory(outcome.trajectory)
        if trajectory.ticket != ticket:
            raise WireError(f"the trajectory given for {ticket.name} is one of {trajectory.ticket.name}")
        versions = _versions(trajectory)
        if versions and not state.versions.known(versions[-1]):
            raise WireError(f"{ticket.name}: tokens of version {versions[-1]}, but the newest is {state.versions.next - 1}")
        return trajectory

    def _close(self, outcome: Outcome, trajectory: Trajectory | None) -> bool:
        ticket = outcome.ticket
        if ticket.name not in self.state.tickets.open:
            return self._again(outcome)
        if outcome.trajectory is None or trajectory is None:
            self._close_without(ticket, outcome.cause, outcome.detail)
            return True
        summary, versions = TrajectorySummary.of(trajectory), _versions(trajectory)
        self._write(
            TrajectoryAdded(
                t=self._now(),
                ticket=ticket,
                versions=versions,
                summary=summary,
                data=outcome.trajectory,
                verdict=self._verdict(ticket, summary, versions),
            )
        )
        return True

    def _again(self, outcome: Outcome) -> bool:
        """The answer to an outcome of a closed ticket: yes where it is the same again, else it is late."""
        closed = self.state.tickets.outcome(outcome.ticket)
        if closed is not None and closed.cause is outcome.cause:
            same = outcome.trajectory is None or digest(outcome.trajectory) == closed.digest
            if same:
                return True
        if closed is None or not closed.late:
            self._write(TicketLate(t=self._now(), ticket=outcome.ticket, cause=outcome.cause))
        return False

    def _close_without(self, ticket: Ticket, cause: CloseCause, detail: str) -> None:
        if ticket.name not in self.state.tickets.open:
            return  # its group was dropped a moment ago
        following, drop = self._following(ticket, cause)
        verdict = None if following is not None or drop else self._verdict(ticket, None)
        self._write(TicketClosed(t=self._now(), ticket=ticket, cause=cause, detail=detail, next=following, drop=drop, verdict=verdict))

    def _following(self, ticket: Ticket, cause: CloseCause) -> tuple[int | None, str]:
        """What follows a ticket that closes without a trajectory: (next attempt or None, cause the group is dropped by or "")."""
        state, settings = self.state, self.state.settings
        sample = (state.groups if ticket.purpose is Purpose.TRAIN else state.evaluations).sample(ticket)
        assert sample is not None, "an open ticket has a sample"
        if not self._exhausted(sample, cause):
            return ticket.attempt + 1, ""
        if ticket.purpose is Purpose.EVAL:
            return None, ""
        group = state.groups.by_ordinal[ticket.ordinal]
        others = sum(not other.given_up for k, other in enumerate(group.samples) if k not in (ticket.k, group.baseline))
        enough = others >= group.fewest and ticket.k != group.baseline  # without its baseline a group has no advantages
        return None, "" if settings.partial_groups and enough else GROUP_INCOMPLETE

    def _verdict(self, ticket: Ticket, arrived: TrajectorySummary | None, versions: Sequence[int] = ()) -> Verdict | None:
        """What becomes of the ticket's group where its outcome completes it: `arrived` (of these versions), or the sample given up."""
        group = self.state.groups.by_ordinal.get(ticket.ordinal) if ticket.purpose is Purpose.TRAIN else None
        if group is None:
            return None
        others = [sample for k, sample in enumerate(group.samples) if k != ticket.k]
        if any(sample.held is None and not sample.given_up for sample in others):
            return None
        if self.state.versions.bad(group.versions.union(versions)):
            return Verdict(drop=BAD_WEIGHTS)
        summaries = [sample.held.summary for sample in others if sample.held is not None]
        assert self._tasks is not None, "there are training groups"
        source = self._tasks.task(group.ordinal).source
        try:
            return self._judge.verdict(group, source, summaries + ([] if arrived is None else [arrived]))
        except RecipeCodeError:
            if self.state.phase != "failed":
                raise
            return None  # it is what failed the run: the group is kept, so that nothing is lost

    def _exhausted(self, sample: Sample, cause: CloseCause) -> bool:
        settings = self.state.settings
        if cause is CloseCause.LOST:
            return sample.lost + 1 >= settings.max_lost
        return cause in _HOPELESS or (cause in INFRASTRUCTURE_CAUSES and sample.failures + 1 >= settings.max_attempts)


def _versions(trajectory: Trajectory) -> tuple[int, ...]:
    written = trajectory.versions[trajectory.loss_mask == 1]
    if len(written) and (written == written[0]).all():  # nearly always
        return (int(written[0]),)
    return tuple(int(version) for version in np.unique(written))
