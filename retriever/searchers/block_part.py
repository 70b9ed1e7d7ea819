"""The blocks of one device: how they get there, and the candidates that they give."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from retriever.query import Progress, Vectors
from retriever.searchers.scan import Scan, can_scan
from retriever.searchers.searcher import Memory, SearcherError
from retriever.searchers.shards import VectorShards, as_float32, as_stored

if TYPE_CHECKING:
    import torch

__all__ = ["GROUP", "ROUNDING", "BlockPart", "BlockType"]

BlockType = Literal["float16", "bfloat16"]

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}  # of one number to the nearest, relative
MANY = 4  # queries: 50,000 x 384 on one thread, scan against product: 1.5 and 4.4 ms for one query, 5.7 and 4.9 ms for four
GROUP = 64  # scores whose largest stands for them while the best are looked for
CONVERTED_ROWS = 2048  # that are converted at a time: they stay in the cache
MERGED = 16  # times the depth: so many candidates of blocks are kept before the best of them are
LOADED_ROWS = 16_384  # that are in memory as float32 while they are rounded


class BlockPart:
    """Consecutive rows on one device. Used by one thread at a time.

    Args:
        blocks: [rows, dim] of 16 bit each.
        first: the first one's first row.
        largest_norm: no vector is longer, before or after it was rounded.
        largest_rounding: the largest distance between a vector and its 16 bits.
        mapped: the blocks are files.
    """

    def __init__(
        self,
        blocks: Sequence[torch.Tensor],
        device: str,
        dtype: BlockType,
        *,
        first: int,
        largest_norm: float,
        largest_rounding: float,
        mapped: bool,
    ) -> None:
        self.blocks = list(blocks)
        self.device = device
        self.dtype = dtype
        self.first = first
        self.largest_norm = largest_norm
        self.largest_rounding = largest_rounding
        self.mapped = mapped
        self.product = _product(device, dtype)
        self._scan = Scan([_bits(block) for block in blocks], dtype, first=first) if device == "cpu" and can_scan() else None

    @classmethod
    def load(
        cls,
        shards: VectorShards,
        device: str,
        start: int,
        stop: int,
        *,
        dtype: BlockType,
        block_rows: int,
        largest_norm: float,
        progress: Progress,
    ) -> BlockPart:
        """Rows `start` to `stop` of shards, none of which is longer than `largest_norm`."""
        if device == "cpu" and shards.dtype == dtype:
            spans = [span[at : at + block_rows] for span in shards.span(start, stop) for at in range(0, len(span), block_rows)]
            blocks = [_tensor(span) for span in spans]
            return cls(blocks, device, dtype, first=start, largest_norm=largest_norm, largest_rounding=0.0, mapped=True)
        blocks, largest = [], 0.0
        for first in range(start, stop, block_rows):
            block = _allocate(min(block_rows, stop - first), shards.dim, device, dtype)
            for at in range(first, first + len(block), LOADED_ROWS):
                end = min(at + LOADED_ROWS, first + len(block))
                largest = max(largest, _fill(block[at - first : end - first], shards, at, end, dtype))
                progress(f"loaded to {device}", end - start, stop - start)
            blocks.append(block)
        return cls(blocks, device, dtype, first=start, largest_norm=largest_norm + largest, largest_rounding=largest, mapped=False)

    def candidates(self, queries_ND: Vectors, depth: int, *, threads: int, product: str | None = None) -> tuple[Any, Any]:
        """Scores [N, K] and rows [N, K] of at least the `depth` best, in no order; on a GPU they may still be being computed.

        Args:
            product: the type that is multiplied, instead of the device's fastest.
        """
        if self._scan is not None and len(queries_ND) < MANY:
            return self._scan.search(queries_ND, depth, threads=threads)
        return self._multiplied(queries_ND, depth, product or self.product)

    def error(self, queries_ND: Vectors, cutoff_N: npt.NDArray[np.float32], *, product: str | None = None) -> npt.NDArray[np.float64]:
        """How much more than `cutoff`, the lowest score of its candidates, a query's exact score with any other row can be, at most.

        |q v - q' v'| <= |q - q'| |v| + |q| |v - v'|, with q' and v' as they are multiplied, and the rounding of sums and of the result.
        """
        norms: npt.NDArray[np.float64] = np.linalg.norm(queries_ND.astype(np.float64), axis=1)
        summing: npt.NDArray[np.float64] = queries_ND.shape[1] * ROUNDING["float32"] * norms * self.largest_norm
        if self._scan is not None and len(queries_ND) < MANY:
            return norms * self.largest_rounding + summing
        product = product or self.product
        unit = ROUNDING[product]
        query = unit * norms * self.largest_norm if product != "float32" else 0.0
        converted = unit * norms * self.largest_norm if product not in (self.dtype, "float32") else 0.0
        roundings = 1 if self.device == "cpu" else 2  # a GPU may round partial sums, too (split-K)
        result: npt.NDArray[np.float64] = roundings * unit * np.abs(cutoff_N) * (1 + unit)
        return norms * self.largest_rounding + summing + query + converted + result

    def memory(self) -> Memory:
        """Of blocks that are not the files themselves."""
        held = 0 if self.mapped else sum(block.nbytes for block in self.blocks)
        return Memory(resident_bytes=held) if self.device == "cpu" else Memory(device_bytes=held)

    def _multiplied(self, queries_ND: Vectors, depth: int, product: str) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        lengths = np.linalg.norm(queries_ND.astype(np.float64), axis=1, keepdims=True)
        lengths_N1 = np.maximum(lengths, np.finfo(np.float32).tiny).astype(np.float32)
        queries = torch.from_numpy(queries_ND / lengths_N1).to(self.device, getattr(torch, product))  # float16 ends at 65504
        scores, rows, start, width = [], [], self.first, 0
        with torch.inference_mode():
            for block in self.blocks:
                best, at = _largest(self._scores(queries, block), min(depth, len(block)))
                scores.append(best.float())
                rows.append(at + start)
                start, width = start + len(block), width + best.shape[1]
                if width > MERGED * depth:
                    scores, rows = _merged(scores, rows, depth)
                    width = depth
            scores, rows = _merged(scores, rows, depth)
            return scores[0] * torch.from_numpy(lengths_N1).to(self.device), rows[0]

    def _scores(self, queries: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """[N, rows]. What has to be converted is converted some rows at a time."""
        import torch

        if block.dtype == queries.dtype:
            return queries @ block.T
        scores = torch.empty(len(queries), len(block), dtype=queries.dtype, device=queries.device)
        for at in range(0, len(block), CONVERTED_ROWS):
            some = slice(at, at + CONVERTED_ROWS)
            scores[:, some] = queries @ block[some].float().to(queries.dtype).T  # by way of float32: twice as fast
        return scores


def _largest(scores_NR: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `depth` largest scores of each row, and where they are.

    Groups of scores first, by their largest: the best `depth` scores are in the best `depth` groups. A group is every `groups`th score, so
    that the largest of all groups are found by comparing long rows: a third of the time of looking for the best among all.
    """
    import torch

    queries, rows = scores_NR.shape
    groups = rows // GROUP
    if groups <= 2 * depth:
        best = scores_NR.topk(depth, dim=1, sorted=False)
        return best.values, best.indices
    grouped = scores_NR[:, : groups * GROUP].view(queries, GROUP, groups)
    chosen = grouped.amax(dim=1).topk(depth, dim=1, sorted=False).indices[:, None, :].expand(-1, GROUP, -1)
    rest = torch.arange(groups * GROUP, rows, device=scores_NR.device).expand(queries, -1)
    inside = torch.cat([grouped.gather(2, chosen).reshape(queries, -1), scores_NR[:, groups * GROUP :]], dim=1)
    steps = torch.arange(0, groups * GROUP, groups, device=scores_NR.device)[:, None]
    places = torch.cat([(chosen + steps).reshape(queries, -1), rest], dim=1)
    best = inside.topk(depth, dim=1, sorted=False)
    return best.values, places.gather(1, best.indices)


def _merged(scores: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], depth: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The `depth` best of several lists [N, K] of candidates."""
    import torch

    together = torch.cat(list(scores), dim=1)
    best = together.topk(min(depth, together.shape[1]), dim=1, sorted=False)
    return [best.values], [torch.cat(list(rows), dim=1).gather(1, best.indices)]


def _product(device: str, dtype: BlockType) -> str:
    """The type that a device multiplies fastest. A CPU without instructions for bfloat16 emulates them slowly; for float16 few have any."""
    import torch

    if device != "cpu":
        return dtype
    able = torch.cpu.get_capabilities()
    return "bfloat16" if able.get("avx512_bf16") or able.get("amx_bf16") else "float32"


def _allocate(rows: int, dim: int, device: str, dtype: BlockType) -> torch.Tensor:
    import torch

    try:
        return torch.empty(rows, dim, dtype=getattr(torch, dtype), device=device)
    except (RuntimeError, AssertionError) as error:  # no such device; out of memory; a PyTorch without CUDA asserts
        raise SearcherError(f"blocks: {rows} x {dim} {dtype} ({rows * dim * 2 / 1e9:.1f} GB) do not go to {device}: {error}") from error


def _fill(block: torch.Tensor, shards: VectorShards, start: int, stop: int, dtype: BlockType) -> float:
    """Copy rows into (a piece of) a block; the largest distance between a vector and its 16 bits."""
    done, largest = 0, 0.0
    for stored in shards.span(start, stop):
        bits = stored
        if shards.dtype != dtype:
            exact = as_float32(stored)
            bits = as_stored(exact, dtype)
            largest = max(largest, float(np.linalg.norm(exact - as_float32(bits), axis=1).max()))
        block[done : done + len(bits)].copy_(_tensor(bits))
        done += len(bits)
    return largest


def _tensor(bits: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor over the memory of an array."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the array is read-only: so are we
        tensor = torch.from_numpy(bits)
    return tensor.view(torch.bfloat16) if bits.dtype == np.uint16 else tensor


def _bits(block: torch.Tensor) -> npt.NDArray[Any]:
    import torch

    bits: npt.NDArray[Any] = block.view(torch.uint16).numpy()
    return bits
