"""What the buffer needs to know of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from agentrl.config.recipe import Recipe

__all__ = ["BufferSettings", "EvalSettings"]


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
    def samples_per_batch(self) -> int:
        """B = G x n."""
        return self.groups_per_batch * self.group_size
