"""Pacing: how many groups may be alive at once."""

from __future__ import annotations

import math
from fractions import Fraction

__all__ = ["Admission", "group_limit"]


class Admission:
    """How many groups may be alive at once: `running + buffered + training <= (1 + over_sample) * (K + 1) * G`.

        admit ──> running ──complete──> buffered ──take──> training ──leave──> (gone)
                     ├──────drop──────> (gone)    <──give back── by a rollback, also from (gone)
                     └─complete, filtered─> (gone)

    It counts groups, never versions or samples, so nothing that is dropped, retried, filtered or rolled back can leak a place or add one:

    * A group is admitted only while `room > 0`, so admission never takes the sum over the limit.
    * Every group that was admitted is dropped, or taken and its batch leaves: each frees its place exactly once. So while groups complete
      and batches are trained and published, room comes back: no deadlock.
    * Completing and taking move a place within the sum.
    * Only a rollback adds to the sum without asking: groups it gives back were admitted before and left. `room` is then 0 until as many
      have left again, so such an excess only shrinks.

    Mean staleness follows by Little's law. A group that is trained on is alive from its admission until the version its batch made is
    published, G of them leave per step, and at most L = (1 + o) * (K + 1) * G groups are alive, o being `over_sample`: so it lives for at
    most (1 + o) * (K + 1) steps on average, of which one is its own training step. Groups that a filter or a failure takes away are among
    the L and only leave room to fewer that are trained on. A token is generated under the newest published version, which is
    (publish_every - 1) / 2 steps old on average. Together the mean staleness of trajectories' first tokens is at most
    (1 + o) * (K + 1) - 1 + (publish_every - 1) / 2; without over-sampling, K + (publish_every - 1) / 2.

    With replay fewer than G groups leave per step: at least ceil(fresh * G), and at least G / reuse in the long run, because a group fills
    at most `reuse` places of batches. They live as much longer: (1 + o) * (K + 1) * min(reuse, G / ceil(fresh * G)) replaces
    (1 + o) * (K + 1) in the bound, which is that of their first use.

    Args:
        limit: groups; see `group_limit`.
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
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
        """A running group is dropped, or it is complete and filtered."""
        self.running -= 1

    def condemn(self) -> None:
        """A buffered group is dropped."""
        self.buffered -= 1

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


def group_limit(*, max_staleness: int, groups_per_batch: int, over_sample: float = 0.0) -> int:
    """Groups that may be alive at once: (1 + over_sample) * (K + 1) * G, rounded up so that every over-sampling admits at least one more."""
    return math.ceil((1 + Fraction(str(over_sample))) * (max_staleness + 1) * groups_per_batch)  # exact: 1.1 * 20 are 22 groups
