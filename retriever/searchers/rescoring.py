"""Exact scores of a few candidates, by the vectors themselves."""

from __future__ import annotations

from typing import Literal

import numpy as np

from retriever.query import Rows, Vectors
from retriever.searchers.shards import VectorShards

__all__ = ["Metric", "exact_scores"]

Metric = Literal["ip", "l2"]

BLOCK_BYTES = 32 << 20  # of candidates that are in memory at once: 100 of 768 numbers for each of 109 queries


def exact_scores(shards: VectorShards, queries_ND: Vectors, rows_NK: Rows, *, metric: Metric = "ip") -> Vectors:
    """Scores [N, K] of candidates in float32, -inf for those of row -1. A query's do not depend on the other queries."""
    scores = np.full(rows_NK.shape, -np.inf, np.float32)
    queries = max(1, BLOCK_BYTES // (4 * shards.dim * max(1, rows_NK.shape[1])))
    for start in range(0, len(rows_NK), queries):
        some = slice(start, start + queries)
        rows = rows_NK[some]
        vectors_NKD = shards.rows(np.maximum(rows, 0).ravel()).reshape(*rows.shape, shards.dim)
        if metric == "ip":
            found = np.matmul(vectors_NKD, queries_ND[some, :, None])[..., 0]
        else:
            found = -np.square(vectors_NKD - queries_ND[some, None]).sum(axis=-1)
        scores[some] = np.where(rows >= 0, found, -np.inf)
    return scores
