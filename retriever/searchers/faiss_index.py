"""Search by FAISS: an index of any factory string, built from shards, opened by mapping its file.

    build_faiss(shards, "HNSW32,SQ8", out)      ->  a file that every FAISS reads
    FaissSearcher.open(out, parameters="efSearch=128")

Inner products ("ip"), or squared Euclidean distances ("l2") as negative scores. Indexes that keep less than the vectors can be searched for
`rescore_depth` candidates, which are then scored exactly by the vectors themselves, from shards of 16 or 32 bit.
"""

from __future__ import annotations

import ctypes
import mmap as mmap_module
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from retriever.query import Progress, Rows, Vectors, silent
from retriever.searchers.faiss_gpu import to_gpus
from retriever.searchers.faiss_parameters import apply_parameters
from retriever.searchers.rescoring import Metric, exact_scores
from retriever.searchers.searcher import Memory, SearcherError, best_first, nothing_found
from retriever.searchers.shards import VectorShards
from retriever.searchers.sizes import index_memory, training_rows

__all__ = ["METRICS", "FaissSearcher", "Metric", "build_faiss", "check_factory", "tune_faiss"]

METRICS: dict[Metric, int] = {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}

BLOCK_BYTES = 64 << 20  # of float32 that are added at a time
HEADER_NTOTAL = 8  # offset of the number of vectors in a serialised index: after the type's four letters and the dimension


class FaissSearcher:
    """A FAISS index, and how it is searched. Used by one thread at a time.

    Args:
        index: faiss.Index, on the CPU or on GPUs.
        memory: what it takes.
        one_at_a_time: see `tune_faiss`.
        rescore: as many exact vectors; the `rescore_depth` best of the index are scored by them.
        decoder: the same index on the CPU, where `index` is on GPUs: there, lists and divided rows cannot be decoded.
        about: how it was opened, for `info`.
    """

    def __init__(
        self,
        index: Any,
        *,
        memory: Memory,
        one_at_a_time: bool = False,
        threads: int = 1,
        rescore: VectorShards | None = None,
        rescore_depth: int = 100,
        decoder: Any = None,
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if rescore is not None and (rescore.count, rescore.dim) != (index.ntotal, index.d):
            raise SearcherError(f"the index has {index.ntotal} vectors of {index.d}, those to rescore by are {rescore.count} of {rescore.dim}")
        if rescore_depth < 1 or threads < 1:
            raise SearcherError(f"rescore_depth and threads are at least 1, got {rescore_depth} and {threads}")
        self.index = index
        self._memory = memory
        self._one_at_a_time = one_at_a_time
        self._threads = threads
        self._rescore = rescore
        self._rescore_depth = rescore_depth
        self._decoder = index if decoder is None else decoder
        self._about = dict(about)
        self._lock = Lock()  # FAISS's GPU indexes share scratch memory: even reading is for one thread at a time

    @classmethod
    def of(cls, vectors: Vectors, *, metric: Metric = "ip", one_at_a_time: bool = False) -> FaissSearcher:
        """A flat index of float32 vectors, in memory."""
        index = faiss.IndexFlat(vectors.shape[1], METRICS[metric])
        index.add(np.ascontiguousarray(vectors, np.float32))
        return cls(index, memory=Memory(resident_bytes=vectors.size * 4), one_at_a_time=one_at_a_time)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        mmap: bool = True,
        one_at_a_time: bool = False,
        threads: int = 1,
        parameters: str | None = None,
        device: str = "cpu",
        rescore: VectorShards | None = None,
        rescore_depth: int = 100,
    ) -> FaissSearcher:
        """The index of a file.

        Args:
            mmap: map the file, as far as the index's type allows, and read pages when they are needed; GPUs are filled from the mapped file.
            parameters: of the search, such as "nprobe=32" or "efSearch=128,nprobe=32".
            device: "cpu", or GPUs: "cuda" (all), "cuda:0", "cuda:0,cuda:1" (rows over both).

        Raises:
            SearcherError: the file is no index, or an option does not fit it.
        """
        index = decoder = _read(path, mmap=mmap or device != "cpu")
        chosen = apply_parameters(index, parameters) if parameters else {}
        memory = _memory(index, path, mmap=mmap and device == "cpu")
        if device != "cpu":
            index, memory = to_gpus(index, device)
        about = {"device": device, "mapped": memory.mapped_bytes > 0, "parameters": chosen}
        return cls(
            index,
            memory=memory,
            one_at_a_time=one_at_a_time,
            threads=threads,
            rescore=rescore,
            rescore_depth=rescore_depth,
            decoder=decoder,
            about=about,
        )

    @property
    def count(self) -> int:
        """How many vectors it holds."""
        return int(self.index.ntotal)

    @property
    def dim(self) -> int:
        """How long each of them is."""
        return int(self.index.d)

    @property
    def metric(self) -> Metric:
        """What scores are."""
        return "ip" if self.index.metric_type == faiss.METRIC_INNER_PRODUCT else "l2"

    def search(self, queries_ND: Vectors, topk: int) -> tuple[Vectors, Rows]:
        """Scores [N, topk] and rows [N, topk], best first; see `Searcher`."""
        queries_ND = np.ascontiguousarray(queries_ND, np.float32)
        if queries_ND.ndim != 2 or queries_ND.shape[1] != self.dim:
            raise ValueError(f"queries are [N, {self.dim}], got {list(queries_ND.shape)}")
        scores, rows = nothing_found(len(queries_ND), topk)
        depth = min(self.count, topk if self._rescore is None else max(topk, self._rescore_depth))
        finite = np.isfinite(queries_ND).all(axis=1)
        if not depth or not finite.any():
            return scores, rows
        if finite.all():
            found, at = self._search(queries_ND, depth)
            if self._rescore is not None:
                found, at = best_first(exact_scores(self._rescore, queries_ND, at, metric=self.metric), at, topk)
            width = min(topk, found.shape[1])
            scores[:, :width], rows[:, :width] = found[:, :width], at[:, :width]
        else:
            scores[finite], rows[finite] = self.search(queries_ND[finite], topk)
        return scores, rows

    def stored(self, rows: Sequence[int]) -> Vectors:
        """Vectors as they are stored: those to rescore by where there are some; see `Searcher`."""
        wanted = np.asarray(rows, np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.count):
            raise IndexError(f"rows are 0 to {self.count - 1}, asked for {wanted.min()} to {wanted.max()}")
        if self._rescore is not None:
            return self._rescore.rows(wanted)
        return _reconstructed(self._decoder, wanted)

    def memory(self) -> Memory:
        """What it takes now, with what it is rescored by."""
        return self._memory if self._rescore is None else self._memory + self._rescore.memory()

    def info(self) -> Mapping[str, Any]:
        """What it is and how it is set."""
        info: dict[str, Any] = {
            "backend": "faiss",
            "faiss": faiss.__version__,
            "type": type(self.index).__name__,
            "count": self.count,
            "dim": self.dim,
            "metric": self.metric,
            "threads": self._threads,
            "one_at_a_time": self._one_at_a_time,
            "blas_threshold": _blas_threshold(self.dim, one_at_a_time=self._one_at_a_time),
            **self._about,
        }
        if self._rescore is not None:
            info["rescore"] = {"dtype": self._rescore.dtype, "depth": self._rescore_depth}
        return info

    def _search(self, queries_ND: Vectors, depth: int) -> tuple[Vectors, Rows]:
        with self._lock:
            tune_faiss(self.dim, one_at_a_time=self._one_at_a_time, threads=self._threads)  # the setting is the process's: another index may differ
            scores, rows = self.index.search(queries_ND, depth)
        if self.metric == "l2":
            scores = -scores
        gone = (rows < 0) | ~np.isfinite(scores)
        scores[gone], rows[gone] = -np.inf, -1
        return scores, rows


def build_faiss(
    shards: VectorShards,
    factory: str,
    out: Path,
    *,
    metric: Metric = "ip",
    train_rows: int | None = None,
    threads: int = 1,
    progress: Progress = silent,
) -> None:
    """Write the index that FAISS's factory string names, of all vectors, into the file `out`, which appears when it is complete.

    Memory: a block of float32, what training takes, and the index itself; Flat and SQ indexes go to the disk as they grow.

    Args:
        train_rows: how many rows are trained on, spread evenly over the shards; by default as many as its lists and codes need.

    Raises:
        SearcherError: FAISS does not know the factory, or it does not fit these vectors.
    """
    faiss.omp_set_num_threads(threads)
    index = _untrained(shards.dim, factory, metric)
    if not index.is_trained:
        _train(index, shards, train_rows, progress)
    partial = out.with_name(out.name + ".partial")
    try:
        if isinstance(index, faiss.IndexFlat | faiss.IndexScalarQuantizer):
            _write_codes(index, shards, partial, progress)
        else:
            _add(index, shards, progress)
            faiss.write_index(index, str(partial))
        with partial.open("rb") as file:
            os.fsync(file.fileno())  # a build that finds the file takes it for whole
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def check_factory(dim: int, factory: str, count: int | None = None) -> None:
    """Make an empty index, and add a vector where nothing is to be trained first.

    Raises:
        SearcherError: FAISS does not know the factory, or it has more lists than there are vectors (`count`).
    """
    index = _untrained(dim, factory, "ip")
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None and count is not None and ivf.nlist > count:
        raise SearcherError(f"{ivf.nlist} lists cannot be trained on {count} vectors: name an index with fewer")
    if index.is_trained:
        try:
            index.add(np.ones((1, dim), np.float32))
        except RuntimeError as error:
            raise SearcherError(f"FAISS cannot add vectors to an index of type {type(index).__name__}: {_reason(error)}") from error


def tune_faiss(dim: int, *, one_at_a_time: bool = False, threads: int = 1) -> None:
    """Set FAISS, for the whole process, to one thread, and to search 4 or more queries by one matrix product.

    FAISS does that only from 128,000 / dim queries on, and otherwise scans once per query: at a batch of 64, a sixth of the speed. Below 4
    the scans win. With `one_at_a_time` there is no matrix product at all, so a query's scores are, to the last bit, its own.
    """
    faiss.omp_set_num_threads(threads)  # of the calling thread: OpenMP keeps a number per thread
    faiss.cvar.distance_compute_blas_threshold = _blas_threshold(dim, one_at_a_time=one_at_a_time)


def _blas_threshold(dim: int, *, one_at_a_time: bool) -> int:
    """Queries times dimensions from which on FAISS takes a matrix product."""
    return int(np.iinfo(np.int32).max) if one_at_a_time else 4 * dim


def _untrained(dim: int, factory: str, metric: Metric) -> Any:
    try:
        return faiss.index_factory(dim, factory, METRICS[metric])
    except RuntimeError as error:
        raise SearcherError(f"FAISS makes no index {factory!r} of {dim} dimensions: {_reason(error)}") from error


def _train(index: Any, shards: VectorShards, train_rows: int | None, progress: Progress) -> None:
    wanted = train_rows if train_rows is not None else training_rows(index)
    sample = np.linspace(0, shards.count - 1, num=min(wanted, shards.count), dtype=np.int64)
    progress("trained", 0, len(sample))
    try:
        index.train(shards.rows(sample))
    except RuntimeError as error:
        raise SearcherError(f"FAISS cannot train this index on {len(sample)} of {shards.count} vectors: {_reason(error)}") from error
    progress("trained", len(sample), len(sample))


def _add(index: Any, shards: VectorShards, progress: Progress) -> None:
    for start, vectors in shards.blocks(max(1, BLOCK_BYTES // (4 * shards.dim))):
        try:
            index.add(vectors)
        except RuntimeError as error:
            raise SearcherError(f"FAISS cannot add vectors to an index of type {type(index).__name__}: {_reason(error)}") from error
        progress("indexed", start + len(vectors), shards.count)


def _write_codes(index: Any, shards: VectorShards, out: Path, progress: Progress) -> None:
    """The file of an index that ends with its codes, row after row: what `write_index` would write, without all of them in memory."""
    head = bytearray(faiss.serialize_index(index).tobytes())
    head[HEADER_NTOTAL : HEADER_NTOTAL + 8] = shards.count.to_bytes(8, "little")
    numbers = index.code_size // 4 if isinstance(index, faiss.IndexFlat) else index.code_size  # a Flat file counts floats, others bytes
    head[-8:] = (shards.count * numbers).to_bytes(8, "little")
    with out.open("wb") as file:
        file.write(head)
        for start, vectors in shards.blocks(max(1, BLOCK_BYTES // (4 * shards.dim))):
            file.write(index.sa_encode(vectors).tobytes())
            progress("indexed", start + len(vectors), shards.count)


def _read(path: Path, *, mmap: bool) -> Any:
    """The index. IO_FLAG_MMAP_IFC maps vectors, links and inverted lists; together with IO_FLAG_MMAP, FAISS 1.15.1 refuses inverted lists."""
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC if mmap else 0)
    except RuntimeError as error:
        raise SearcherError(f"{path} is no FAISS index that can be opened: {_reason(error)}") from error
    if mmap:
        _read_ahead(index)
    return index


def _read_ahead(index: Any) -> None:
    """Let the system read ahead in vectors that are scanned from first to last: FAISS asks it not to, as graphs and lists are better off.

    300 MB that were not in the page cache were scanned in 0.14 s instead of 5.7 s.
    """
    if not isinstance(index, faiss.IndexFlatCodes) or not index.ntotal or sys.platform != "linux":
        return
    start = int(index.codes.data())
    page = start - start % mmap_module.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(start + index.codes.size() - page), mmap_module.MADV_NORMAL):
        raise SearcherError(f"madvise failed: {os.strerror(ctypes.get_errno())}")


def _memory(index: Any, path: Path, *, mmap: bool) -> Memory:
    try:
        return index_memory(index, index.ntotal, mmap=mmap)
    except SearcherError:  # a type whose parts are not known: all may be in memory
        return Memory(resident_bytes=path.stat().st_size, disk_bytes=path.stat().st_size)


def _reconstructed(index: Any, rows: npt.NDArray[np.int64]) -> Vectors:
    """Decoded vectors. Inverted lists do not know where a row is: they are told for the moment, which reads all ids."""
    if not len(rows):
        return np.zeros((0, index.d), np.float32)
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None and isinstance(faiss.downcast_index(ivf), faiss.IndexIVFPQFastScan):  # FAISS 1.15.1 reads where nothing is: a crash
        raise SearcherError("an index of type IndexIVFPQFastScan cannot decode its vectors: keep them beside it (--rescore)")
    try:
        if ivf is not None:
            ivf.make_direct_map(True)
        decoded: Vectors = index.reconstruct_batch(rows)
        return decoded
    except RuntimeError as error:
        raise SearcherError(f"an index of type {type(index).__name__} cannot decode its vectors: {_reason(error)}") from error
    finally:
        if ivf is not None:
            ivf.make_direct_map(False)


def _reason(error: RuntimeError) -> str:
    """FAISS's message without the C++ signature before it."""
    return str(error).rpartition("Error: ")[2].strip()
