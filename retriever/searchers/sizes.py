"""What an index will take, before it is built: bytes on the disk, in memory, mapped, and on devices.

FAISS's figures come from an empty index of the same factory string, type by type; with FAISS 1.15.1, mapped means (measured in fresh processes):

    Flat, SQ, PQ, RaBitQ, and IVF of them   all vectors and lists are mapped
    HNSW                                    vectors and links are mapped; 12 bytes per vector (levels, offsets) are in memory
    FastScan (`fs`)                         all is in memory: FAISS does not map it

A process adds what Python and its libraries take, and the scratch memory of a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np

from retriever.searchers.searcher import Memory, SearcherError
from retriever.searchers.shards import DTYPES, VectorType
from retriever.searchers.words import words_of

__all__ = ["BLOCKS", "GPU_SCRATCH", "bm25_memory", "bm25_spill", "building_bytes", "index_memory", "memory_of", "training_rows"]

BLOCKS = "blocks"
TRAIN_ROWS_PER_LIST = 64  # k-means of FAISS takes 39 to 256 points per centroid, and warns below
TRAIN_ROWS = 65_536  # at least, where there are so many: a PQ of 8 bits learns 256 centroids, 256 points each
LEVELS_AND_OFFSETS = 4 + 8  # bytes of HNSW per vector, besides its links
LINK = 4
ID = 8
FAST_SCAN_ROWS = 32  # a block of FastScan; the last one of each list is filled up
GPU_SCRATCH = 1536 << 20  # per GPU of more than 8 GB: StandardGpuResources' default (faiss/gpu/StandardGpuResources.cpp, 1.15.1)
POSTING = 4 + 4  # row and score
SPILLED_POSTING = 4 + 4 + 4  # word, row and count: until the columns are written
WORD = 8 + 4 + 4 + 8  # hash, column, top, start
HEAPS_EXPONENT = 0.6  # new words get rarer: their number grows with texts ** .4 to .7 (Heaps 1978; Manning et al. 2008, section 5.1.1)


def memory_of(
    backend: str,
    count: int,
    dim: int,
    *,
    dtype: VectorType = "bfloat16",
    mmap: bool = True,
    devices: Sequence[str] = ("cpu",),
    rescore: VectorType | None = None,
) -> Memory:
    """What an open index of `count` vectors takes.

    Args:
        backend: a FAISS factory string, or "blocks".
        dtype: of blocks and of their shards.
        rescore: the type of the shards to rescore by, if there are some.

    Raises:
        SearcherError: FAISS does not know the factory.
    """
    on_cpu = all(device == "cpu" for device in devices)
    if backend == BLOCKS:
        size = count * dim * np.dtype(DTYPES[dtype]).itemsize
        return Memory(mapped_bytes=size, disk_bytes=size, device_bytes=0 if on_cpu else size)
    try:
        index = faiss.index_factory(dim, backend, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise SearcherError(f"FAISS makes no index {backend!r} of {dim} dimensions: {str(error).rpartition('Error: ')[2]}") from error
    memory = index_memory(index, count, mmap=mmap and on_cpu)
    if not on_cpu:
        memory = Memory(disk_bytes=memory.disk_bytes, device_bytes=memory.disk_bytes + GPU_SCRATCH * len(devices))
    if rescore is not None:
        size = count * dim * np.dtype(DTYPES[rescore]).itemsize
        memory += Memory(mapped_bytes=size, disk_bytes=size)
    return memory


def building_bytes(factory: str, count: int, dim: int) -> int:
    """Memory that building takes, blocks aside: the sample that it is trained on, then the index, unless that goes to the disk as it grows."""
    index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    sample = 0 if index.is_trained else 4 * dim * min(count, training_rows(index))
    if isinstance(index, faiss.IndexFlat | faiss.IndexScalarQuantizer):
        return sample
    return max(sample, index_memory(index, count, mmap=False).resident_bytes)


def training_rows(index: Any) -> int:
    """How many rows an index is trained on, where there are so many."""
    ivf = faiss.try_extract_index_ivf(index)
    return max(TRAIN_ROWS, TRAIN_ROWS_PER_LIST * int(ivf.nlist) if ivf is not None else 0)


def bm25_memory(count: int, sample: Sequence[str]) -> Memory:
    """What an index of words of `count` texts like those of the sample takes. Raises ValueError for an empty sample."""
    if not sample:
        raise ValueError("an estimate needs texts")
    found = [set(words_of(text)) for text in sample]
    postings = sum(map(len, found)) / len(sample) * count
    words = len(set().union(*found)) * (count / len(sample)) ** HEAPS_EXPONENT
    size = int(postings * POSTING + min(words, postings) * WORD)
    return Memory(mapped_bytes=size, disk_bytes=size, resident_bytes=4 * count)


def bm25_spill(memory: Memory) -> int:
    """Bytes of disk that building an index of words needs besides those it leaves, at most: see `bm25_memory`."""
    return memory.disk_bytes * SPILLED_POSTING // POSTING


def index_memory(index: Any, count: int, *, mmap: bool) -> Memory:
    """What a FAISS index, empty or not, takes with `count` vectors."""
    memory = _mapped(faiss.downcast_index(index), count)
    return memory if mmap else Memory(resident_bytes=memory.disk_bytes, disk_bytes=memory.disk_bytes)


def _mapped(index: Any, count: int) -> Memory:
    """With its file mapped."""
    if isinstance(index, faiss.IndexPreTransform):
        return _resident(_steps(index)) + _below(index.index, count)
    if isinstance(index, faiss.IndexRefine):
        return _below(index.base_index, count) + _below(index.refine_index, count)
    if isinstance(index, faiss.IndexIDMap):
        return _resident(ID * count) + _below(index.index, count)
    if isinstance(index, faiss.IndexHNSW):
        return _on_disk(int(LINK * count * _links(index.hnsw))) + _resident(LEVELS_AND_OFFSETS * count) + _below(index.storage, count)
    if isinstance(index, faiss.IndexIVF):
        return _lists(index, count)
    if isinstance(index, faiss.IndexFastScan):
        return _resident(_padded(count) * _code_size(index) + _tables(index))
    if isinstance(index, faiss.IndexFlatCodes):
        return _on_disk(count * _code_size(index)) + _resident(_tables(index))
    raise SearcherError(f"the size of a FAISS index of type {type(index).__name__} is not known: count it from its file")


def _below(index: Any, count: int) -> Memory:
    return _mapped(faiss.downcast_index(index), count)


def _steps(index: Any) -> int:
    """Bytes of the matrices that vectors go through first."""
    return sum(4 * step.d_in * step.d_out for step in (index.chain.at(i) for i in range(index.chain.size())))


def _links(hnsw: Any) -> float:
    """Of one vector, expected: it is on the next level with probability 1 / M (Malkov and Yashunin 2016, section 4.1)."""
    lowest, higher = hnsw.nb_neighbors(0), hnsw.nb_neighbors(1)
    return float(lowest + higher / (higher - 1) if higher > 1 else lowest)


def _lists(index: Any, count: int) -> Memory:
    centroids = _below(index.quantizer, index.nlist)
    around = _resident(centroids.disk_bytes + _tables(index) + ID * index.nlist)
    if isinstance(index, faiss.IndexIVFFastScan):
        return around + _resident((count + index.nlist * FAST_SCAN_ROWS // 2) * index.code_size + ID * count)
    return around + _on_disk(count * (index.code_size + ID))


def _code_size(index: Any) -> int:
    return int(index.code_size)


def _tables(index: Any) -> int:
    """What training leaves behind: centroids of the codes, or ranges."""
    if hasattr(index, "pq"):
        return int(4 * index.pq.ksub * index.d)
    return int(2 * 4 * index.d)


def _padded(count: int) -> int:
    return -(-count // FAST_SCAN_ROWS) * FAST_SCAN_ROWS


def _on_disk(size: int) -> Memory:
    return Memory(mapped_bytes=size, disk_bytes=size)


def _resident(size: int) -> Memory:
    return Memory(resident_bytes=size, disk_bytes=size)
