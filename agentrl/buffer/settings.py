"""What the buffer needs to know of a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl.buffer.admission import group_limit
from agentrl.config.recipe import Recipe

__all__ = ["BufferSettings", "EvalSettings"]

# Groups the filter may drop one after the other, in batches' worth. A step that takes 64 steps' worth of episodes is no training any more; and
# while even one group in 32 is kept, 64 batches of 8 groups without one come about once in ten million: (31/32)^512.
FILTERED_BATCHES = 64
GREEDY_ESTIMATORS = frozenset({"remax"})  # their baseline is the reward of a greedy episode


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """A held-out set."""

    n: int = 1  # trajectories per task
    temperature: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferSettings:
    """The buffer's part of a recipe. Exactly one of `total_steps` and `hours` is set, but for `evaluate_only`."""

    group_size: int  # n
    groups_per_batch: int  # G
    max_staleness: int = 2  # K
    publish_every: int = 1
    total_steps: int | None = None
    hours: float | None = None
    seed: int = 0
    temperature: float = 1.0
    max_attempts: int = 3
    max_lost: int = 10
    partial_groups: bool = False
    filter: str = "none"
    filter_part: str | None = None
    max_filtered_in_row: int | None = None  # groups; None: 64 batches' worth
    over_sample: float = 0.0
    dropped_stops: Sequence[str] = ()  # stop reasons whose trajectories are left out of their group
    greedy_baseline: bool = False  # every group has one sample more, played at temperature 0
    max_failed_share: float = 0.2
    reuse: int = 1
    fresh: float = 1.0
    select: str = "oldest"
    max_token_age: int | None = None  # steps
    keep_checkpoints: int = 2
    eval_sets: Mapping[str, EvalSettings] = field(default_factory=dict)
    eval_every: int | None = None  # steps
    eval_initial: bool = True
    eval_final: bool = True
    evaluate_only: bool = False
    acknowledge: Literal["memory", "wal", "fsync"] = "wal"
    segment_bytes: int = 64 << 20
    debug: bool = False  # recount the ledger after every record

    @classmethod
    def of(cls, recipe: Recipe, *, total_steps: int | None, evaluate_only: bool = False) -> BufferSettings:
        """The settings of a recipe.

        Args:
            total_steps: None where the run ends by hours.
        """
        rollout, buffer, evaluation = recipe.rollout, recipe.buffer, recipe.eval
        return cls(
            group_size=rollout.group_size,
            groups_per_batch=recipe.learner.groups_per_batch,
            max_staleness=rollout.max_staleness,
            publish_every=recipe.weights.publish_every,
            total_steps=total_steps,
            hours=recipe.run.hours,
            seed=recipe.seed,
            temperature=rollout.temperature,
            max_attempts=buffer.max_attempts,
            max_lost=buffer.max_lost,
            partial_groups=buffer.partial_groups,
            filter=buffer.filter,
            filter_part=buffer.filter_part,
            max_filtered_in_row=buffer.max_filtered_in_row,
            over_sample=buffer.over_sample,
            dropped_stops=tuple(stop for stop, treatment in buffer.stops.model_dump().items() if treatment == "drop"),
            greedy_baseline=recipe.algorithm.advantage.estimator in GREEDY_ESTIMATORS,
            max_failed_share=buffer.max_failed_share,
            reuse=buffer.replay.reuse,
            fresh=buffer.replay.fresh,
            select=buffer.replay.select,
            max_token_age=recipe.algorithm.max_token_age,
            keep_checkpoints=recipe.checkpoint.keep,
            eval_sets={name: EvalSettings(n=one.n, temperature=one.temperature) for name, one in evaluation.sets.items()},
            eval_every=evaluation.every,
            eval_initial=evaluation.initial,
            eval_final=evaluation.final,
            evaluate_only=evaluate_only,
            acknowledge=buffer.acknowledge,
            segment_bytes=buffer.segment_mb << 20,
            debug=recipe.run.debug,
        )

    @property
    def samples_per_group(self) -> int:
        """n, and the greedy baseline where there is one."""
        return self.group_size + self.greedy_baseline

    @property
    def samples_per_batch(self) -> int:
        """Samples of G groups."""
        return self.groups_per_batch * self.samples_per_group

    @property
    def group_limit(self) -> int:
        """Groups that may be alive at once."""
        return group_limit(max_staleness=self.max_staleness, groups_per_batch=self.groups_per_batch, over_sample=self.over_sample)

    @property
    def filtered_limit(self) -> int:
        """Complete groups that may be dropped one after the other before the run ends."""
        return self.max_filtered_in_row or FILTERED_BATCHES * self.groups_per_batch
