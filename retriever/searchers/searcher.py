"""What every search by vectors is to its callers: `Searcher`, the memory it takes, and the error that it raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from retriever.query import Rows, Vectors

__all__ = ["Memory", "Searcher", "SearcherError", "best_first", "nothing_found"]


class SearcherError(Exception):
    """A searcher cannot be built or opened as asked. The message says what was asked, what there is, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Where the bytes of an index are."""

    resident_bytes: int = 0  # allocated by the process: they stay as long as the index is open
    mapped_bytes: int = 0  # of files: read when they are needed, given back by the system when others need the memory
    device_bytes: int = 0  # on accelerators
    disk_bytes: int = 0

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            resident_bytes=self.resident_bytes + other.resident_bytes,
            mapped_bytes=self.mapped_bytes + other.mapped_bytes,
            device_bytes=self.device_bytes + other.device_bytes,
            disk_bytes=self.disk_bytes + other.disk_bytes,
        )


class Searcher(Protocol):
    """Vectors that can be searched. Used by one thread at a time."""

    @property
    def count(self) -> int:
        """How many vectors it holds."""
        ...

    @property
    def dim(self) -> int:
        """How long each of them is."""
        ...

    def search(self, queries_ND: Vectors, topk: int) -> tuple[Vectors, Rows]:
        """Scores [N, topk] and rows [N, topk], best first: the higher the better, inner products or negative squared distances.

        Where nothing (more) is found the score is -inf and the row -1: fewer than `topk` vectors, or a query that is not finite. No score is NaN.

        Raises:
            ValueError: the queries are not [N, dim], or topk < 1.
        """
        ...

    def stored(self, rows: Sequence[int]) -> Vectors:
        """Vectors [len(rows), dim] as they are stored, decoded: exact where the type of index is.

        Raises:
            IndexError: there is no such row.
            SearcherError: this type of index cannot decode.
        """
        ...

    def memory(self) -> Memory:
        """What it takes now."""
        ...

    def info(self) -> Mapping[str, Any]:
        """What it is and how it is set, for people and programs."""
        ...


def nothing_found(queries: int, topk: int) -> tuple[Vectors, Rows]:
    """Scores [queries, topk] of -inf and rows of -1.

    Raises:
        ValueError: topk < 1.
    """
    if topk < 1:
        raise ValueError(f"a search finds at least 1, asked for {topk}")
    return np.full((queries, topk), -np.inf, np.float32), np.full((queries, topk), -1, np.int64)


def best_first(scores_NK: Vectors, rows_NK: Rows, topk: int) -> tuple[Vectors, Rows]:
    """The `topk` best of each row of candidates, equal scores by row number; a row of -1 or a score that is not finite is none."""
    missing = (rows_NK < 0) | ~np.isfinite(scores_NK)
    scores_NK, rows_NK = np.where(missing, -np.inf, scores_NK), np.where(missing, -1, rows_NK)
    best_scores, best_rows = nothing_found(len(scores_NK), topk)
    order = np.lexsort((rows_NK, -scores_NK), axis=-1)[:, :topk]  # by score, then row
    best_scores[:, : order.shape[1]] = np.take_along_axis(scores_NK, order, axis=1)
    best_rows[:, : order.shape[1]] = np.take_along_axis(rows_NK, order, axis=1)
    return best_scores, best_rows
