"""Exact search in blocks of 16 bit."""

from __future__ import annotations

import numpy as np
import pytest

from retriever.searchers.blocks import BlockSearcher
from retriever.searchers.searcher import SearcherError
from retriever.searchers.shards import VectorShards, as_stored

pytestmark = pytest.mark.slow  # torch is imported


def unit(rows, dim, seed):
    vectors = np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


VECTORS, QUERIES = unit(3000, 32, 0), unit(12, 32, 1)


def shards_of(vectors, dtype, rows=1100):
    return VectorShards([as_stored(vectors[start : start + rows], dtype) for start in range(0, max(len(vectors), 1), rows)])


def exact(shards, queries, topk):
    scores = queries.astype(np.float64) @ shards.rows(range(shards.count)).astype(np.float64).T
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
    return np.take_along_axis(scores, rows, axis=1), rows


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu"), ("cpu", "cpu", "cpu")])
def test_what_is_found_is_what_numpy_finds_on_one_device_or_several(stored, dtype, devices):
    shards = shards_of(VECTORS, stored)
    searcher = BlockSearcher.open(shards, dtype=dtype, devices=devices, block_rows=512)
    for queries in (QUERIES[:1], QUERIES[:3], QUERIES):  # scanned, and multiplied
        scores, rows = searcher.search(queries, 10)
        expected, best = exact(shards, queries, 10)
        assert rows.tolist() == best.tolist()
        np.testing.assert_allclose(scores, expected, atol=1e-6)


def test_a_query_has_the_same_scores_to_the_last_bit_alone_and_among_others():
    searcher = BlockSearcher.open(shards_of(VECTORS, "bfloat16"))
    together = searcher.search(QUERIES, 5)[0]
    assert together.tobytes() == np.concatenate([searcher.search(query[None], 5)[0] for query in QUERIES]).tobytes()


def test_what_16_bit_cannot_tell_apart_is_looked_at_more_closely():
    # 400 vectors that differ by less than bfloat16 can say, and by more than float32 can
    direction = unit(1, 32, 2)
    lengths = 1 + np.random.default_rng(3).permutation(400).astype(np.float32)[:, None] * 1e-5
    shards = VectorShards([np.concatenate([VECTORS, direction * lengths]).astype(np.float32)])
    searcher = BlockSearcher.open(shards, dtype="bfloat16")
    queries = np.repeat(direction, 4, axis=0)
    assert searcher.search(queries, 3)[1].tolist() == exact(shards, queries, 3)[1].tolist()
    assert searcher.info()["searched_deeper"] == 4
    searcher.search(QUERIES, 3)
    assert searcher.info()["searched_deeper"] == 4


def test_what_many_candidates_cannot_tell_apart_is_multiplied_in_float32():
    # the 600 best were beyond the 512 candidates of the deeper search, whose answer was given although it was not certain
    direction = unit(1, 32, 2)
    lengths = 1 + np.random.default_rng(3).permutation(600).astype(np.float32)[:, None] * 1e-6
    shards = shards_of(np.concatenate([VECTORS, direction * lengths]).astype(np.float32), "float16")
    searcher = BlockSearcher.open(shards, dtype="float16", devices=("cpu:0",))
    queries = np.repeat(direction, 4, axis=0)
    np.testing.assert_allclose(searcher.search(queries, 3)[0], exact(shards, queries, 3)[0], rtol=1e-6)
    info = searcher.info()
    assert (info["searched_deeper"], info["searched_in_float32"], info["uncertain"]) == (4, 4, 0)


def test_a_passage_that_is_there_more_often_than_candidates_is_counted_as_uncertain():
    shards = shards_of(np.concatenate([np.repeat(unit(1, 32, 2), 700, axis=0), VECTORS]), "bfloat16")
    searcher = BlockSearcher.open(shards)
    scores, rows = searcher.search(unit(1, 32, 2), 3)
    assert (rows < 700).all()
    np.testing.assert_allclose(scores, exact(shards, unit(1, 32, 2), 3)[0], rtol=1e-6)
    assert searcher.info()["uncertain"] == 1


def test_gpus_add_up_in_float32_whatever_was_set():
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    BlockSearcher.open(shards_of(VECTORS[:40], "float16"), dtype="float16").search(QUERIES, 1)
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize("size", [1e-6, 1.0, 4000.0])
def test_vectors_of_any_length_are_multiplied_in_float16_as_on_a_gpu(size):
    # scores beyond 65504 were infinite, and the best documents were not found; "cpu:0" multiplies as a GPU does, in the blocks' own type
    shards = VectorShards([VECTORS * 100])
    searcher = BlockSearcher.open(shards, dtype="float16", devices=("cpu:0",), block_rows=64)
    assert searcher.info()["product"] == ["float16"]
    queries = QUERIES * np.float32(size)
    scores, rows = searcher.search(queries, 3)
    expected, best = exact(shards, queries, 3)
    assert rows.tolist() == best.tolist()
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_no_more_candidates_leave_a_device_than_are_asked_for():
    # those of all blocks did, and were sorted there: ten times as long as the search of 21 million vectors on a GPU
    shards = shards_of(VECTORS, "bfloat16")
    searcher = BlockSearcher.open(shards, devices=("cpu:0",), block_rows=64)
    scores, rows = searcher._parts[0].candidates(QUERIES, 32, threads=1)
    assert tuple(scores.shape) == tuple(rows.shape) == (12, 32)
    assert searcher.search(QUERIES, 5)[1].tolist() == exact(shards, QUERIES, 5)[1].tolist()


def test_shards_of_the_blocks_own_type_are_used_where_they_lie():
    shards = shards_of(VECTORS, "bfloat16")
    assert BlockSearcher.open(shards).memory() == shards.memory()
    assert BlockSearcher.open(shards).info()["mapped"]
    copied = BlockSearcher.open(shards, dtype="float16")
    assert copied.memory().resident_bytes - shards.memory().resident_bytes == 3000 * 32 * 2
    assert not copied.info()["mapped"]


def test_more_than_there_is_is_found_once_and_then_nothing():
    searcher = BlockSearcher.open(shards_of(VECTORS[:40], "float16"), dtype="float16")
    scores, rows = searcher.search(QUERIES[:5], 50)
    assert (np.sort(rows[:, :40], axis=1) == np.arange(40)).all()
    assert (rows[:, 40:] == -1).all()
    assert (scores[:, 40:] == -np.inf).all()


def test_a_query_that_is_not_finite_finds_nothing():
    searcher = BlockSearcher.open(shards_of(VECTORS, "float32"))
    queries = QUERIES.copy()
    queries[2, 1] = np.nan
    scores, rows = searcher.search(queries, 2)
    assert rows[2].tolist() == [-1, -1]
    assert rows[[0, 1, 3]].tolist() == exact(searcher.shards, QUERIES[[0, 1, 3]], 2)[1].tolist()
    assert not np.isnan(scores).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_at_all_finds_nothing(dtype):
    searcher = BlockSearcher.open(shards_of(VECTORS[:0], dtype), devices=("cpu", "cpu"))
    assert searcher.search(QUERIES, 2)[1].tolist() == [[-1, -1]] * 12


def test_more_devices_than_rows_are_no_mistake():
    searcher = BlockSearcher.open(shards_of(VECTORS[:2], "bfloat16"), devices=("cpu",) * 5)
    for count in (1, 6):
        assert np.sort(searcher.search(QUERIES[:count], 2)[1], axis=1).tolist() == [[0, 1]] * count


def test_what_is_wrong_is_told():
    shards = shards_of(VECTORS, "float32")
    with pytest.raises(SearcherError, match="do not go to cuda:7"):
        BlockSearcher.open(shards, devices=("cuda:7",))
    with pytest.raises(SearcherError, match="devices"):
        BlockSearcher.open(shards, devices=())
    with pytest.raises(SearcherError, match="65504"):
        BlockSearcher.open(VectorShards([VECTORS * 1e6]), dtype="float16")
    with pytest.raises(ValueError, match=r"queries are \[N, 32\]"):
        BlockSearcher.open(shards).search(QUERIES[0], 1)


def test_progress_ends_at_the_number_of_rows():
    told = []
    searcher = BlockSearcher.open(shards_of(VECTORS, "float32"), block_rows=1000, progress=lambda *some: told.append(some))
    loaded = [("loaded to cpu", done, 3000) for done in (1000, 2000, 3000)]
    assert told == [("lengths of vectors", done, 3000) for done in (1100, 2200, 3000)] + loaded
    told.clear()
    BlockSearcher.open(searcher.shards, block_rows=1000, largest_norm=1.0, progress=lambda *some: told.append(some))
    assert told == loaded, "nothing is read twice where the longest is known"
