"""Alarms over the metrics of a run's steps: which are raised, and which weights are known to be good.

A step's metric is good, bad, or not there. An alarm is raised when it was bad `patience` times in a row. Everything here follows from the
metrics of the surviving steps, in order: a resumed run shows them again and stands where it stood.

What a step shows is of weights made before it. `learner/` metrics are measured on the weights the step starts from, `batch/` metrics on
episodes that weights up to the bound of staleness older have played. So where a metric turned bad at step b, the weights of step b-1, or
of K+1 more, may be the first bad ones: good are those before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from agentrl.config.health import AlarmRecipe, HealthRecipe

__all__ = ["Alarm", "HealthMonitor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """An alarm that was raised."""

    name: str
    metric: str
    step: int  # raised in
    since: int  # the first bad step of the streak
    value: float  # in `step`
    bound: str  # in words: "above 0.5"
    actions: tuple[str, ...]

    def __str__(self) -> str:
        return f"alarm {self.name}: {self.metric} is {self.value:.4g}, {self.bound}, since step {self.since}"

    def to_plain(self) -> dict[str, Any]:
        """As a plain map; a value that is not finite as text."""
        value = self.value if math.isfinite(self.value) else str(self.value)
        return {
            "alarm": self.name,
            "metric": self.metric,
            "step": self.step,
            "since": self.since,
            "value": value,
            "bound": self.bound,
            "actions": list(self.actions),
        }


class HealthMonitor:
    """Watches a run.

    Args:
        max_staleness: K of the recipe, steps.
    """

    def __init__(self, recipe: HealthRecipe, *, max_staleness: int) -> None:
        self._watched = {name: _Watched(alarm) for name, alarm in recipe.alarms.items() if alarm.actions}
        self._baseline_steps, self._max_staleness = recipe.baseline_steps, max_staleness
        self._step = 0
        self._quiet: list[range] = []  # steps that raise nothing and are no baseline

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take in the metrics of a step (counted after it: the first is 1). Returns the alarms it raises."""
        self._step = step
        quiet = any(step in steps for steps in self._quiet)
        healthy = not quiet and not any(one.breaks_absolute(step, metrics) for one in self._watched.values())
        raised = []
        for name, one in self._watched.items():
            bound = one.judge(step, metrics, self._baseline_steps)
            if bound is not None and len(one.streak) >= one.recipe.patience and not one.told and not quiet:
                one.told = True
                raised.append(
                    Alarm(
                        name=name,
                        metric=one.recipe.metric,
                        step=step,
                        since=one.streak[0],
                        value=metrics[one.recipe.metric],
                        bound=bound,
                        actions=tuple(one.recipe.actions),
                    )
                )
            if healthy:
                one.learn(step, metrics, self._baseline_steps)
        return raised

    @property
    def good_until(self) -> int | None:
        """Weights of this step and earlier had no part in what any alarm that may take the run back finds bad, or may yet find in weights
        it has not seen. None where no alarm may; may be negative."""
        suspect = [self._blameless(one) for one in self._watched.values() if "rollback" in one.recipe.actions]
        return min(suspect, default=None)

    def roll_back(self, step: int, *, seen: int) -> None:
        """The run, which had come to step `seen`, goes back to `step`: what was observed after it is forgotten.

        No alarm is raised before the run is max_staleness + 1 steps beyond `seen`: until then batches may hold what was played before, which
        is further from the restored weights than batches usually are.
        """
        self._quiet.append(range(step + 1, seen + self._max_staleness + 2))
        self._step = step
        for one in self._watched.values():
            one.forget(step)

    def _blameless(self, one: _Watched) -> int:
        first_bad = one.streak[0] if one.streak else self._step + 1
        lag = 1 + (self._max_staleness if one.recipe.metric.startswith("batch/") else 0)
        return first_bad - 1 - lag


@dataclass(slots=True)
class _Watched:
    """One alarm's memory."""

    recipe: AlarmRecipe
    streak: list[int] = field(default_factory=list)  # bad steps in a row, up to now
    told: bool = False  # raised in this streak
    baseline: list[tuple[int, float]] = field(default_factory=list)  # (step, value) of the first healthy steps

    def breaks_absolute(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether this step's value is beyond a bound that needs no baseline."""
        return self._looks_at(step, metrics) and self._beyond(metrics[self.recipe.metric], self.recipe.above, self.recipe.below) is not None

    def judge(self, step: int, metrics: Mapping[str, float], baseline_steps: int) -> str | None:
        """Make the streak longer or end it. Returns the broken bound."""
        if not self._looks_at(step, metrics):
            return None
        recipe, value = self.recipe, metrics[self.recipe.metric]
        bound = self._beyond(value, recipe.above, recipe.below)
        usual = median(value for _, value in self.baseline) if len(self.baseline) >= baseline_steps else 0.0
        if bound is None and usual > 0.0:
            high = None if recipe.above_factor is None else recipe.above_factor * usual
            low = None if recipe.below_factor is None else recipe.below_factor * usual
            bound = self._beyond(value, high, low)
            bound = None if bound is None else f"{bound} (the first healthy steps had {usual:.4g})"
        if bound is None:
            self.streak, self.told = [], False
        else:
            self.streak.append(step)
        return bound

    def learn(self, step: int, metrics: Mapping[str, float], baseline_steps: int) -> None:
        """Take a healthy step's value into the baseline, until that is complete."""
        if self._looks_at(step, metrics) and len(self.baseline) < baseline_steps:
            self.baseline.append((step, metrics[self.recipe.metric]))

    def forget(self, step: int) -> None:
        """Take back what was seen after `step`; a streak that reaches back beyond it is cut there."""
        kept = [bad for bad in self.streak if bad <= step]
        self.told = self.told and kept == self.streak
        self.streak, self.baseline = kept, [(seen, value) for seen, value in self.baseline if seen <= step]

    def _looks_at(self, step: int, metrics: Mapping[str, float]) -> bool:
        return step > self.recipe.warmup_steps and self.recipe.metric in metrics

    @staticmethod
    def _beyond(value: float, above: float | None, below: float | None) -> str | None:
        if not math.isfinite(value):
            return "not a finite number"
        if above is not None and value > above:
            return f"above {above:.4g}"
        return f"below {below:.4g}" if below is not None and value < below else None
