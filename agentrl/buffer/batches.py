"""Batches: what was taken for training, what of it was trained, and what a checkpoint says was consumed."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.buffer.records import BatchTaken, BatchTrained, Checkpoint, Ranges, Rollback

__all__ = ["Batch", "Batches", "contains", "with_id", "within"]


@dataclass(slots=True)
class Batch:
    """A batch of the surviving history."""

    taken: BatchTaken
    trained: BatchTrained | None = None
    left: bool = False  # its groups hold no place in admission any more

    @property
    def first_uses(self) -> list[int]:
        """Ordinals of the groups it is the first batch of."""
        return [ordinal for ordinal, use, _ in self.taken.groups if use == 0]

    @property
    def finite(self) -> bool:
        """At least one of its updates was done."""
        return self.trained is None or self.trained.updates_done > 0


@dataclass(slots=True)
class Batches:
    """The batches a rollback may annul, the step, and the checkpoints that bound both."""

    keep: int | None  # checkpoints; None keeps every batch for ever
    step: int = 0
    next: int = 0  # the next batch id: never reused
    by_id: dict[int, Batch] = field(default_factory=dict)
    consumed: Ranges = ()  # trained in the surviving history
    settled: Ranges = ()  # ... and named consumed by every kept checkpoint: forgotten here
    checkpoints: list[Checkpoint] = field(default_factory=list)  # kept and valid, oldest first
    last: bool = False  # the newest trained batch was taken as the run's last
    rolled_back: Rollback | None = None  # the newest rollback, while no batch was taken since
    _answers: dict[tuple[int, int], int] = field(default_factory=dict)  # (learner incarnation, number) -> batch
    _asked: dict[int, int] = field(default_factory=dict)  # learner incarnation -> its newest number

    @property
    def outstanding(self) -> Batch | None:
        """The batch that was taken and is not trained."""
        newest = self.by_id.get(self.next - 1)
        return newest if newest is not None and newest.trained is None else None

    def answer(self, incarnation: int, number: int) -> Batch | None:
        """The batch that was given to a request before."""
        return self.by_id.get(self._answers.get((incarnation, number), -1))

    def asked(self, incarnation: int, number: int) -> bool:
        """Whether a request was answered with a batch, be it annulled or forgotten since."""
        return number <= self._asked.get(incarnation, -1)

    def take(self, record: BatchTaken) -> Batch:
        """Groups go into training."""
        batch = self.by_id[record.batch] = Batch(taken=record)
        self.next = record.batch + 1
        self._answers[(record.incarnation, record.number)] = record.batch
        self._asked[record.incarnation] = record.number
        self.rolled_back = None
        return batch

    def train(self, record: BatchTrained) -> Batch:
        """A batch was trained on."""
        batch = self.by_id[record.batch]
        batch.trained = record
        self.step = record.step
        self.consumed = with_id(self.consumed, record.batch)
        self.last = batch.taken.last
        return batch

    def leave(self, published: int | None) -> list[Batch]:
        """Batches that leave admission now that `published` is the newest version: those whose version it reaches, or that made none."""
        leaving = [batch for batch in self.by_id.values() if not batch.left and _may_leave(batch, published)]
        for batch in leaving:
            batch.left = True
        return leaving

    def commit(self, record: Checkpoint) -> list[Batch]:
        """A checkpoint is in its place. Returns the batches that no kept checkpoint can give back any more."""
        self.checkpoints = [c for c in self.checkpoints if c.id != record.id] + [record]
        if self.keep is None or len(self.checkpoints) < self.keep:
            return []
        self.checkpoints = self.checkpoints[-self.keep :]
        self.settled = self.checkpoints[0].consumed
        done = [batch for number, batch in self.by_id.items() if batch.left and contains(self.settled, number)]
        for batch in done:
            del self.by_id[batch.taken.batch]
            self._answers.pop((batch.taken.incarnation, batch.taken.number), None)
        return done

    def annulled_by(self, consumed: Ranges) -> list[Batch]:
        """The batches a rollback takes back, newest first."""
        return [self.by_id[number] for number in sorted(self.by_id, reverse=True) if not contains(consumed, number)]

    def roll_back(self, record: Rollback) -> list[Batch]:
        """Take back every batch not named consumed. Returns them, newest first."""
        annulled = self.annulled_by(record.consumed)
        for batch in annulled:
            del self.by_id[batch.taken.batch]
            self.last = False
        self.step, self.consumed, self.rolled_back = record.step, record.consumed, record
        self.checkpoints = [c for c in self.checkpoints if c.step <= record.step]
        return annulled


def contains(ranges: Ranges, number: int) -> bool:
    """Whether a batch id lies in ranges."""
    return any(first <= number <= last for first, last in ranges)


def with_id(ranges: Ranges, number: int) -> Ranges:
    """The ranges with one more, larger id."""
    if ranges and ranges[-1][1] == number - 1:
        return (*ranges[:-1], (ranges[-1][0], number))
    return (*ranges, (number, number))


def within(ranges: Ranges, other: Ranges) -> bool:
    """Whether every id of `ranges` is one of `other`, too."""
    return all(any(f <= first and last <= t for f, t in other) for first, last in ranges)


def _may_leave(batch: Batch, published: int | None) -> bool:
    if batch.trained is None:
        return False
    return batch.trained.version is None or (published is not None and published >= batch.trained.version)
