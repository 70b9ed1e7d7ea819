"""How good a ranking is: recall, reciprocal rank and nDCG of one question, and what their means over questions are worth.

    recall_at(["b", "a"], {"a", "c"}, 2)                       1/2: one of the two relevant documents is among the first two
    reciprocal_rank(["b", "a"], {"a", "c"}, 10)                1/2: the first relevant one is second
    ndcg_at(["b", "a"], {"a": 2, "c": 1}, 10, gain="linear")   .48: 2 / log2(3), over 2 / log2(2) + 1 / log2(3)

A ranking names each document once, best first. Means of binary and graded measures vary with the questions that were drawn, so a table shows an
interval beside each, and of two ways over the same questions the interval of their difference, which is far narrower than either's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "LEVEL",
    "RESAMPLES",
    "Gain",
    "Interval",
    "bootstrap",
    "dcg",
    "ndcg_at",
    "paired_bootstrap",
    "recall_at",
    "reciprocal_rank",
]

Gain = Literal["linear", "exponential"]
Scores = Sequence[float] | npt.NDArray[np.float64]  # [Q] one number per question

RESAMPLES = 2000  # the ends of a 95 % interval then move by about a fiftieth of its width with the seed
LEVEL = 0.95
_DRAWS_AT_A_TIME = 4_000_000  # bounds memory for sets of tens of thousands of questions


def recall_at(ranked: Sequence[str], relevant: Collection[str], k: int) -> float:
    """The share of the relevant documents that is among the first `k`.

    Raises:
        ValueError: nothing is relevant, so there is no share of it; or k < 1.
    """
    _check(relevant, k)
    return len(set(ranked[:k]) & set(relevant)) / len(set(relevant))


def reciprocal_rank(ranked: Sequence[str], relevant: Collection[str], k: int) -> float:
    """1 / rank of the first relevant document; 0 where none is among the first `k`. Its mean over questions is the MRR (Voorhees, TREC-8 1999).

    Raises:
        ValueError: nothing is relevant, or k < 1.
    """
    _check(relevant, k)
    return next((1.0 / rank for rank, id in enumerate(ranked[:k], start=1) if id in relevant), 0.0)


def dcg(grades: Sequence[float], *, gain: Gain) -> float:
    """Discounted cumulated gain of the grades in the order of a ranking: the sum of gain(grade) / log2(1 + rank).

    Cumulated gain with a logarithmic discount is Järvelin & Kekäläinen's (TOIS 20(4), 2002), who use the grade itself as the gain ("linear") and
    discount by log_b(rank) from rank b on. The discount here, log2(1 + rank), is the one in use since Burges et al. (ICML 2005), who also made
    2^grade - 1 the gain ("exponential"). trec_eval's ndcg_cut is the linear form. For grades of 0 and 1 the two are the same.
    """
    return sum(_gain(grade, gain) / math.log2(1 + rank) for rank, grade in enumerate(grades, start=1))


def ndcg_at(ranked: Sequence[str], grades: Mapping[str, float], k: int, *, gain: Gain) -> float:
    """The DCG of the first `k` over that of the best order of all judged documents, cut at `k` as well. In [0, 1].

    Args:
        grades: of judged documents; below 0 counts as 0, as does what is not judged.

    Raises:
        ValueError: no grade is positive, or k < 1.
    """
    _check([id for id, grade in grades.items() if grade > 0], k)
    ideal = dcg(sorted(grades.values(), reverse=True)[:k], gain=gain)
    return dcg([grades.get(id, 0.0) for id in ranked[:k]], gain=gain) / ideal


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean, and between what it lies with the probability asked for."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Of a difference: the questions tell the two apart."""
        return self.low > 0 or self.high < 0


def bootstrap(scores: Scores, *, seed: int, resamples: int = RESAMPLES, level: float = LEVEL) -> Interval:
    """The mean over questions with its percentile interval: questions are drawn with replacement (Efron & Tibshirani 1993, chapter 13).

    Where every question scored the same the width is 0: that says nothing about questions unlike those of the set.

    Raises:
        ValueError: no question, a score that is not finite, or a level outside (0, 1).
    """
    score_Q = np.asarray(scores, dtype=np.float64)
    if score_Q.ndim != 1 or not len(score_Q) or not np.all(np.isfinite(score_Q)) or resamples < 1 or not 0 < level < 1:
        raise ValueError(
            f"expected finite scores of at least one question, resamples >= 1 and a level in (0, 1), got {len(score_Q)}, {resamples}, {level}"
        )
    generator = np.random.default_rng(seed)
    at_a_time = max(1, _DRAWS_AT_A_TIME // len(score_Q))
    sizes = [min(at_a_time, resamples - done) for done in range(0, resamples, at_a_time)]
    means = np.concatenate([score_Q[generator.integers(len(score_Q), size=(size, len(score_Q)), dtype=np.int32)].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean=float(score_Q.mean()), low=float(low), high=float(high))


def paired_bootstrap(scores: Scores, others: Scores, *, seed: int, resamples: int = RESAMPLES, level: float = LEVEL) -> Interval:
    """By how much `scores` exceed `others`, question by question: each draw takes a question's two scores together.

    Raises:
        ValueError: lengths that differ, and as `bootstrap`.
    """
    if len(scores) != len(others):
        raise ValueError(f"a paired difference needs the same questions on both sides, got {len(scores)} and {len(others)}")
    return bootstrap(np.asarray(scores, dtype=np.float64) - np.asarray(others, dtype=np.float64), seed=seed, resamples=resamples, level=level)


def _gain(grade: float, gain: Gain) -> float:
    grade = max(float(grade), 0.0)
    return grade if gain == "linear" else 2.0**grade - 1.0


def _check(relevant: Collection[str], k: int) -> None:
    if not relevant or k < 1:
        raise ValueError(f"expected at least one relevant document and k >= 1, got {len(relevant)} and k = {k}")
