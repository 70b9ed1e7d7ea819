"""Groups: the trajectories of one task, from admission until nothing needs them any more."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.buffer.admission import Admission
from agentrl.buffer.journal import Location
from agentrl.buffer.ledger import BUFFERED, DROPPED, IN_FLIGHT, NOT_ISSUED, TRAINED, TRAINING, Ledger
from agentrl.buffer.records import TaskIssued, Verdict
from agentrl.buffer.summary import TrajectorySummary
from agentrl.errors import ReplayBufferError
from agentrl.types import INFRASTRUCTURE_CAUSES, CloseCause, Purpose, Ticket

__all__ = [
    "BAD_WEIGHTS",
    "FILTERED",
    "GROUP_INCOMPLETE",
    "NONFINITE",
    "SAMPLE_EXHAUSTED",
    "STOPPED",
    "Group",
    "GroupNews",
    "GroupState",
    "Groups",
    "Held",
    "Sample",
]

MIN_PARTIAL_GROUP = 2  # a group of one has no baseline, but for a greedy one
FILTERED = "filtered"  # the filter did not keep the group
STOPPED = "stop_"  # + stop reason: the recipe drops trajectories that stopped so
GROUP_INCOMPLETE = "group_incomplete"  # a sample exhausted its attempts, or stops left too few: the whole group goes
SAMPLE_EXHAUSTED = "sample_exhausted"  # ... or, with partial_groups, the sample alone
NONFINITE = "nonfinite"  # no update of its batch was finite
BAD_WEIGHTS = "bad_weights"  # a rollback abandoned weights that were bad, and they had a part in it


@dataclass(slots=True)
class Held:
    """A trajectory the buffer holds."""

    location: Location
    versions: tuple[int, ...]
    summary: TrajectorySummary
    data: bytes | None  # None: read it from the journal


@dataclass(slots=True)
class Sample:
    """One wanted trajectory."""

    attempt: int = -1  # the newest ticket's
    open: bool = False  # ... and whether it is being played
    failures: int = 0  # attempts the infrastructure failed
    lost: int = 0  # attempts a process of ours took with it
    held: Held | None = None
    given_up: bool = False
    queued: bool = False  # it stands in the queue of those that want a ticket, once at most
    cause: CloseCause | None = None  # of the last attempt that gave no trajectory

    @property
    def waiting(self) -> bool:
        """It wants a ticket."""
        return not (self.open or self.given_up or self.held is not None)

    def issue(self, attempt: int) -> None:
        """A ticket is issued."""
        self.attempt, self.open = attempt, True

    def close(self, cause: CloseCause) -> None:
        """Its ticket closed without a trajectory."""
        self.open, self.cause = False, cause
        self.failures += cause in INFRASTRUCTURE_CAUSES
        self.lost += cause is CloseCause.LOST


class GroupState(StrEnum):
    """Where a group stands. A dropped group is forgotten at once."""

    RUNNING = "running"
    BUFFERED = "buffered"
    TRAINING = "training"
    TRAINED = "trained"  # kept for a rollback, or to be used again


@dataclass(slots=True)
class Group:
    """The trajectories of one task."""

    ordinal: int
    task: str  # its id
    samples: list[Sample]
    greedy: bool = False  # the last sample is the baseline, played at temperature 0
    state: GroupState = GroupState.RUNNING
    uses: int = 0  # surviving batches it is or was in
    settled: bool = False  # every kept checkpoint names its first batch consumed

    @property
    def complete(self) -> bool:
        """Every sample has its trajectory or is given up."""
        return all(sample.held is not None or sample.given_up for sample in self.samples)

    @property
    def baseline(self) -> int | None:
        """k of the greedy sample; None where it has none."""
        return len(self.samples) - 1 if self.greedy else None

    @property
    def fewest(self) -> int:
        """Trajectories to train on, the baseline aside, below which the group is dropped."""
        return 1 if self.greedy else min(MIN_PARTIAL_GROUP, len(self.samples))

    @property
    def rewards(self) -> tuple[float, ...]:
        """Total rewards of its trajectories, by k, the baseline aside."""
        return tuple(held.summary.reward for held in self.held if held.summary.k != self.baseline)

    @property
    def held(self) -> list[Held]:
        """Its trajectories, by k, a baseline last."""
        return [sample.held for sample in self.samples if sample.held is not None]

    @property
    def versions(self) -> set[int]:
        """Of its generated tokens."""
        return {version for held in self.held for version in held.versions}


@dataclass(frozen=True, slots=True)
class GroupNews:
    """A group was issued, or (`rewards` is set) it is complete or dropped."""

    ordinal: int
    task: str  # its id
    rewards: tuple[float, ...] | None = None  # of the trajectories it has, by k


@dataclass(slots=True)
class Groups:
    """All groups that are alive or may be needed again. Its methods are the fold: each follows from one record."""

    admission: Admission
    ledger: Ledger = field(default_factory=lambda: Ledger(NOT_ISSUED, IN_FLIGHT, BUFFERED, TRAINING, TRAINED))
    by_ordinal: dict[int, Group] = field(default_factory=dict)
    frontier: int = 0  # the next ordinal: groups are issued in order
    reusable: set[int] = field(default_factory=set)  # trained groups with uses left
    completed: int = 0  # groups that were complete
    filtered: int = 0  # ... and were dropped then, by the filter or because stops left too few of their trajectories
    filtered_in_row: int = 0  # ... since the last that was kept
    news: deque[GroupNews] | None = None  # in the order of the records, for who takes them off; None: nobody does
    _waiting: list[tuple[int, int]] = field(default_factory=list)  # heap of samples that want a ticket; some entries are outdated
    _ready: list[int] = field(default_factory=list)  # heap of complete groups; some entries are outdated

    def sample(self, ticket: Ticket) -> Sample | None:
        """The sample a ticket plays; None where its group is gone."""
        group = self.by_ordinal.get(ticket.ordinal)
        return group.samples[ticket.k] if group is not None and 0 <= ticket.k < len(group.samples) else None

    def next_waiting(self) -> tuple[int, int] | None:
        """Take the oldest sample that wants a ticket off the queue."""
        while self._waiting:
            ordinal, k = heapq.heappop(self._waiting)
            group = self.by_ordinal.get(ordinal)
            if group is not None:
                group.samples[k].queued = False
                if group.samples[k].waiting:
                    return ordinal, k
        return None

    def put_back(self, ordinal: int, k: int) -> None:
        """A sample wants a ticket (again)."""
        sample = self.by_ordinal[ordinal].samples[k]
        if not sample.queued:
            sample.queued = True
            heapq.heappush(self._waiting, (ordinal, k))

    @property
    def ready(self) -> int:
        """Complete groups in no batch."""
        return self.admission.buffered

    def oldest_ready(self, count: int) -> list[Group]:
        """The `count` complete groups that were dispatched first: ordinals are issued in order, so those with the smallest."""
        found: list[int] = []
        while self._ready and len(found) < count:
            ordinal = heapq.heappop(self._ready)
            group = self.by_ordinal.get(ordinal)
            if group is not None and group.state is GroupState.BUFFERED and ordinal not in found[-1:]:
                found.append(ordinal)
        for ordinal in found:  # they leave when the batch is recorded
            heapq.heappush(self._ready, ordinal)
        return [self.by_ordinal[ordinal] for ordinal in found]

    def issue(self, record: TaskIssued) -> None:
        """A group is admitted."""
        ordinal, n = record.ordinal, record.n
        self.by_ordinal[ordinal] = Group(ordinal=ordinal, task=record.task, samples=[Sample() for _ in range(n)], greedy=record.greedy)
        self.frontier = max(self.frontier, ordinal + 1)
        self.admission.admit()
        self.ledger.want(n)
        self._tell(GroupNews(ordinal, record.task))
        for k in range(n):
            self.put_back(ordinal, k)

    def start(self, ticket: Ticket) -> None:
        """A ticket is issued."""
        self.by_ordinal[ticket.ordinal].samples[ticket.k].issue(ticket.attempt)
        self.ledger.move(NOT_ISSUED, IN_FLIGHT)

    def add(self, ticket: Ticket, held: Held, verdict: Verdict | None) -> None:
        """A ticket's outcome is a trajectory."""
        group = self.by_ordinal[ticket.ordinal]
        sample = group.samples[ticket.k]
        sample.open, sample.held = False, held
        self.ledger.move(IN_FLIGHT, BUFFERED)
        self._completed(group, verdict)

    def close(self, ticket: Ticket, cause: CloseCause, *, goes_on: bool, drop: str, verdict: Verdict | None) -> list[Ticket]:
        """A ticket's outcome is none. Returns the group's other open tickets, which close with it where it is dropped."""
        group = self.by_ordinal[ticket.ordinal]
        group.samples[ticket.k].close(cause)
        self.ledger.move(IN_FLIGHT, NOT_ISSUED)
        if drop:
            self._tell(GroupNews(group.ordinal, group.task, group.rewards))
            return self._drop(group, drop)
        if goes_on:
            self.put_back(*ticket.sample)
        else:
            group.samples[ticket.k].given_up = True
            self.ledger.move(NOT_ISSUED, DROPPED + SAMPLE_EXHAUSTED)
            self._completed(group, verdict)
        return []

    def take(self, ordinal: int, *, first: bool) -> None:
        """A group goes into a batch."""
        group = self.by_ordinal.get(ordinal)
        if group is None and not first:
            return  # forgotten, as the settings of now allow no further use
        assert group is not None, "no group is forgotten before its first batch"
        group.uses += 1
        if first:
            group.state = GroupState.TRAINING
            self.admission.take()
            self.ledger.move(BUFFERED, TRAINING, len(group.held))

    def trained(self, ordinal: int, *, first: bool, finite: bool, reuse: int) -> None:
        """A group was trained on."""
        group = self.by_ordinal.get(ordinal)
        if group is None:
            return
        if first:
            group.state = GroupState.TRAINED
            self.ledger.move(TRAINING, TRAINED if finite else DROPPED + NONFINITE, len(group.held))
            for held in group.held:
                held.data = None
            if finite and group.uses < reuse:
                self.reusable.add(ordinal)
        elif group.uses >= reuse:
            self.reusable.discard(ordinal)
            self._forget_if_done(group)

    def give_back(self, ordinal: int, *, first: bool, trained: bool, finite: bool, left: bool) -> None:
        """A batch with this group is annulled."""
        group = self.by_ordinal.get(ordinal)
        if group is None:
            return  # a later use of a group that is not needed any more
        group.uses -= 1
        if not first:
            self.reusable.add(ordinal)
            return
        source = TRAINING if not trained else TRAINED if finite else DROPPED + NONFINITE
        self.ledger.move(source, BUFFERED, len(group.held))
        self.admission.give_back(left=left)
        self.reusable.discard(ordinal)
        group.state = GroupState.BUFFERED
        heapq.heappush(self._ready, ordinal)

    def condemn(self, bad: Callable[[Iterable[int]], bool]) -> list[Ticket]:
        """Groups in no batch that hold tokens of bad versions are dropped. Returns their open tickets, which close with them."""
        cancelled = []
        for group in [group for group in self.by_ordinal.values() if group.state in (GroupState.RUNNING, GroupState.BUFFERED)]:
            if bad(group.versions):
                if group.state is GroupState.RUNNING:
                    self._tell(GroupNews(group.ordinal, group.task, group.rewards))
                cancelled += self._drop(group, BAD_WEIGHTS)
        return cancelled

    def settle(self, ordinal: int) -> None:
        """No checkpoint that is kept can give this group back."""
        group = self.by_ordinal.get(ordinal)
        if group is not None:
            group.settled = True
            self._forget_if_done(group)

    def expire(self, ordinals: Iterable[int]) -> None:
        """These trained groups are too old to be used again: they are forgotten, but for those a checkpoint may give back."""
        for ordinal in ordinals:
            group = self.by_ordinal[ordinal]
            if group.settled:
                self.reusable.discard(ordinal)
                self._forget_if_done(group)

    def check(self) -> None:
        """Count everything anew and compare with the ledger and with admission. For tests and `run.debug`."""
        counted: Counter[str] = Counter({NOT_ISSUED: 0, IN_FLIGHT: 0, BUFFERED: 0, TRAINING: 0})
        states: Counter[GroupState] = Counter()
        for group in self.by_ordinal.values():
            states[group.state] += 1
            if group.state is GroupState.TRAINING:
                counted[TRAINING] += len(group.held)
            elif group.state is not GroupState.TRAINED:
                counted[BUFFERED] += len(group.held)
                counted[IN_FLIGHT] += sum(sample.open for sample in group.samples)
                counted[NOT_ISSUED] += sum(sample.waiting for sample in group.samples)
        self.ledger.check(counted)
        found = (states[GroupState.RUNNING], states[GroupState.BUFFERED])
        if found != (self.admission.running, self.admission.buffered) or states[GroupState.TRAINING] > self.admission.training:
            raise ReplayBufferError(f"admission counts {self.admission.__dict__}, but the groups are {dict(states)}")

    def _completed(self, group: Group, verdict: Verdict | None) -> None:
        if not group.complete:
            return
        verdict = verdict or Verdict()
        self._tell(GroupNews(group.ordinal, group.task, group.rewards))
        self.completed += 1
        for k in verdict.left_out:
            sample = group.samples[k]
            assert sample.held is not None, "a stop is that of a trajectory"
            self.ledger.move(BUFFERED, DROPPED + STOPPED + sample.held.summary.stop)
            sample.held, sample.given_up = None, True
        if verdict.drop == BAD_WEIGHTS:  # no word on the filter
            self._drop(group, verdict.drop)
            return
        if verdict.drop:
            self.filtered, self.filtered_in_row = self.filtered + 1, self.filtered_in_row + 1
            self._drop(group, verdict.drop)
            return
        self.filtered_in_row = 0
        group.state = GroupState.BUFFERED
        self.admission.complete()
        heapq.heappush(self._ready, group.ordinal)

    def _tell(self, news: GroupNews) -> None:
        if self.news is not None:
            self.news.append(news)

    def _drop(self, group: Group, cause: str) -> list[Ticket]:
        open_tickets = []
        for k, sample in enumerate(group.samples):
            if sample.open:
                open_tickets.append(Ticket(purpose=Purpose.TRAIN, ordinal=group.ordinal, k=k, attempt=sample.attempt))
            if not sample.given_up:
                account = IN_FLIGHT if sample.open else BUFFERED if sample.held is not None else NOT_ISSUED
                self.ledger.move(account, DROPPED + cause)
        del self.by_ordinal[group.ordinal]
        if group.state is GroupState.RUNNING:
            self.admission.drop()
        else:
            self.admission.condemn()
        return open_tickets

    def _forget_if_done(self, group: Group) -> None:
        if group.settled and group.state is GroupState.TRAINED and group.ordinal not in self.reusable:
            del self.by_ordinal[group.ordinal]
