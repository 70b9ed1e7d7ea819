"""What becomes of a group when it is complete: trajectories left out by their stops, and groups that are not trained on at all.

`buffer.stops` first: trajectories whose stop reason is treated as `drop` leave the group; where too few are left, the rest goes as
`group_incomplete`. Then `buffer.filter`: a group it does not keep goes as `filtered`. A greedy baseline takes no part in either: it goes
where its group goes. All of it is decided before the group could be in any batch, and recorded with the record that completes the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.buffer.groups import FILTERED, GROUP_INCOMPLETE, Group
from agentrl.buffer.records import Verdict
from agentrl.buffer.settings import BufferSettings
from agentrl.buffer.summary import TrajectorySummary
from agentrl.errors import ConfigError, RecipeCodeError
from agentrl.resolve import called, resolve

__all__ = ["CompleteGroup", "Filter", "Judge", "mixed", "resolve_filter"]

# Rewards that differ by less than this share are equal: the same parts, added in another order, differ in their last bits.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class CompleteGroup:
    """What a filter decides on."""

    ordinal: int  # of the task in the run
    task: str  # its id
    source: str  # ... and its source
    trajectories: tuple[TrajectorySummary, ...]  # by k; those left out by their stops are not among them
    baseline: TrajectorySummary | None = None  # of the greedy episode, where the estimator has one


Filter = Callable[[CompleteGroup], bool]
"""Whether a complete group is trained on."""


class Judge:
    """Decides on complete groups.

    Raises:
        ConfigError: the recipe's filter is not there.
    """

    def __init__(self, settings: BufferSettings) -> None:
        self._name, self._dropped_stops = settings.filter, frozenset(settings.dropped_stops)
        self._keeps = resolve_filter(settings.filter, settings.filter_part)

    def verdict(self, group: Group, source: str, summaries: Sequence[TrajectorySummary]) -> Verdict:
        """What becomes of a group.

        Args:
            source: of its task.
            summaries: of all trajectories it has when it is complete.

        Raises:
            RecipeCodeError: the recipe's filter failed, or answered neither yes nor no.
        """
        by_k = sorted(summaries, key=lambda summary: summary.k)
        sampled = [summary for summary in by_k if summary.k != group.baseline]
        kept = tuple(summary for summary in sampled if summary.stop not in self._dropped_stops)
        left_out = tuple(summary.k for summary in sampled if summary.stop in self._dropped_stops)
        if len(kept) < group.fewest:
            return Verdict(left_out=left_out, drop=GROUP_INCOMPLETE)
        baseline = next((summary for summary in by_k if summary.k == group.baseline), None)
        complete = CompleteGroup(ordinal=group.ordinal, task=group.task, source=source, trajectories=kept, baseline=baseline)
        return Verdict(left_out=left_out, drop="" if self._passes(complete) else FILTERED)

    def _passes(self, complete: CompleteGroup) -> bool:
        answer = called(f"buffer.filter {self._name}", self._keeps, complete)
        if not isinstance(answer, bool) and type(answer).__name__ != "bool_":  # NumPy's own is as good
            raise RecipeCodeError(f"buffer.filter {self._name} returned {answer!r} for group {complete.ordinal}: expected True (keep it) or False")
        return bool(answer)


def resolve_filter(name: str, part: str | None) -> Filter:
    """`none`, `mixed` (of the part of the reward, or of its total), or the function `module:function`.

    Raises:
        ConfigError: there is no such function.
    """
    if name == "none":
        return lambda group: True
    if name == "mixed":
        return lambda group: mixed(group, part)
    try:
        function = resolve(name)
    except ConfigError as error:
        raise ConfigError(f"buffer.filter: {error}") from error
    if not callable(function):
        raise ConfigError(f"buffer.filter: {name} is not a function")
    return function  # type: ignore[no-any-return]


def mixed(group: CompleteGroup, part: str | None = None) -> bool:
    """Whether rewards differ within the group: where they do not, every group-relative advantage is 0 and nothing can be learnt.

    The dynamic sampling of DAPO (Yu et al. 2025, eq. 11), which states it for right and wrong answers.

    Args:
        part: look at this part of the reward instead of its total; a trajectory without it counts 0.
    """
    rewards = [trajectory.reward if part is None else trajectory.parts.get(part, 0.0) for trajectory in group.trajectories]
    return not math.isclose(min(rewards), max(rewards), rel_tol=ROUNDING, abs_tol=ROUNDING)
