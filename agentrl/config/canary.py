"""The canary: fixed tokens scored by learner and engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.section import Positive, PositiveFloat, Seconds, Section

__all__ = ["CanaryRecipe"]

# Largest and mean difference of log-probs, in nats, between learner and engine with the same weights. In float32 two implementations differ by
# the order of their sums. In bfloat16 a logit between 16 and 32 is off by up to 1/16 from its own rounding alone, on either side, and the hidden
# states are rounded as well: the bounds are wide there, and what `canary/gap_mean` is in a healthy run says how much narrower they can be.
_DEFAULT_GAPS = {"float32": (1e-3, 1e-4), "bfloat16": (1.0, 0.1)}


class CanaryRecipe(Section):
    """Fixed tokens are scored by the learner and by every engine under one version. A gap beyond the bounds ends the run and says whether weights
    or arithmetic differ (docs/engines.md). `canary: null` turns it off."""

    every: Positive = 10
    """Versions from one check to the next. The first version of every start is always checked."""
    sequences: Positive = 4
    """Sequences that are scored: half of each a prompt of the run's tasks, the rest pseudo-random tokens that depend on the seed alone."""
    tokens: Annotated[int, Field(ge=2)] = 64
    """Tokens of a sequence; at most engine.context_tokens less one are used."""
    max_gap: PositiveFloat | None = None
    """Largest difference of a token's log-prob that is accepted, in nats. By default 1e-3, or 1 where model.dtype or
    weights.dtype is bfloat16."""
    mean_gap: PositiveFloat | None = None
    """Largest mean difference of an engine's tokens that is accepted. By default 1e-4 and 0.1."""
    deadline_s: Seconds = 30.0
    """An engine that has not answered after this time is asked again after the next version."""
    checksums: bool = False
    """Write to canary.jsonl, at every check, the checksum of the version and the one every engine tells of its weights: a pass over them."""

    def bounds(self, *dtypes: Literal["float32", "bfloat16"] | None) -> tuple[float, float]:
        """The largest and the mean gap that are accepted, where weights are in these dtypes on their way from learner to engine: by the widest."""
        largest, mean = max(_DEFAULT_GAPS[dtype] for dtype in dtypes if dtype is not None)
        return self.max_gap or largest, self.mean_gap or mean
