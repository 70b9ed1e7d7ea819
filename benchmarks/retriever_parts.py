"""Encoders and kinds of index, side by side: what each costs alone, and what it finds. One thread on one core, medians, everything in one run.

    python benchmarks/retriever_parts.py [--passages 50000] [--rounds 5] [--only encoders|indexes|scan]

Passages, their vectors and the questions are those of benchmarks/retriever.py, which makes them if it has not (some 20 minutes of CPU, once).

    encoders    questions per second, one at a time, in 16s and in 64s, as a server encodes them; cosines to PyTorch in float32
    indexes     ms for 1, 16 and 64 questions together, of 10 hits; found: the share of the 10 that an exact product in float64 finds, once for 512
                questions about other things than the passages, once for 512 pieces of 12 words of passages (graphs and lists are laid through the
                passages, and a question that lies far from all of them is harder)
    scan        blocks of 200,000 random vectors of 768 numbers: ms for 1 and for 64 questions, and the latter's GFLOP/s, to reckon larger ones by
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

if __name__ == "__main__":  # before NumPy, PyTorch and FAISS are imported
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

import faiss
import numpy as np
from retriever_claims import arguments_of, hardware, prepared, questions, versions

from retriever.encoders.encoder import Encoder
from retriever.encoders.opening import open_encoder
from retriever.encoders.settings import Runtime
from retriever.manifest import Manifest
from retriever.query import Vectors
from retriever.searchers.blocks import BlockSearcher
from retriever.searchers.faiss_index import FaissSearcher, build_faiss
from retriever.searchers.searcher import Searcher
from retriever.searchers.shards import VectorShards, VectorType, write_shard

RUNTIMES = {
    "torch, fp32": Runtime(kind="torch"),
    "onnx, fp32": Runtime(kind="onnx"),
    "torch, bf16": Runtime(kind="torch", precision="bf16"),
    "onnx, int8": Runtime(kind="onnx", precision="int8"),
}
# Factory, parameters of the search, and whether the best 100 are scored again by vectors of 16 bit.
INDEXES: Sequence[tuple[str, str | None, bool]] = (
    ("Flat", None, False),
    ("SQfp16", None, False),
    ("SQ8", None, False),
    ("HNSW32,SQ8", "efSearch=64", False),
    ("HNSW32,SQ8", "efSearch=512", False),
    ("IVF256,SQ8", "nprobe=16", False),
    ("IVF256,SQ8", "nprobe=64", False),
    ("IVF256,SQ8", "nprobe=64", True),
    ("RaBitQ", None, False),
    ("RaBitQ", None, True),
    ("PQ48x4fs", None, True),
)
BLOCKS: Sequence[VectorType] = ("float16", "bfloat16")
BATCHES = (1, 16, 64)
TOPK = 10
SCANNED, SCANNED_DIM = 200_000, 768  # 0.3 GB in 16 bit: far beyond a core's caches, as larger ones are
ASKED = 512  # questions, for what is found
PIECE = slice(5, 17)  # words of a passage that stand for a question about it


def main(about: str) -> None:
    """Measure both tables and print them."""
    arguments = arguments_of(about, only={"choices": ("encoders", "indexes", "scan")})
    index, _ = prepared(arguments)
    texts = questions(arguments)[0]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    record = Manifest.read(index).encoder
    assert record is not None
    encoders = {name: open_encoder(record, runtime, table=None) for name, runtime in RUNTIMES.items()}
    print(f"{hardware()}; medians of {arguments.rounds} rounds of CPU time\n{', '.join(map(' '.join, versions().items()))}\n")
    if arguments.only in (None, "scan"):
        print_scan(arguments.rounds)
    if arguments.only in (None, "encoders"):
        print_encoders(encoders, texts, arguments.rounds)
    if arguments.only in (None, "indexes"):
        stored = faiss.read_index(str(index / "vectors.faiss"))
        vectors = stored.reconstruct_n(0, stored.ntotal)
        asked = {"questions": texts[:ASKED], "pieces": pieces(index)}
        print_indexes(vectors, {name: encoders["onnx, fp32"].encode_queries(some) for name, some in asked.items()}, arguments.rounds)


def print_encoders(encoders: Mapping[str, Encoder], texts: Sequence[str], rounds: int) -> None:
    """Questions per second, and how far vectors are from PyTorch's in float32."""
    exact = encoders["torch, fp32"].encode_queries(texts[:ASKED])
    calls = {(name, batch): partial(_encode, encoder, texts, batch) for batch in BATCHES for name, encoder in encoders.items()}
    seconds = _seconds(calls, rounds)
    print("| runtime, precision | questions/s, one at a time | in 16s | in 64s | cosine to fp32: mean | least |\n|---|---|---|---|---|---|")
    for name, encoder in encoders.items():
        cosines = (encoder.encode_queries(texts[:ASKED]) * exact).sum(axis=1)
        rates = " | ".join(f"{batch / seconds[name, batch]:.0f}" for batch in BATCHES)
        print(f"| {name} | {rates} | {cosines.mean():.5f} | {cosines.min():.5f} |")
    print()


def print_indexes(vectors: Vectors, asked: Mapping[str, Vectors], rounds: int) -> None:
    """Milliseconds, megabytes, and what is found."""
    exact = {
        name: np.argsort(-(some.astype(np.float64) @ vectors.T.astype(np.float64)), axis=1, kind="stable")[:, :TOPK] for name, some in asked.items()
    }
    print(f"{len(vectors)} vectors of {vectors.shape[1]}, top {TOPK}\n")
    print(f"| index | MB | building, s | 1: ms | 16: ms | 64: ms |{''.join(f' found: {name} |' for name in asked)}")
    print(f"|---|---|---|---|---|---|{'---|' * len(asked)}")
    with tempfile.TemporaryDirectory(prefix="retriever-parts-") as folder:
        shards = {dtype: _shards(Path(folder), vectors, dtype) for dtype in (*BLOCKS, "float32")}
        for name, searcher, built_s, nbytes in chain(_blocks(shards), _faiss(shards, Path(folder) / "vectors.faiss")):
            calls = {("", batch): partial(_search, searcher, asked["questions"], batch) for batch in BATCHES}
            seconds = _seconds(calls, rounds)
            times = "".join(f" {1e3 * seconds['', batch]:.2f} |" for batch in BATCHES)
            found = "".join(f" {_found(searcher.search(some, TOPK)[1], exact[name]):.3f} |" for name, some in asked.items())
            print(f"| {name} | {nbytes / 1e6:.0f} | {built_s:.1f} |{times}{found}", flush=True)


def print_scan(rounds: int) -> None:
    """What one core does of an exact search too large for its caches."""
    numbers = np.random.default_rng(0)
    vectors, asked = (numbers.standard_normal((rows, SCANNED_DIM), np.float32) / SCANNED_DIM**0.5 for rows in (SCANNED, ASKED))
    print(f"{SCANNED} vectors of {SCANNED_DIM}, top {TOPK}\n\n| blocks | 1: ms | 64: ms | 64: GFLOP/s |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="retriever-parts-") as folder:
        for dtype in BLOCKS:
            searcher = BlockSearcher.open(_shards(Path(folder), vectors, dtype), dtype=dtype)
            seconds = _seconds({("", batch): partial(_search, searcher, asked, batch) for batch in (1, 64)}, rounds)
            one, many = seconds["", 1], seconds["", 64]
            print(f"| {dtype} | {1e3 * one:.1f} | {1e3 * many:.0f} | {2 * 64 * SCANNED * SCANNED_DIM / many / 1e9:.0f} |", flush=True)
    print()


def pieces(index: Path) -> list[str]:
    """Words of passages, spread over all of them."""
    rows = (index / "documents.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(row)["contents"].partition("\n")[2] for row in rows[:: len(rows) // ASKED][:ASKED]]
    return [" ".join(text.split()[PIECE]) for text in texts]


def _blocks(shards: Mapping[VectorType, VectorShards]) -> Iterator[tuple[str, Searcher, float, int]]:
    for dtype in BLOCKS:
        started = process_time()
        searcher = BlockSearcher.open(shards[dtype], dtype=dtype)
        yield f"blocks, {dtype}", searcher, process_time() - started, shards[dtype].memory().disk_bytes


def _faiss(shards: Mapping[VectorType, VectorShards], path: Path) -> Iterator[tuple[str, Searcher, float, int]]:
    for factory, parameters, rescore in INDEXES:
        started = process_time()
        build_faiss(shards["float32"], factory, path)
        built_s, kept = process_time() - started, shards["float16"] if rescore else None
        name = ", ".join(filter(None, (factory, parameters, "rescored" if rescore else None)))
        searcher = FaissSearcher.open(path, parameters=parameters, rescore=kept)
        yield name, searcher, built_s, path.stat().st_size + (kept.memory().disk_bytes if kept else 0)


def _search(searcher: Searcher, asked: Vectors, count: int, number: int) -> None:
    searcher.search(asked[(number * count + np.arange(count)) % len(asked)], TOPK)


def _found(rows: np.ndarray, exact: np.ndarray) -> float:
    return float(np.mean([len(set(some) & set(best)) / TOPK for some, best in zip(rows.tolist(), exact.tolist(), strict=True)]))


def _seconds(calls: Mapping[tuple[str, int], Callable[[int], object]], rounds: int) -> dict[tuple[str, int], float]:
    """CPU seconds of each call, which gets a number of its own each time: all calls once in a round, the first round apart."""
    took: dict[tuple[str, int], list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            times = []
            until = perf_counter() + 0.3
            while not times or perf_counter() < until:
                started = process_time()
                call(97 * number + len(times))
                times.append(process_time() - started)
            took[name].append(sum(times) / len(times))
    return {name: median(times[1:]) for name, times in took.items()}


def _encode(encoder: Encoder, texts: Sequence[str], count: int, number: int) -> None:
    encoder.encode_queries([texts[(number * count + i) % len(texts)] for i in range(count)])


def _shards(folder: Path, vectors: Vectors, dtype: VectorType) -> VectorShards:
    path = folder / f"{dtype}.npy"
    write_shard(path, vectors, dtype)
    return VectorShards.open([path])


if __name__ == "__main__":
    main(__doc__ or "")
