"""Row shards, and what is done with candidates."""

from __future__ import annotations

import numpy as np
import pytest

from retriever.query import Hit
from retriever.searchers.fusion import reciprocal_rank_fusion
from retriever.searchers.rescoring import exact_scores
from retriever.searchers.searcher import SearcherError, best_first
from retriever.searchers.shards import VectorShards, as_float32, as_stored, write_shard


def shards_of(directory, vectors, dtype="float32", rows=3):
    paths = []
    for start in range(0, len(vectors), rows):
        paths.append(directory / f"{dtype}-{start}.npy")
        write_shard(paths[-1], vectors[start : start + rows], dtype)
    return VectorShards.open(paths)


def test_rows_and_blocks_of_several_files_are_the_vectors(tmp_path):
    vectors = np.arange(16, dtype=np.float32).reshape(8, 2)
    shards = shards_of(tmp_path, vectors)
    assert (shards.count, shards.dim, shards.dtype) == (8, 2, "float32")
    assert shards.rows([7, 0, 3, 3]).tolist() == [[14, 15], [0, 1], [6, 7], [6, 7]]
    assert [(start, len(block)) for start, block in shards.blocks(2)] == [(0, 2), (2, 1), (3, 2), (5, 1), (6, 2)]
    assert np.concatenate([block for _, block in shards.blocks(2)]).tolist() == vectors.tolist()
    assert [span.tolist() for span in shards.span(2, 7)] == [[[4, 5]], [[6, 7], [8, 9], [10, 11]], [[12, 13]]]
    assert shards.memory().mapped_bytes == 64


@pytest.mark.parametrize(("dtype", "worst"), [("float32", 0), ("float16", 2**-11), ("bfloat16", 2**-8)])
def test_a_stored_number_is_the_nearest_of_its_type(tmp_path, dtype, worst):
    vectors = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    stored = shards_of(tmp_path, vectors, dtype, rows=50).rows(range(50))
    assert (np.abs(stored - vectors) <= worst * np.abs(vectors)).all()


def test_bfloat16_rounds_to_even_and_keeps_what_it_can_say():
    numbers = np.array([[1.0, 1.00390625, 1.01171875, -2.5, 0.0]], np.float32)  # the second and third lie half-way
    assert as_float32(as_stored(numbers, "bfloat16")).tolist() == [[1.0, 1.0, 1.015625, -2.5, 0.0]]


@pytest.mark.parametrize(("number", "dtype"), [(np.nan, "float32"), (np.inf, "bfloat16"), (70000.0, "float16"), (3.4e38, "bfloat16")])
def test_a_number_that_a_type_cannot_say_is_refused(tmp_path, number, dtype):
    with pytest.raises(SearcherError):
        write_shard(tmp_path / "x.npy", np.array([[1.0, number]], np.float32), dtype)


def test_a_row_that_is_not_there_is_refused(tmp_path):
    shards = shards_of(tmp_path, np.zeros((4, 2), np.float32))
    for rows in ([4], [-1, 0]):
        with pytest.raises(IndexError, match="rows are 0 to 3"):
            shards.rows(rows)


def test_files_that_do_not_fit_together_are_refused(tmp_path):
    write_shard(tmp_path / "a.npy", np.zeros((2, 2), np.float32), "float32")
    write_shard(tmp_path / "b.npy", np.zeros((2, 3), np.float32), "float32")
    np.save(tmp_path / "c.npy", np.zeros((2, 2), np.int8))
    np.save(tmp_path / "d.npy", np.array([[{}]], object), allow_pickle=True)
    (tmp_path / "e.npy").write_bytes(b"")
    for names in ("ab", "c", "d", "e", ""):
        with pytest.raises(SearcherError):
            VectorShards.open([tmp_path / f"{name}.npy" for name in names])


def test_no_rows_at_all_are_shards_too(tmp_path):
    write_shard(tmp_path / "a.npy", np.zeros((0, 2), np.float32), "bfloat16")
    shards = VectorShards.open([tmp_path / "a.npy"])
    assert (shards.count, shards.dim, shards.dtype, list(shards.blocks(4))) == (0, 2, "bfloat16", [])


def test_exact_scores_by_hand(tmp_path):
    shards = shards_of(tmp_path, np.array([[1, 0], [0, 2], [3, 4]], np.float32))
    queries, rows = np.array([[1, 1], [2, 0]], np.float32), np.array([[2, 0], [1, -1]])
    assert exact_scores(shards, queries, rows).tolist() == [[7, 1], [0, -np.inf]]
    assert exact_scores(shards, queries, rows, metric="l2").tolist() == [[-13, -1], [-8, -np.inf]]


def test_the_best_come_first_equal_ones_by_row_and_what_is_no_number_not_at_all():
    scores, rows = best_first(np.array([[1, 2, 2, np.nan, 9]], np.float32), np.array([[4, 8, 7, 5, -1]]), 4)
    assert rows.tolist() == [[7, 8, 4, -1]]
    assert scores.tolist() == [[2, 2, 1, -np.inf]]


def test_fusion_by_hand():
    # 3: 1/62 + 1/61, 1: 1/61, 2: 1/63, 9: 1/62; a -1 takes no place
    assert reciprocal_rank_fusion([[1, 3, 2], [-1, 3, 9]]) == [
        Hit(row=3, score=1 / 62 + 1 / 61),
        Hit(row=1, score=1 / 61),
        Hit(row=9, score=1 / 62),
        Hit(row=2, score=1 / 63),
    ]
    assert reciprocal_rank_fusion([[5], [4]], k=0) == [Hit(row=4, score=1.0), Hit(row=5, score=1.0)]
    assert reciprocal_rank_fusion([[], []]) == []
