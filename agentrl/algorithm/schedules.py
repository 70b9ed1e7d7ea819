"""What changes over a run, as pure functions of the step and of the share of the run that is done (0..1)."""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["entropy_coefficient", "learning_rate"]


def learning_rate(
    peak: float, *, shape: Literal["constant", "linear", "cosine"], final_share: float, warmup: float, step: int, progress: float
) -> float:
    """The learning rate of a step: warm-up times decay.

    Args:
        final_share: of the peak, reached at progress 1 (linear, cosine).
        warmup: linear warm-up over this many steps where >= 1 (the first step has 1/warmup of the peak), over this share of the run
            where < 1 (the first step then has 0).
        progress: share of the run done before this step.
    """
    return peak * _warm(warmup, step, progress) * _decay(shape, final_share, min(max(progress, 0.0), 1.0))


def entropy_coefficient(start: float, *, schedule: Literal["constant", "linear"], progress: float) -> float:
    """The coefficient of the entropy bonus; `linear` falls to 0 at the end of the run."""
    return start if schedule == "constant" else start * (1.0 - min(max(progress, 0.0), 1.0))


def _warm(warmup: float, step: int, progress: float) -> float:
    if warmup == 0:
        return 1.0
    return min(1.0, (step + 1) / warmup if warmup >= 1 else progress / warmup)


def _decay(shape: str, final_share: float, progress: float) -> float:
    if shape == "linear":
        return 1.0 - (1.0 - final_share) * progress
    if shape == "cosine":
        return final_share + (1.0 - final_share) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
