"""FAISS indexes: built from shards, opened by mapping, searched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest

from retriever.searchers.faiss_index import FaissSearcher, build_faiss
from retriever.searchers.searcher import Memory, SearcherError
from retriever.searchers.shards import VectorShards, as_stored, write_shard

ROOT = Path(__file__).resolve().parents[3]
VECTORS = np.random.default_rng(0).standard_normal((600, 16)).astype(np.float32)
SHARDS = VectorShards([VECTORS[:250], VECTORS[250:]])
QUERIES = np.random.default_rng(1).standard_normal((9, 16)).astype(np.float32)


def exact(queries, topk, metric="ip"):
    wide, vectors = queries.astype(np.float64), VECTORS.astype(np.float64)
    scores = wide @ vectors.T if metric == "ip" else -np.square(wide[:, None] - vectors).sum(axis=2)
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
    return np.take_along_axis(scores, rows, axis=1), rows


def built(directory, factory, **options):
    build_faiss(SHARDS, factory, directory / "vectors.faiss", **options)
    return directory / "vectors.faiss"


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_a_flat_index_finds_what_numpy_finds(tmp_path, metric, mmap, one_at_a_time):
    searcher = FaissSearcher.open(built(tmp_path, "Flat", metric=metric), mmap=mmap, one_at_a_time=one_at_a_time)
    scores, rows = searcher.search(QUERIES, 10)
    expected, best = exact(QUERIES, 10, metric)
    assert rows.tolist() == best.tolist()
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-4)
    assert searcher.metric == metric
    assert (searcher.memory().mapped_bytes > 0) == mmap


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "SQfp16"])
def test_a_file_that_is_written_as_it_grows_is_faiss_own(tmp_path, factory):
    index = faiss.index_factory(16, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(VECTORS)
    index.add(VECTORS)
    assert built(tmp_path, factory).read_bytes() == faiss.serialize_index(index).tobytes()
    assert list(tmp_path.iterdir()) == [tmp_path / "vectors.faiss"]


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["SQ8", "RaBitQ", "IVF8,RaBitQ", "HNSW16,SQ8", "PQ8x4fs", "IVF8_HNSW8,SQfp16", "IVF8,Flat", "RR,RaBitQ"])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_candidates_that_are_rescored_are_found_as_exactly_as_numpy_finds_them(tmp_path, factory, metric):
    half = VectorShards([as_stored(VECTORS, "float16")])
    parameters = "nprobe=8" if "IVF" in factory else "efSearch=256" if "HNSW" in factory else None
    searcher = FaissSearcher.open(built(tmp_path, factory, metric=metric), parameters=parameters, rescore=half, rescore_depth=600)
    scores, rows = searcher.search(QUERIES, 5)
    expected, best = exact(QUERIES, 5, metric)
    assert (rows == best).mean() > 0.95  # the graph may miss one, and 16 bit may swap two
    assert np.abs(scores - expected).max() < 0.2
    assert searcher.stored([3]).tolist() == half.rows([3]).tolist()
    assert searcher.memory().mapped_bytes >= half.count * half.dim * 2 or searcher.memory().resident_bytes


def test_more_than_there_is_is_found_once_and_then_nothing(tmp_path):
    scores, rows = FaissSearcher.open(built(tmp_path, "Flat")).search(QUERIES[:2], 700)
    assert rows.shape == scores.shape == (2, 700)
    assert (np.sort(rows[:, :600], axis=1) == np.arange(600)).all()
    assert (rows[:, 600:] == -1).all()
    assert (scores[:, 600:] == -np.inf).all()


def test_a_query_that_is_not_finite_finds_nothing_and_the_others_what_they_find_alone(tmp_path):
    searcher = FaissSearcher.open(built(tmp_path, "Flat"))
    queries = QUERIES.copy()
    queries[1, 3], queries[4, 0] = np.nan, np.inf
    scores, rows = searcher.search(queries, 3)
    assert rows[[1, 4]].tolist() == [[-1] * 3] * 2
    assert (scores[[1, 4]] == -np.inf).all()
    assert rows[[0, 2, 3]].tolist() == exact(QUERIES[[0, 2, 3]], 3)[1].tolist()
    assert searcher.search(queries[[1]], 2)[1].tolist() == [[-1, -1]]


def test_an_index_of_nothing_finds_nothing(tmp_path):
    build_faiss(VectorShards([VECTORS[:0]]), "Flat", tmp_path / "empty")
    searcher = FaissSearcher.open(tmp_path / "empty")
    assert searcher.search(QUERIES[:1], 2)[1].tolist() == [[-1, -1]]
    assert FaissSearcher.of(VECTORS[:0]).search(QUERIES[:0], 2)[1].shape == (0, 2)


def test_one_at_a_time_a_query_has_the_same_scores_alone_and_among_others():
    searcher = FaissSearcher.of(VECTORS, one_at_a_time=True)
    together = searcher.search(QUERIES, 5)[0]
    alone = np.concatenate([searcher.search(query[None], 5)[0] for query in QUERIES])
    assert together.tobytes() == alone.tobytes()
    assert searcher.info()["blas_threshold"] == 2**31 - 1


def test_the_setting_is_that_of_the_searcher_that_searches():
    first, second = FaissSearcher.of(VECTORS, one_at_a_time=True), FaissSearcher.of(VECTORS)
    second.search(QUERIES, 1)
    assert faiss.cvar.distance_compute_blas_threshold == second.info()["blas_threshold"] == 4 * 16
    first.search(QUERIES, 1)
    assert faiss.cvar.distance_compute_blas_threshold == 2**31 - 1


def test_parameters_reach_the_index_and_unknown_ones_are_told_what_there_is(tmp_path):
    path = built(tmp_path, "IVF8_HNSW4,Flat", train_rows=600)
    searcher = FaissSearcher.open(path, parameters="nprobe=8, quantizer_efSearch=40")
    assert searcher.index.nprobe == 8
    assert faiss.downcast_index(searcher.index.quantizer).hnsw.efSearch == 40
    assert searcher.info()["parameters"] == {"nprobe": 8, "quantizer_efSearch": 40}
    assert searcher.search(QUERIES, 5)[1].tolist() == exact(QUERIES, 5)[1].tolist()
    for wrong, told in {"efSearch=4": "there are nprobe, quantizer_efSearch", "nprobe=0": "positive integer", "nprobe=1,nprobe=2": "twice"}.items():
        with pytest.raises(SearcherError, match=told):
            FaissSearcher.open(path, parameters=wrong)
    with pytest.raises(SearcherError, match="it has none"):
        FaissSearcher.open(built(tmp_path, "Flat"), parameters="nprobe=4")


@pytest.mark.parametrize("factory", ["Flat", "HNSW8,Flat", "IVF4,Flat"])
def test_stored_vectors_are_the_vectors(tmp_path, factory):
    searcher = FaissSearcher.open(built(tmp_path, factory, train_rows=600))
    assert searcher.stored([599, 0]).tolist() == VECTORS[[599, 0]].tolist()
    assert searcher.stored([]).shape == (0, 16)
    with pytest.raises(IndexError, match="rows are 0 to 599"):
        searcher.stored([600])


def test_an_index_whose_rows_are_divided_decodes_by_the_one_that_it_is_from():
    # what an index on several GPUs is to FAISS: opening one ended with "reconstruct not implemented for this type of index"
    whole, divided = faiss.IndexFlatIP(16), faiss.IndexShards(16, False, True)
    whole.add(VECTORS)
    for part in SHARDS.parts:
        index = faiss.IndexFlatIP(16)
        index.add(part)
        divided.add_shard(index)
    searcher = FaissSearcher(divided, memory=Memory(), decoder=whole)
    assert searcher.stored([599, 0]).tolist() == VECTORS[[599, 0]].tolist()
    assert searcher.search(QUERIES, 5)[1].tolist() == exact(QUERIES, 5)[1].tolist()


def test_what_faiss_crashes_at_is_refused(tmp_path):
    searcher = FaissSearcher.open(built(tmp_path, "IVF2,PQ2x4fs", train_rows=600))
    with pytest.raises(SearcherError, match="cannot decode"):
        searcher.stored([1, 2])
    with pytest.raises(SearcherError, match="cannot add vectors to an index of type IndexIDMap"):
        built(tmp_path, "IDMap,Flat")


def test_what_is_wrong_is_told(tmp_path):
    (tmp_path / "text").write_text("no index at all")
    with pytest.raises(SearcherError, match="no FAISS index"):
        FaissSearcher.open(tmp_path / "text")
    with pytest.raises(SearcherError, match="makes no index 'Flatt'"):
        build_faiss(SHARDS, "Flatt", tmp_path / "out")
    with pytest.raises(SearcherError, match="cannot train"):
        build_faiss(SHARDS, "IVF1024,Flat", tmp_path / "out")
    with pytest.raises(SearcherError, match="those to rescore by are 250"):
        FaissSearcher.open(built(tmp_path, "Flat"), rescore=VectorShards([VECTORS[:250]]))
    with pytest.raises(ValueError, match=r"queries are \[N, 16\]"):
        FaissSearcher.of(VECTORS).search(QUERIES[:, :8], 1)
    with pytest.raises(ValueError, match="at least 1"):
        FaissSearcher.of(VECTORS).search(QUERIES, 0)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="this FAISS has GPUs")
def test_a_faiss_without_gpus_says_what_to_install(tmp_path):
    with pytest.raises(SearcherError, match="faiss-gpu"):
        FaissSearcher.open(built(tmp_path, "Flat"), device="cuda:0")


def test_progress_counts_up_to_the_last_row(tmp_path):
    told = []
    built(tmp_path, "SQ8", progress=lambda what, done, of: told.append((what, done, of)))
    assert told == [("trained", 0, 600), ("trained", 600, 600), ("indexed", 250, 600), ("indexed", 600, 600)]


IN_A_FRESH_PROCESS = """
import sys
from pathlib import Path
import numpy as np
from retriever.searchers.blocks import BlockSearcher
from retriever.searchers.faiss_index import FaissSearcher
from retriever.searchers.shards import VectorShards

def resident(kind):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(kind))

warm = VectorShards([np.zeros((10, 128), np.uint16)])
queries = np.random.default_rng(1).standard_normal((1, 128)).astype(np.float32)
FaissSearcher.of(np.zeros((10, 128), np.float32)).search(queries, 10)
BlockSearcher.open(warm).search(queries, 10)
before, files = resident("RssAnon"), resident("RssFile")
if sys.argv[1].endswith(".npy"):
    searcher = BlockSearcher.open(VectorShards.open([Path(sys.argv[1])]), dtype=sys.argv[2])
else:
    searcher = FaissSearcher.open(Path(sys.argv[1]), mmap=sys.argv[2] == "mapped")
opened = resident("RssAnon")
searcher.search(queries, 10)
memory = searcher.memory()
print(opened - before, resident("RssFile") - files, memory.resident_bytes, memory.mapped_bytes, memory.disk_bytes)
"""

SLACK = 4e6  # allocators, code that is first used, a list that is copied


def grown_in_a_fresh_process(path, how):
    ran = subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS, str(path), how], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.stderr == ""
    return map(int, ran.stdout.split())


@pytest.mark.soak
@pytest.mark.parametrize("factory", ["Flat", "SQ8", "PQ32", "RaBitQ", "HNSW16,SQ8", "IVF256,SQ8", "IVF256,RaBitQ", "PQ32x4fs", "IVF256,RaBitQfs"])
@pytest.mark.parametrize("how", ["mapped", "read"])
def test_a_fresh_process_grows_by_what_the_index_says_that_it_takes(tmp_path, factory, how):
    vectors = np.random.default_rng(0).standard_normal((200_000, 128)).astype(np.float32)
    build_faiss(VectorShards([vectors]), factory, tmp_path / "index", train_rows=20_000)
    grown, read, resident, mapped, disk = grown_in_a_fresh_process(tmp_path / "index", how)
    assert disk == pytest.approx((tmp_path / "index").stat().st_size, rel=0.01)
    assert mapped + resident == disk
    assert grown == pytest.approx(resident, rel=0.15, abs=SLACK)
    assert read < 1.15 * mapped + 3 * SLACK  # a list or a graph is read in part
    assert read > 0.85 * mapped - SLACK or "IVF" in factory or "HNSW" in factory


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_fresh_process_grows_by_what_blocks_say_that_they_take(tmp_path, dtype):
    vectors = np.random.default_rng(0).standard_normal((200_000, 128)).astype(np.float32)
    write_shard(tmp_path / "shard.npy", vectors, "bfloat16")
    grown, read, resident, mapped, _ = grown_in_a_fresh_process(tmp_path / "shard.npy", dtype)
    assert (resident, mapped) == (0 if dtype == "bfloat16" else 51_200_000, 51_200_000)
    assert grown == pytest.approx(resident, rel=0.15, abs=30e6)  # rounding takes blocks of float32
    assert read == pytest.approx(mapped, rel=0.15, abs=SLACK)
