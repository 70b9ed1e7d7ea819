"""Evaluations: a held-out set, played once beside training or on its own, outside admission and with a balance of its own."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from agentrl.buffer.groups import Held, Sample
from agentrl.buffer.ledger import DROPPED, IN_FLIGHT, NOT_ISSUED, PLAYED, Ledger
from agentrl.buffer.records import EvaluationOpened
from agentrl.types import CloseCause, Purpose, Ticket

__all__ = ["CANCELLED", "FINAL", "INITIAL", "PERIODIC", "Evaluation", "Evaluations", "Wanted"]

INITIAL, PERIODIC, FINAL = "initial", "periodic", "final"
CANCELLED = "cancelled"  # its history was rolled back


@dataclass(slots=True)
class Evaluation:
    """A held-out set being played."""

    opened: EvaluationOpened
    samples: list[Sample]  # by ordinal * n + k
    queue: deque[tuple[int, int]]  # (ordinal, k) that want a ticket
    unfinished: int

    def sample(self, ordinal: int, k: int) -> Sample:
        """One of its samples."""
        return self.samples[ordinal * self.opened.n + k]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A periodic evaluation that waits for its turn."""

    set: str
    step: int
    version: int  # it waits until this version is published, so that it measures that step's weights


@dataclass(slots=True)
class Evaluations:
    """All evaluations of a run; at most one at a time. Its methods are the fold: each follows from one record."""

    sets: tuple[str, ...]
    ledger: Ledger = field(default_factory=lambda: Ledger(NOT_ISSUED, IN_FLIGHT, PLAYED))
    running: Evaluation | None = None
    wanted: list[Wanted] = field(default_factory=list)
    _initial: set[str] = field(default_factory=set)  # sets whose first evaluation has ended
    _final: set[tuple[str, int]] = field(default_factory=set)  # (set, step)
    _names: Counter[str] = field(default_factory=Counter)

    @property
    def complete(self) -> bool:
        """The running one has all its outcomes."""
        return self.running is not None and self.running.unfinished == 0

    def name(self, set_name: str, step: int) -> str:
        """The id of the next evaluation of a set at a step: not taken before, also where the step was rolled back."""
        name = f"{set_name}@{step}"
        count = self._names[name]
        return f"{name}#{count + 1}" if count else name

    def missing(self, stage: str, step: int) -> str | None:
        """The first set whose initial, or final at `step`, evaluation has not ended."""
        if stage == INITIAL:
            return next((name for name in self.sets if name not in self._initial), None)
        return next((name for name in self.sets if (name, step) not in self._final), None)

    def want(self, step: int, version: int) -> None:
        """A step boundary calls for periodic evaluations. A set still waiting since an earlier boundary is evaluated once, for this one."""
        self.wanted = [Wanted(set=name, step=step, version=version) for name in self.sets]

    def open(self, record: EvaluationOpened) -> None:
        """A set is being played."""
        keys = [(ordinal, k) for ordinal in range(record.tasks) for k in range(record.n)]
        self.running = Evaluation(opened=record, samples=[Sample(queued=True) for _ in keys], queue=deque(keys), unfinished=len(keys))
        self._names[f"{record.set}@{record.step}"] += 1
        self.wanted = [w for w in self.wanted if (w.set, w.step) != (record.set, record.step)]
        self.ledger.want(len(keys))

    def sample(self, ticket: Ticket) -> Sample | None:
        """The sample a ticket plays; None where its evaluation is over."""
        if self.running is None or self.running.opened.evaluation != ticket.evaluation:
            return None
        return self.running.sample(*ticket.sample)

    def next_waiting(self) -> tuple[int, int] | None:
        """Take the next sample that wants a ticket off the queue."""
        while self.running is not None and self.running.queue:
            ordinal, k = self.running.queue.popleft()
            sample = self.running.sample(ordinal, k)
            sample.queued = False
            if sample.waiting:
                return ordinal, k
        return None

    def put_back(self, ordinal: int, k: int) -> None:
        """A sample wants a ticket (again)."""
        if self.running is not None and not self.running.sample(ordinal, k).queued:
            self.running.sample(ordinal, k).queued = True
            self.running.queue.append((ordinal, k))

    def start(self, ticket: Ticket) -> None:
        """A ticket is issued."""
        if self.running is not None:
            self.running.sample(*ticket.sample).issue(ticket.attempt)
            self.ledger.move(NOT_ISSUED, IN_FLIGHT)

    def add(self, ticket: Ticket, held: Held) -> None:
        """A ticket's outcome is a trajectory."""
        if self.running is not None:
            sample = self.running.sample(*ticket.sample)
            sample.open, sample.held = False, held
            self.running.unfinished -= 1
            self.ledger.move(IN_FLIGHT, PLAYED)

    def close(self, ticket: Ticket, cause: CloseCause, *, goes_on: bool) -> None:
        """A ticket's outcome is none."""
        if self.running is None:
            return
        sample = self.running.sample(*ticket.sample)
        sample.close(cause)
        self.ledger.move(IN_FLIGHT, NOT_ISSUED)
        if goes_on:
            self.put_back(*ticket.sample)
        else:
            sample.given_up = True
            self.running.unfinished -= 1
            self.ledger.move(NOT_ISSUED, DROPPED + cause)

    def end(self) -> None:
        """The running evaluation has been reported."""
        if self.running is not None:
            opened, self.running = self.running.opened, None
            if opened.stage == INITIAL:
                self._initial.add(opened.set)
            elif opened.stage == FINAL:
                self._final.add((opened.set, opened.step))

    def roll_back(self, step: int) -> list[Ticket]:
        """Evaluations of later steps are void. Returns the open tickets of the running one, where it is."""
        self.wanted = [w for w in self.wanted if w.step <= step]
        self._final = {(name, at) for name, at in self._final if at <= step}
        if self.running is None or self.running.opened.step <= step:
            return []
        return self.cancel(self.running)

    def cancel(self, running: Evaluation) -> list[Ticket]:
        """The running evaluation is void. Returns its open tickets."""
        open_tickets, opened = [], running.opened
        for index, sample in enumerate(running.samples):
            ordinal, k = divmod(index, opened.n)
            if sample.open:
                open_tickets.append(Ticket(purpose=Purpose.EVAL, ordinal=ordinal, k=k, attempt=sample.attempt, evaluation=opened.evaluation))
            if not sample.given_up:
                account = IN_FLIGHT if sample.open else PLAYED if sample.held is not None else NOT_ISSUED
                self.ledger.move(account, DROPPED + CANCELLED)
        self.running = None
        return open_tickets
