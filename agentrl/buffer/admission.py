"""Pacing: how many groups may be alive at once."""

from __future__ import annotations

__all__ = ["Admission"]


class Admission:
    """How many groups may be alive at once: `running + buffered + training <= (K + 1) * G`.

        admit ──> running ──complete──> buffered ──take──> training ──leave──> (gone)
                     └──────drop──────> (gone)    <──give back── by a rollback, also from (gone)

    It counts groups, never versions or samples, so nothing that is dropped, retried, filtered or rolled back can leak a place or add one:

    * A group is admitted only while `room > 0`, so admission never takes the sum over the limit.
    * Every group that was admitted is dropped, or taken and its batch leaves: each frees its place exactly once. So while groups complete
      and batches are trained and published, room comes back: no deadlock.
    * Completing and taking move a place within the sum.
    * Only a rollback adds to the sum without asking: groups it gives back were admitted before and left. `room` is then 0 until as many
      have left again, so such an excess only shrinks.

    Mean staleness follows by Little's law. A group is alive from its admission until the version its batch made is published, G groups
    leave per step, and at most (K + 1) * G are alive: so it lives for at most K + 1 steps on average, of which one is its own training
    step. A token is generated under the newest published version, which is (publish_every - 1) / 2 steps old on average. Together the
    mean staleness of trajectories' first tokens is at most K + (publish_every - 1) / 2 steps.

    With replay only the share `fresh` of a batch leaves per step: groups live up to (K + 1) / fresh steps then, and the bound of their first
    use is (K + 1) / fresh - 1 + (publish_every - 1) / 2.
    """

    def __init__(self, *, max_staleness: int, groups_per_batch: int) -> None:
        self.limit = (max_staleness + 1) * groups_per_batch
        self.running = 0  # admitted, not complete
        self.buffered = 0  # complete, in no batch
        self.training = 0  # in a batch that has not left

    @property
    def alive(self) -> int:
        """Groups that hold a place."""
        return self.running + self.buffered + self.training

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        return max(0, self.limit - self.alive)

    def admit(self) -> None:
        """A group is admitted (the caller has seen `room`)."""
        self.running += 1

    def complete(self) -> None:
        """A running group has all its trajectories."""
        self.running -= 1
        self.buffered += 1

    def drop(self) -> None:
        """A running group is dropped."""
        self.running -= 1

    def take(self) -> None:
        """A buffered group goes into a batch."""
        self.buffered -= 1
        self.training += 1

    def leave(self, groups: int) -> None:
        """The batch of these groups leaves."""
        self.training -= groups

    def give_back(self, *, left: bool) -> None:
        """A group's batch is annulled.

        Args:
            left: its batch had left before.
        """
        self.training -= not left
        self.buffered += 1
