"""Search by words."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from retriever.searchers.bm25 import BM25_FILES, Bm25Searcher, build_bm25
from retriever.searchers.searcher import SearcherError
from retriever.searchers.words import words_of

TEXTS = ["The cat sat.", "the dog", "", "A cat and a dog", "日本語の文章", "THE CAT"]


def searcher_of(directory, texts, **options):
    return Bm25Searcher.open(directory, build_bm25(texts, len(texts), directory, **options))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't panic: foo_bar, C3-PO!", ["don", "t", "panic", "foo", "bar", "c3", "po"]),
        ("Zürich STRASSE straße ﬁn", ["zürich", "strasse", "strasse", "fin"]),
        ("東京都 と iPhone15です", ["東京", "京都", "と", "iphone15", "です"]),
        ("हिन्दी में لُغَة", ["हिन्दी", "में", "لُغَة"]),
        ("ภาษา", ["ภา", "าษ", "ษา"]),
        ("한국어 Ελλάς", ["한국어", "ελλάσ"]),
        ("", []),
        ("?! …", []),
        ("a" * 100, ["a" * 64]),
        ("lone \ud800 surrogate", ["lone", "surrogate"]),
    ],
)
def test_words_of_any_language(text, words):
    assert words_of(text) == words


def test_the_combining_and_the_composed_form_of_a_letter_are_one_word():
    assert words_of("e\u0301cole") == words_of("\u00e9cole") == ["école"]


def test_scores_by_hand(tmp_path):
    searcher = searcher_of(tmp_path, TEXTS, k1=1.2, b=0.75)
    # 5 words of 3, 2, 0, 5, 5 (pairs of characters), 2 texts: mean 17/6; "cat" is in 3 of 6 texts: idf = ln(1 + 3.5 / 3.5)
    scores, rows = searcher.search(["cat"], 4)
    assert rows.tolist() == [[5, 0, 3, -1]]
    expected = [math.log(2) / (1 + 1.2 * (0.25 + 0.75 * length / (17 / 6))) for length in (2, 3, 5)]
    np.testing.assert_allclose(scores[0, :3], expected, rtol=1e-6)
    assert scores[0, 3] == -np.inf


def test_words_that_no_text_has_find_nothing_and_equal_scores_come_by_row(tmp_path):
    searcher = searcher_of(tmp_path, ["b a", "a b", "c", "a b"])
    scores, rows = searcher.search(["zebra", "", "a", "a zebra", "日本"], 2)
    assert rows.tolist() == [[-1, -1], [-1, -1], [0, 1], [0, 1], [-1, -1]]
    assert scores[2].tolist() == scores[3].tolist()
    assert searcher.search(["c a"], 5)[1].tolist() == [[2, 0, 1, 3, -1]]
    assert searcher.search([], 3)[1].shape == (0, 3)


def test_a_search_leaves_nothing_behind(tmp_path):
    searcher = searcher_of(tmp_path, TEXTS)
    first = searcher.search(["cat dog"], 5)
    searcher.search(["the sat 日本語"], 5)
    again = searcher.search(["cat dog"], 5)
    assert first[0].tobytes() == again[0].tobytes()
    assert first[1].tolist() == again[1].tolist()


@pytest.mark.parametrize("texts", [[], [""], ["", "?"]])
def test_texts_without_a_word_are_an_index_that_finds_nothing(tmp_path, texts):
    assert searcher_of(tmp_path, texts).search(["cat"], 2)[1].tolist() == [[-1, -1]]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_pieces_of_many_texts_are_one_file(tmp_path):
    # each was a mapped file, and a process may have 1,024 open: 17 million texts could not be indexed
    texts = ["a"] * 40_000
    texts[39_999] = "a b"
    most = [0]

    def count(what, done, of):
        if what == "words indexed":
            most.append(sum(str(tmp_path) in str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()))

    searcher = searcher_of(tmp_path, texts, progress=count)
    assert max(most) == 3, "the pieces, rows.npy and scores.npy"
    assert searcher.search(["b"], 2)[1].tolist() == [[39_999, -1]]
    assert searcher.search(["a b"], 2)[1].tolist() == [[39_999, 0]]


@pytest.mark.slow
def test_what_is_found_is_what_bm25s_finds(tmp_path):
    bm25s = pytest.importorskip("bm25s")
    pick = np.random.default_rng(0)
    texts = [" ".join(f"w{int(2000**u)}" for u in pick.random(pick.integers(1, 20))) for _ in range(12_000)]  # w1 is in more than half of them
    searcher = searcher_of(tmp_path, texts)
    reference = bm25s.BM25(k1=1.5, b=0.75, method="lucene")
    reference.index([words_of(text) for text in texts], show_progress=False)
    for _ in range(40):
        query = " ".join(f"w{int(2000**u)}" for u in pick.random(pick.integers(1, 9)))
        expected = np.array(reference.get_scores(words_of(query)))
        scores, rows = searcher.search([query], 10)
        np.testing.assert_allclose(scores[0], np.sort(expected)[::-1][:10], rtol=1e-5)
        np.testing.assert_allclose(expected[rows[0]], scores[0], rtol=1e-5)
        assert not searcher._sums.any()


def test_what_is_wrong_is_told(tmp_path):
    for options in ({"k1": -1}, {"b": 2}, {"k1": math.nan}):
        with pytest.raises(SearcherError, match="k1 >= 0"):
            build_bm25(TEXTS, 6, tmp_path, **options)
    with pytest.raises(SearcherError, match="there are 6 texts, 7 were announced"):
        build_bm25(TEXTS, 7, tmp_path)
    with pytest.raises(SearcherError, match="more than the 5"):
        build_bm25(TEXTS, 5, tmp_path)
    assert list(tmp_path.iterdir()) == []
    record = build_bm25(TEXTS, 6, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(BM25_FILES)
    with pytest.raises(SearcherError, match=re.escape("version 0 of the words")):
        Bm25Searcher.open(tmp_path, record | {"tokenizer": 0})
    (tmp_path / "rows.npy").write_bytes(b"short")
    with pytest.raises(SearcherError, match=r"rows\.npy cannot be read"):
        Bm25Searcher.open(tmp_path, record)
