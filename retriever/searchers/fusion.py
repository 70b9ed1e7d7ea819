"""Several ranked lists into one, by the places alone: scores of different searches cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence

from retriever.query import Hit

__all__ = ["RRF_K", "reciprocal_rank_fusion"]

RRF_K = 60  # of the paper's experiments; the best places count less the larger it is


def reciprocal_rank_fusion(lists: Sequence[Sequence[int]], *, k: int = RRF_K) -> list[Hit]:
    """All rows of the lists, best first, equal ones by row number: a row scores the sum of 1 / (k + place) over the lists that have it.

    The first of a list has place 1. Rows below 0 are none, and take no place.
    Cormack, Clarke and Buettcher, Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning Methods, SIGIR 2009.
    """
    scores: dict[int, float] = {}
    for rows in lists:
        for place, row in enumerate((row for row in rows if row >= 0), start=1):
            scores[row] = scores.get(row, 0.0) + 1.0 / (k + place)
    return [Hit(row=int(row), score=score) for row, score in sorted(scores.items(), key=lambda item: (-item[1], item[0]))]
