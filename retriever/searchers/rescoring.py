"""Exact scores of a few candidates, by the vectors themselves."""

from __future__ import annotations

from typing import Literal

import numpy as np

from retriever.query import Rows, Vectors
from retriever.searchers.shards import VectorShards

__all__ = ["Metric", "exact_scores"]

Metric = Literal["ip", "l2"]

QUERIES_AT_A_TIME = 64  # whose candidates are in memory at once: 64 x 100 x 768 float32 are 20 MB


def exact_scores(shards: VectorShards, queries_ND: Vectors, rows_NK: Rows, *, metric: Metric = "ip") -> Vectors:
    """Scores [N, K] of candidates in float32, -inf for those of row -1. A query's do not depend on the other queries."""
    scores = np.full(rows_NK.shape, -np.inf, np.float32)
    for start in range(0, len(rows_NK), QUERIES_AT_A_TIME):
        some = slice(start, start + QUERIES_AT_A_TIME)
        rows = rows_NK[some]
        vectors_NKD = shards.rows(np.maximum(rows, 0).ravel()).reshape(*rows.shape, shards.dim)
        if metric == "ip":
            found = np.matmul(vectors_NKD, queries_ND[some, :, None])[..., 0]
        else:
            found = -np.square(vectors_NKD - queries_ND[some, None]).sum(axis=-1)
        scores[some] = np.where(rows >= 0, found, -np.inf)
    return scores
