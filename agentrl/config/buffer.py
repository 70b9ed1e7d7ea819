"""The replay buffer."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from agentrl.config.section import NonNegativeFloat, Positive, Section, Share

__all__ = ["BufferRecipe", "ReplayRecipe", "StopsRecipe", "Treatment"]


class ReplayRecipe(Section):
    """Training on a group more than once."""

    reuse: Positive = 1
    """In how many batches a group may be trained on."""
    fresh: Share = 1.0
    """At least this share of a batch's groups is new."""
    select: str = "oldest"
    """Which reused groups: oldest, uniform, or `module:function`."""


Treatment = Literal["train", "mask", "drop"]


class StopsRecipe(Section):
    """What becomes of a trajectory by the reason it stopped: `train` on it; `mask` its tokens from the loss, keeping its reward in its group's
    baseline; or `drop` it from its group, which is dropped where fewer than 2 are left (`group_incomplete`). Counted by cause."""

    answered: Treatment = "train"
    """The environment says the task is done."""
    turn_limit: Treatment = "train"
    """The environment's turns are used up."""
    invalid_limit: Treatment = "train"
    """Too many invalid actions in a row."""
    completion_limit: Treatment = "train"
    """The environment ended it on a turn that ran into its token limit."""
    observation_limit: Treatment = "train"
    """An observation did not fit."""
    context_limit: Treatment = "train"
    """Prompt and turns reached the context limit."""


class BufferRecipe(Section):
    """The replay buffer."""

    acknowledge: Literal["memory", "wal", "fsync"] = "wal"
    """When a record counts as written: in memory, in the file (survives kill -9), or on the disk (survives power loss)."""
    segment_mb: Positive = 64
    """Size at which the journal begins a new file."""
    max_attempts: Positive = 3
    """Attempts of a sample before its group closes as group_incomplete."""
    max_lost: Positive = 10
    """Lost attempts of a sample (a process of ours died) before it counts as exhausted."""
    partial_groups: bool = False
    """Train groups of at least 2 where a sample exhausted its attempts."""
    max_failed_share: Share = 0.2
    """The run ends when more than this share of the last tickets (at least 100) failed."""
    filter: str = "none"
    """Which complete groups are trained on: all (`none`); those whose rewards differ (`mixed`: DAPO's dynamic filtering); or those for which
    `module:function(group: agentrl.buffer.filters.CompleteGroup) -> bool` says so. Others are dropped and leave admission at once."""
    filter_part: str | None = None
    """With `mixed`: look at this part of the reward instead of its total."""
    max_filtered_in_row: Positive | None = None
    """Complete groups dropped one after the other, by the filter or by stops, before the run ends; by default 64 x groups_per_batch."""
    over_sample: NonNegativeFloat = 0.0
    """Share of groups admitted beyond (K+1) x groups_per_batch, to make up for those that are dropped. Staleness grows with it."""
    stops: StopsRecipe = StopsRecipe()
    replay: ReplayRecipe = ReplayRecipe()

    @model_validator(mode="after")
    def _filters(self) -> BufferRecipe:
        if self.filter not in ("none", "mixed") and ":" not in self.filter:
            raise ValueError(f"buffer.filter must be none, mixed or module:function, got {self.filter!r}")
        if self.filter_part is not None and self.filter != "mixed":
            raise ValueError("buffer.filter_part belongs to buffer.filter mixed")
        drops = self.filter != "none" or "drop" in self.stops.model_dump().values()
        if not drops and (self.over_sample or self.max_filtered_in_row is not None):
            raise ValueError(
                "buffer.over_sample and max_filtered_in_row make up for groups that are dropped, and there is no buffer.filter and no buffer.stops"
                " that drops: leave them out"
            )
        return self
