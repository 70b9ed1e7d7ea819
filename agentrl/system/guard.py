"""Guards a run's health on the learner's first rank: what its steps show, which alarms that raises, and where to go back to."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from agentrl.config.recipe import Recipe
from agentrl.errors import HealthError
from agentrl.learner import checkpoint
from agentrl.learner.checkpoint import Manifest
from agentrl.metrics.alarms import ALARMS, AlarmLog, RolledBack
from agentrl.metrics.health import Alarm, HealthMonitor
from agentrl.metrics.history import read_history

__all__ = ["Guard"]

log = logging.getLogger(__name__)


class Guard:
    """The monitor, its durable record, and the checkpoints of one run.

    A rollback: `begin` writes down what is about to happen and removes the checkpoints that are newer than the one it goes back to, so that
    a resume from here on finds that one; the caller then rolls back the journal; `done` says that it has. What a crash cuts short in between
    is finished when the next guard is made and told to `resume`.
    """

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        self._recipe, self._run_dir, self._checkpoints = recipe.health, run_dir, run_dir / "checkpoints"
        self._monitor = HealthMonitor(recipe.health, max_staleness=recipe.rollout.max_staleness)
        self._log = AlarmLog(run_dir)
        if self._log.last is not None and self._log.unfinished:
            checkpoint.abandon(self._checkpoints, self._log.last.abandoned)

    def resume(self, step: int, version: int) -> None:
        """The learner stands at `step`, its weights are to be `version`: look at the run's steps up to it once more, without raising anything."""
        self.done(version)
        for one in self._log.rollbacks:
            self._monitor.roll_back(one.to_step, seen=one.step)
        for seen, metrics in read_history(self._run_dir).training.items():
            if seen <= step:
                self._monitor.observe(seen, metrics)

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """The alarms a step raises. They are on the disk when this returns."""
        raised = self._monitor.observe(step, metrics)
        for alarm in raised:
            log.warning("%s", alarm)
            self._log.alarm(alarm.to_plain())
        return raised

    @property
    def good_until(self) -> int | None:
        """The newest step whose weights no alarm that may take the run back can blame; None where no alarm may."""
        return self._monitor.good_until

    @property
    def learning_rate_scale(self) -> float | None:
        """What rollbacks have made of it; None where there were none."""
        return None if self._log.last is None else self._log.last.learning_rate_scale

    @property
    def bad_after(self) -> int | None:
        """Of the rollback that is under way: weights of later steps may be bad, and what they wrote is not trained on. None where none is."""
        return self._log.last.good_until if self._log.last is not None and self._log.unfinished else None

    @property
    def version_reason(self) -> str:
        """Why the version of restored weights is reserved: a name for each rollback."""
        return "restored" if self._log.last is None else f"rollback-{self._log.last.number}"

    def candidates(self, alarm: Alarm) -> Iterator[Manifest]:
        """Whole checkpoints to go back to for an alarm, best first: the newest good one and those before it.

        Where the run was bad so early that no checkpoint is known to be good, those from before it was seen to be.

        Raises:
            HealthError: (when the next is asked for) there are no more.
        """
        found = False
        good_until = self._monitor.good_until
        for until in (-1 if good_until is None else good_until, alarm.since - 1):
            for manifest in checkpoint.manifests(self._checkpoints, until=until):
                found = True
                yield manifest
            if found:
                break
        raise HealthError(f"{alarm}; there is no checkpoint to go back to that is older than that and that the journal confirms")

    def begin(self, alarm: Alarm, manifest: Manifest) -> None:
        """Go back to `manifest`, of `candidates`.

        Raises:
            HealthError: the recipe allows no further rollback.
        """
        last, health = self._log.last, self._recipe
        number, scale = (0, 1.0) if last is None else (last.number, last.learning_rate_scale)
        if not self._log.unfinished:  # else this is another attempt at the same one
            number, scale = number + 1, scale * health.rate_factor
        if number > health.max_rollbacks:
            raise HealthError(
                f"{alarm}; health.max_rollbacks is {health.max_rollbacks}, and the learning rate is down to {scale / health.rate_factor:g} times"
                f" the recipe's. {self._run_dir / ALARMS} tells of every alarm and rollback"
            )
        rolled_back = RolledBack(
            number=number,
            alarm=alarm.name,
            step=alarm.step,
            to=manifest.id,
            to_step=manifest.step,
            good_until=manifest.step if self.good_until is None else self.good_until,
            abandoned=tuple(checkpoint.newer(self._checkpoints, manifest)),
            learning_rate_scale=scale,
        )
        self._log.rollback(rolled_back)
        checkpoint.abandon(self._checkpoints, rolled_back.abandoned)
        self._monitor.roll_back(manifest.step, seen=alarm.step)
        log.warning("%s: back to checkpoint %s, learning rate x %g from here on", alarm, manifest.id, rolled_back.learning_rate_scale)

    def done(self, version: int) -> None:
        """The journal is rolled back, and `version` is reserved for the weights that were gone back to. Nothing where that was no rollback."""
        if self._log.unfinished:
            self._log.restored(version=version)
