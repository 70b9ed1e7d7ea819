"""Scan of 16-bit vectors where they lie, one query at a time, in float32: FAISS's scalar quantizer over memory of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from retriever.query import Rows, Vectors
from retriever.searchers.searcher import nothing_found
from retriever.searchers.shards import VectorType

__all__ = ["Scan", "can_scan"]

_TYPES = {"float16": faiss.ScalarQuantizer.QT_fp16, "bfloat16": faiss.ScalarQuantizer.QT_bf16}


class Scan:
    """Blocks of vectors that are searched by inner product, one query after the other. Used by one thread at a time.

    Args:
        blocks: [rows, dim] of 16 bit each, in one piece of memory each.
        first: row number of the first one's first.
    """

    def __init__(self, blocks: Sequence[npt.NDArray[Any]], dtype: VectorType, *, first: int) -> None:
        self._blocks = blocks  # FAISS is given their addresses: they must live as long
        self._starts = np.cumsum([first, *(len(block) for block in blocks)])
        self._indexes = [_over(block, dtype) for block in blocks]

    def search(self, queries_ND: Vectors, topk: int, *, threads: int = 1) -> tuple[Vectors, Rows]:
        """The `topk` best rows of each block, side by side: scores [N, blocks * topk] and rows, -inf and -1 where there are fewer."""
        faiss.omp_set_num_threads(threads)
        found = [index.search(queries_ND, topk) for index in self._indexes]
        if not found:
            return nothing_found(len(queries_ND), topk)
        scores = np.concatenate([scores for scores, _ in found], axis=1)
        rows = np.concatenate([np.where(rows >= 0, rows + start, -1) for (_, rows), start in zip(found, self._starts, strict=False)], axis=1)
        return np.where(rows >= 0, scores, -np.inf).astype(np.float32), rows


def can_scan() -> bool:
    """Whether this FAISS can be given memory that it does not own (1.15.1 can)."""
    return hasattr(getattr(faiss, "MaybeOwnedVectorUInt8", None), "create_view")


def _over(block: npt.NDArray[Any], dtype: VectorType) -> Any:
    index = faiss.IndexScalarQuantizer(block.shape[1], _TYPES[dtype], faiss.METRIC_INNER_PRODUCT)
    codes: Any = faiss.MaybeOwnedVectorUInt8
    index.codes = codes.create_view(faiss.swig_ptr(block.view(np.uint8)), block.nbytes, codes().owner)  # an owner of nothing: `Scan` is
    index.ntotal = len(block)
    return index
