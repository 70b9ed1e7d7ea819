"""Row shards: the vectors of an index in .npy files, row after row, read through the page cache.

    vectors/00000.npy   rows 0 to 99,999        float32, float16, or bfloat16 as the uint16 of its bits
    vectors/00001.npy   rows 100,000 to ...

numpy has no bfloat16: it is the upper half of a float32, so a uint16 shifted left by 16 is the number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from retriever.query import Progress, Vectors, silent
from retriever.searchers.searcher import Memory, SearcherError

MEASURED_ROWS = 8192  # that are float64 at a time: 50 MB of 768 numbers

__all__ = ["DTYPES", "VectorShards", "VectorType", "as_float32", "as_stored", "write_shard"]

VectorType = Literal["float32", "float16", "bfloat16"]
DTYPES: dict[VectorType, npt.DTypeLike] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}  # in memory and in files


class VectorShards:
    """Vectors of files, read-only. Opening reads the headers only.

    Args:
        parts: [rows, dim] each, of one dtype and dim.
    """

    def __init__(self, parts: Sequence[npt.NDArray[Any]]) -> None:
        if not parts or any(part.ndim != 2 or part.shape[1] != parts[0].shape[1] or part.dtype != parts[0].dtype for part in parts):
            raise SearcherError(f"shards are [rows, dim] of one dim and dtype, got {[(part.shape, str(part.dtype)) for part in parts]}")
        names = [name for name, dtype in DTYPES.items() if parts[0].dtype == dtype]
        if not names:
            raise SearcherError(f"shards hold {', '.join(map(str, DTYPES.values()))}, got {parts[0].dtype}")
        self.parts = tuple(parts)
        self.dtype: VectorType = names[0]
        self.dim = int(parts[0].shape[1])
        self._starts = np.cumsum([0, *(len(part) for part in parts)])

    @classmethod
    def open(cls, paths: Sequence[Path]) -> VectorShards:
        """The shards of files, in this order.

        Raises:
            SearcherError: a file is no .npy file, or they do not fit together.
            OSError: a file cannot be read.
        """
        return cls([_mapped(path) for path in paths])

    @property
    def count(self) -> int:
        """How many rows."""
        return int(self._starts[-1])

    def blocks(self, rows: int) -> Iterator[tuple[int, Vectors]]:
        """All rows in order, as float32 [at most `rows`, dim], each with the number of its first row. None is longer than a shard."""
        for start, part in zip(self._starts, self.parts, strict=False):
            for first in range(0, len(part), rows):
                yield int(start) + first, as_float32(part[first : first + rows])

    def rows(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Vectors:
        """Rows as float32 [len(indices), dim].

        Raises:
            IndexError: there is no such row.
        """
        wanted = np.asarray(indices, np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.count):
            raise IndexError(f"rows are 0 to {self.count - 1}, asked for {wanted.min()} to {wanted.max()}")
        if len(self.parts) == 1:
            return as_float32(self.parts[0][wanted])
        found = np.empty((len(wanted), self.dim), np.float32)
        shard = np.searchsorted(self._starts, wanted, side="right") - 1
        for number in np.unique(shard):
            mine = shard == number
            found[mine] = as_float32(self.parts[number][wanted[mine] - self._starts[number]])
        return found

    def span(self, start: int, stop: int) -> Iterator[npt.NDArray[Any]]:
        """Rows start to stop as they are stored, in one view per shard that they lie in."""
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            first = int(self._starts[number])
            end = min(stop, int(self._starts[number + 1]))
            yield self.parts[number][start - first : end - first]
            start = end

    def largest_norm(self, progress: Progress = silent) -> float:
        """The largest length of a vector. All rows are read."""
        largest = 0.0
        for start, vectors in self.blocks(MEASURED_ROWS):
            largest = max(largest, float(np.linalg.norm(vectors.astype(np.float64), axis=1).max()))
            progress("lengths of vectors", start + len(vectors), self.count)
        return largest

    def memory(self) -> Memory:
        """Files are mapped; arrays are resident."""
        total = {mapped: sum(part.nbytes for part in self.parts if isinstance(part, np.memmap) == mapped) for mapped in (True, False)}
        return Memory(mapped_bytes=total[True], resident_bytes=total[False], disk_bytes=total[True])


def write_shard(path: Path, vectors: Vectors, dtype: VectorType) -> None:
    """Write float32 vectors [rows, dim] into a .npy file of this type.

    Raises:
        SearcherError: a number is not finite, or too large for the type.
    """
    stored = as_stored(vectors, dtype)
    with path.open("wb") as file:
        np.lib.format.write_array(file, stored, allow_pickle=False)


def as_stored(vectors: Vectors, dtype: VectorType) -> npt.NDArray[Any]:
    """Float32 vectors in a type of `DTYPES`, rounded to nearest even.

    Raises:
        SearcherError: a number is not finite, or too large for the type.
    """
    if not np.isfinite(vectors).all():
        raise SearcherError("a vector has a number that is not finite: the encoder made NaN or infinity of a document")
    if dtype == "float32":
        return np.ascontiguousarray(vectors, np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            half = vectors.astype(np.float16)
        if not np.isfinite(half).all():
            raise SearcherError("a vector has a number beyond 65504, float16's largest: store these vectors as bfloat16 or float32")
        return half
    bits = np.ascontiguousarray(vectors, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if ((rounded & 0x7F80) == 0x7F80).any():  # all bits of the exponent: infinity
        raise SearcherError("a vector has a number beyond bfloat16's largest: store these vectors as float32")
    return rounded


def as_float32(stored: npt.NDArray[Any]) -> Vectors:
    """Vectors of any type of `DTYPES`, as float32."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(stored, np.float32)


def _mapped(path: Path) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:
        raise SearcherError(f"{path} is empty: build again")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except ValueError as error:
        raise SearcherError(f"{path} is no .npy file of numbers: {error}") from error
