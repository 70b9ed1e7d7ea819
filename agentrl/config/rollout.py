"""Rollout workers: what they play, how much at a time, and its limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from agentrl.config.section import NonNegative, Positive, PositiveFloat, Seconds, Section

__all__ = ["LimitsRecipe", "OverLongRecipe", "RolloutRecipe"]


class LimitsRecipe(Section):
    """Token limits. Defaults are Search-R1's (max_start_length, max_response_length, max_obs_length, max_prompt_length)."""

    prompt_tokens: Positive = 2048
    """The prompt; a task that exceeds it is never cut."""
    completion_tokens: Positive = 500
    """Per turn."""
    observation_tokens: Positive = 500
    """Per turn; cuts untrusted text only."""
    context_tokens: Positive = 4096
    """Prompt and all turns. The question is never cut off: the episode ends instead."""


class OverLongRecipe(Section):
    """A penalty for trajectories that come near a length limit (DAPO, Yu et al. 2025, eq. 13): a part `over_long` of the reward.

    0 up to `limit_tokens - buffer_tokens` generated tokens, then falling linearly to `-factor` at `limit_tokens` and beyond.
    """

    limit_tokens: Positive
    """Generated tokens of a trajectory."""
    buffer_tokens: Positive
    """Length of the slope before the limit."""
    factor: PositiveFloat = 1.0
    """The largest penalty."""

    @model_validator(mode="after")
    def _room(self) -> OverLongRecipe:
        if self.buffer_tokens > self.limit_tokens:
            raise ValueError(f"over_long.buffer_tokens ({self.buffer_tokens}) must not exceed over_long.limit_tokens ({self.limit_tokens})")
        return self


class RolloutRecipe(Section):
    """The rollout workers. `top_p` must be 1 and `top_k` -1: a truncated distribution would need a correction that is not there."""

    workers: Positive = 1
    """Number of worker processes."""
    concurrency: Positive = 128
    """Episodes per worker at a time."""
    group_size: Positive = 8
    """n: trajectories per task."""
    max_staleness: NonNegative = 2
    """K: running + buffered + training groups <= (K+1) x groups_per_batch. 0 is the synchronous trainer."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of sampling in training; the learner applies it too."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Must be 1."""
    top_k: int = -1
    """Must be -1."""
    limits: LimitsRecipe = LimitsRecipe()
    over_long: OverLongRecipe | None = None
    """A penalty that grows with length near a limit; by default none."""
    episode_deadline_s: Seconds = 300.0
    """Of a whole episode; after it its ticket closes as `deadline`."""
    request_deadline_s: Seconds = 120.0
    """Total deadline of one generation request, weight updates included."""

    @model_validator(mode="after")
    def _untruncated(self) -> RolloutRecipe:
        if self.top_p != 1.0 or self.top_k != -1:
            raise ValueError(
                "top_p must be 1 and top_k -1 in training: behaviour log-probs are of log_softmax(logits / T), not of the truncated distribution"
            )
        return self
