"""Exact search by products of matrices, in blocks of 16 bit: on the CPU, on a GPU, or with the rows divided over several.

    queries [N, dim] x block [rows, dim]  ->  the best of each block  ->  the best of all, scored in float32 from the shards

What 16 bit can get wrong is bounded (`BlockPart.error`): a query whose answer is not certain is searched again with more candidates, and, where
that is not enough, by products in float32. What is not certain even then is counted (`info()["uncertain"]`): more than `DEEPER * depth`
documents whose scores differ by less than float32's own rounding, such as a passage that a corpus holds hundreds of times; which of these are
found is open. So it is, with less of a difference, where blocks hold fewer bits than the shards.

On the CPU the blocks are the files themselves where these are of that type: nothing is read at the start, nothing is in memory twice. Few
queries are scanned by FAISS, in float32; for more, a product of bfloat16 is faster where the processor multiplies them (AVX512-BF16, AMX).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from retriever.query import Progress, Rows, Vectors, silent
from retriever.searchers.block_part import GROUP, BlockPart, BlockType
from retriever.searchers.rescoring import exact_scores
from retriever.searchers.searcher import Memory, SearcherError, best_first, nothing_found
from retriever.searchers.shards import VectorShards

__all__ = ["BlockSearcher", "BlockType"]

BLOCK_ROWS = 65_536  # of one product: 64 queries' scores of them are 8 MB
QUERIES_AT_A_TIME = 256
DEPTH = 32  # candidates per query at least, and DEPTH_PER_HIT for every hit that is asked for
DEPTH_PER_HIT = 4
DEEPER = 16  # times as many where the answer is not certain


class BlockSearcher:
    """Vectors in blocks on devices. Used by one thread at a time.

    Args:
        shards: the vectors, to score candidates exactly.
        parts: the same rows in 16 bit, in order.
    """

    metric: Literal["ip"] = "ip"

    def __init__(self, shards: VectorShards, parts: Sequence[BlockPart], *, dtype: BlockType, threads: int) -> None:
        self.shards = shards
        self.dtype = dtype
        self._parts = parts
        self._threads = threads
        self.searched_deeper = self.searched_in_float32 = self.uncertain = 0  # queries

    @classmethod
    def open(
        cls,
        shards: VectorShards,
        *,
        dtype: BlockType = "bfloat16",
        devices: Sequence[str] = ("cpu",),
        block_rows: int = BLOCK_ROWS,
        threads: int = 1,
        largest_norm: float | None = None,
        progress: Progress = silent,
    ) -> BlockSearcher:
        """Bring the shards to the devices, some rows at a time; on the CPU, shards that are of `dtype` are used where they lie.

        Args:
            dtype: of the blocks. A GPU multiplies either at the same speed; bfloat16 has the wider range, float16 three bits more.
            devices: of PyTorch, such as ("cpu",) or ("cuda:0", "cuda:1"); each gets an equal share of the rows.
            largest_norm: no vector of the shards is longer; None: all of them are read to find out.

        Raises:
            SearcherError: a device is not there or too small, or the vectors do not fit the type.
        """
        if dtype not in get_args(BlockType) or not devices or block_rows < GROUP or threads < 1:
            raise SearcherError(
                f"blocks: dtype float16 or bfloat16, devices, block_rows >= {GROUP}, threads >= 1; got {dtype}, {devices}, {block_rows}, {threads}"
            )
        norm = shards.largest_norm(progress) if largest_norm is None else largest_norm
        edges = np.linspace(0, shards.count, len(devices) + 1).astype(np.int64).tolist()
        parts = []
        for device, start, stop in zip(devices, edges, edges[1:], strict=False):
            if stop == start:  # more devices than rows
                continue
            loaded = BlockPart.load(shards, device, start, stop, dtype=dtype, block_rows=block_rows, largest_norm=norm, progress=progress)
            parts.append(loaded)
        return cls(shards, parts, dtype=dtype, threads=threads)

    @property
    def count(self) -> int:
        """How many vectors it holds."""
        return self.shards.count

    @property
    def dim(self) -> int:
        """How long each of them is."""
        return self.shards.dim

    def search(self, queries_ND: Vectors, topk: int) -> tuple[Vectors, Rows]:
        """Inner products [N, topk] and rows [N, topk], best first, equal ones by row; see `Searcher`."""
        queries_ND = np.ascontiguousarray(queries_ND, np.float32)
        if queries_ND.ndim != 2 or queries_ND.shape[1] != self.dim:
            raise ValueError(f"queries are [N, {self.dim}], got {list(queries_ND.shape)}")
        scores, rows = nothing_found(len(queries_ND), topk)
        self._tune()
        finite = np.flatnonzero(np.isfinite(queries_ND).all(axis=1))
        for start in range(0, len(finite) if self.count else 0, QUERIES_AT_A_TIME):
            some = finite[start : start + QUERIES_AT_A_TIME]
            scores[some], rows[some] = self._search(queries_ND[some], topk)
        return scores, rows

    def stored(self, rows: Sequence[int]) -> Vectors:
        """Vectors of the shards; see `Searcher`."""
        return self.shards.rows(rows)

    def memory(self) -> Memory:
        """The shards, and the blocks that are not the shards themselves."""
        inside = [part.memory() for part in self._parts]
        return sum(inside, self.shards.memory())

    def info(self) -> Mapping[str, Any]:
        """What it is and how it is set."""
        return {
            "backend": "blocks",
            "count": self.count,
            "dim": self.dim,
            "metric": self.metric,
            "dtype": self.dtype,
            "stored": self.shards.dtype,
            "devices": [part.device for part in self._parts],
            "product": sorted({part.product for part in self._parts}),
            "mapped": all(part.mapped for part in self._parts),
            "threads": self._threads,
            "searched_deeper": self.searched_deeper,
            "searched_in_float32": self.searched_in_float32,
            "uncertain": self.uncertain,
        }

    def _search(self, queries_ND: Vectors, topk: int) -> tuple[Vectors, Rows]:
        depth = max(DEPTH, DEPTH_PER_HIT * topk)
        scores, rows, certain = self._best(queries_ND, topk, depth)
        if len(unsure := np.flatnonzero(~certain)):
            self.searched_deeper += len(unsure)
            scores[unsure], rows[unsure], certain[unsure] = self._best(queries_ND[unsure], topk, DEEPER * depth)
        if len(unsure := np.flatnonzero(~certain)):
            self.searched_in_float32 += len(unsure)
            scores[unsure], rows[unsure], certain[unsure] = self._best(queries_ND[unsure], topk, DEEPER * depth, product="float32")
            self.uncertain += int((~certain).sum())
        return scores, rows

    def _best(self, queries_ND: Vectors, topk: int, depth: int, *, product: str | None = None) -> tuple[Vectors, Rows, npt.NDArray[np.bool_]]:
        """The answer out of `depth` candidates, and of which queries no other row can belong to it."""
        found = [part.candidates(queries_ND, depth, threads=self._threads, product=product) for part in self._parts]  # GPUs compute side by side
        approximate, rows = (np.concatenate([_array(pair[k]) for pair in found], axis=1) for k in range(2))
        approximate, rows = best_first(approximate, rows, depth)
        scores, best = best_first(exact_scores(self.shards, queries_ND, rows), rows, topk)
        cutoff = approximate[:, -1]
        if self.count <= depth:
            return scores, best, np.ones(len(queries_ND), np.bool_)
        error = np.max([part.error(queries_ND, cutoff, product=product) for part in self._parts], axis=0)
        return scores, best, scores[:, min(topk, self.count) - 1] >= cutoff + error

    def _tune(self) -> None:
        """The number of threads is the calling thread's: an encoder may use another.

        For the whole process, as `tune_faiss`: GPUs add up products of 16 bit in float32 alone, as `BlockPart.error` has it.
        """
        import torch

        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)


def _array(found: Any) -> npt.NDArray[Any]:
    return found if isinstance(found, np.ndarray) else found.cpu().numpy()
