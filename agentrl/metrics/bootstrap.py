"""Confidence intervals over prompts.

Samples of one prompt are alike, so prompts, not trajectories, are drawn with replacement, each with all its samples (cluster bootstrap,
Davison & Hinkley 1997, section 3.8). The interval is of the percentiles of the resampled means. Where every prompt scored the same its
width is 0: it then says nothing about prompts unlike those of the set.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["RESAMPLES", "cluster_interval"]

RESAMPLES = 2000  # the ends of a 95 % interval then move by about a fiftieth of its width with the seed
_DRAWS_AT_A_TIME = 4_000_000  # bounds memory for sets of tens of thousands of prompts


def cluster_interval(
    totals: Sequence[float], counts: Sequence[int], *, seed: int, resamples: int = RESAMPLES, level: float = 0.95
) -> tuple[float, float]:
    """The interval of sum(totals) / sum(counts).

    Args:
        totals: [P] sum of the scores of each prompt's samples.
        counts: [P] number of scored samples of each prompt, all positive.
        level: probability of the interval.

    Raises:
        ValueError: no prompt, a prompt without samples, or lengths that differ.
    """
    if not len(totals) or len(totals) != len(counts) or min(counts) < 1:
        raise ValueError(f"expected as many totals as positive counts and at least one, got {len(totals)} and {len(counts)}")
    total_P, count_P = np.asarray(totals, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    generator = np.random.default_rng(seed)
    at_a_time = max(1, _DRAWS_AT_A_TIME // len(total_P))
    means = [_means(total_P, count_P, generator, min(at_a_time, resamples - done)) for done in range(0, resamples, at_a_time)]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _means(
    total_P: npt.NDArray[np.float64], count_P: npt.NDArray[np.float64], generator: np.random.Generator, resamples: int
) -> npt.NDArray[np.float64]:
    drawn_RP = generator.integers(len(total_P), size=(resamples, len(total_P)), dtype=np.int32)
    means: npt.NDArray[np.float64] = total_P[drawn_RP].sum(axis=1) / count_P[drawn_RP].sum(axis=1)
    return means
