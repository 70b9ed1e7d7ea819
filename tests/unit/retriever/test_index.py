import json
import random
from pathlib import Path

import faiss
import numpy as np
import pytest

from envs.quickstart_world import HELDOUT_SIZE, RELATIONS, TRAIN_SIZE, KnowledgeBase
from retriever.build import build, load
from retriever.corpus import CorpusError, Document
from retriever.encoders.hashed import HashedSettings
from retriever.index import Index, IndexFault

ROWS = [{"id": str(i), "contents": f'"{name}"\n{name} is the capital of {land} .'} for i, (name, land) in enumerate(
    [("Oslo", "Norway"), ("Rome", "Italy"), ("Paris", "France"), ("Berlin", "Germany"), ("Madrid", "Spain")]
)]  # fmt: skip
SMALL = HashedSettings(dim=128)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def document(number: int, contents: str) -> Document:
    return Document(id=str(number), contents=contents, json=json.dumps({"id": str(number), "contents": contents}).encode())


def found(index: Index, query: str, topk: int = 3) -> list[str]:
    [hits] = index.search([query], topk)
    return [json.loads(index.documents[hit.row])["id"] for hit in hits]


def test_the_passage_asked_for_comes_first(corpus: Path, tmp_path: Path):
    index = build(corpus, tmp_path / "index", settings=SMALL)
    assert [found(index, f"capital of {land}")[0] for land in ("Norway", "Italy", "France", "Germany", "Spain")] == list("01234")
    assert all(hit.score <= 1.0001 for [hit, *_] in index.search(["Oslo", "Rome"], 3))


def test_scores_are_inner_products_in_descending_order(corpus: Path):
    index = load(corpus, settings=SMALL)
    [hits] = index.search(["capital of Norway"], 5)
    vectors = index.encoder.encode([row["contents"] for row in ROWS])
    [query] = index.encoder.encode(["capital of Norway"])
    np.testing.assert_allclose([hit.score for hit in hits], sorted(vectors @ query, reverse=True), atol=1e-6)


def test_more_passages_than_there_are_gives_all_there_are(corpus: Path):
    index = load(corpus, settings=SMALL)
    assert sorted(found(index, "capital", topk=100)) == list("01234")
    assert index.search(["capital"], 0) == [[]]
    assert index.search([], 3) == []


def test_a_query_without_a_word_finds_nothing(corpus: Path):
    index = load(corpus, settings=SMALL)
    first, nothing, empty, second = index.search(["Oslo", "?!", "", "Rome"], 1)
    assert (nothing, empty) == ([], [])
    assert (first[0].row, second[0].row) == (0, 1)


def test_rows_that_faiss_reports_as_missing_are_dropped():
    """FAISS fills up with id -1, which Python would take for the last document."""

    class Short(faiss.IndexFlatIP):
        def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
            scores, rows = super().search(vectors, k)
            rows[:, 1:] = -1
            return scores, rows

    index = Index.of([document(0, "a b"), document(1, "c d")], SMALL)
    vectors = Short(SMALL.dim)
    vectors.add(index.encoder.encode(["a b", "c d"]))
    assert [hit.row for hit in Index(index.documents, vectors, index.encoder).search(["c"], 2)[0]] == [1]


def test_a_megabyte_as_a_query_is_cut_not_refused(corpus: Path):
    assert found(load(corpus, settings=SMALL), "Norway " + "x" * 1_000_000, topk=1) == ["0"]


def test_a_built_index_opens_with_the_same_answers(corpus: Path, tmp_path: Path):
    built = build(corpus, tmp_path / "out" / "index", settings=SMALL)
    opened = Index.open(tmp_path / "out" / "index")
    assert opened.search(["capital of Spain"], 5) == built.search(["capital of Spain"], 5)
    assert list(opened.documents) == list(built.documents)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["index"]


def test_building_again_reopens_the_same_and_refuses_another(corpus: Path, tmp_path: Path):
    out = tmp_path / "index"
    build(corpus, out, settings=SMALL)
    before = (out / "manifest.json").stat().st_mtime_ns
    assert len(build(corpus, out, settings=SMALL)) == 5
    assert (out / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(IndexFault, match="index of another encoder"):
        build(corpus, out, settings=HashedSettings(dim=64))
    with corpus.open("a") as file:
        file.write(json.dumps({"id": "5", "contents": "more"}))
    with pytest.raises(IndexFault, match="index of another corpus"):
        build(corpus, out, settings=SMALL)


def test_a_cache_holds_an_index_per_content(corpus: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    load(corpus, settings=SMALL, cache=cache)
    load(corpus, settings=SMALL, cache=cache)
    assert len(list(cache.iterdir())) == 1
    load(corpus, settings=HashedSettings(dim=64), cache=cache)
    assert len(list(cache.iterdir())) == 2


def test_a_build_that_fails_leaves_nothing(tmp_path: Path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    (tmp_path / "out").mkdir()
    with pytest.raises(CorpusError):
        build(bad, tmp_path / "out" / "index")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["documents.jsonl", "vectors.faiss", "idf.npy"])
def test_an_altered_file_is_refused(corpus: Path, tmp_path: Path, name: str):
    build(corpus, tmp_path / "index", settings=SMALL)
    path = tmp_path / "index" / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IndexFault, match=f"{name} is missing or not the file that was built"):
        Index.open(tmp_path / "index")
    path.unlink()
    with pytest.raises(IndexFault, match=f"{name} is missing"):
        Index.open(tmp_path / "index")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": 99}, "has format 99"),
        ({"count": 4}, "does not fit together"),
        ({"encoder": {"dim": 64, "word_weight": 1.0, "trigram_weight": 0.4}}, "does not fit together"),
        ({"encoder": {"dim": 128, "word_weight": 0.0, "trigram_weight": 1.0}}, "not those that this version's encoder makes"),
        ({"files": {}}, "is incomplete"),
    ],
)
def test_a_manifest_that_says_something_else_is_refused(corpus: Path, tmp_path: Path, change: dict, complaint: str):
    build(corpus, tmp_path / "index", settings=SMALL)
    path = tmp_path / "index" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(IndexFault, match=complaint):
        Index.open(tmp_path / "index")


def test_a_directory_without_a_manifest_is_no_index(tmp_path: Path):
    with pytest.raises(IndexFault, match="is no index"):
        Index.open(tmp_path)
    (tmp_path / "manifest.json").write_text("[")
    with pytest.raises(IndexFault, match="not JSON"):
        Index.open(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quick_starts_queries_find_their_passage(seed: int):
    rng, used = random.Random(seed), set()
    kbs = [KnowledgeBase(rng, size, used) for size in (TRAIN_SIZE, HELDOUT_SIZE)]
    facts = [(kb, subject, relation, object_) for kb in kbs for (subject, relation), object_ in kb.facts.items()]
    texts = [f'"{subject}"\n{RELATIONS[relation].passage.format(subject=subject, object=object_)}' for _, subject, relation, object_ in facts]
    index = Index.of([document(i, text) for i, text in enumerate(texts)], HashedSettings())
    hits = index.search([f"{subject} {RELATIONS[relation].keyword}" for _, subject, relation, _ in facts], 3)
    for kb in kbs:
        rows = [row for row, fact in enumerate(facts) if fact[0] is kb]
        assert np.mean([hits[row][0].row == row for row in rows]) >= 0.95
        assert np.mean([row in {hit.row for hit in hits[row]} for row in rows]) >= 0.99
