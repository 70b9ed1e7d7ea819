import json
import random
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest

from envs.quickstart_world import HELDOUT_SIZE, RELATIONS, TRAIN_SIZE, KnowledgeBase
from retriever.building.build import build
from retriever.building.load import load
from retriever.building.spec import BuildSpec
from retriever.corpus import CorpusError, Document
from retriever.encoders.encoder import EncoderFault
from retriever.encoders.hashed import HashedSettings
from retriever.index import Index, Models, Serving, _open_encoder
from retriever.manifest import IndexFault
from retriever.query import Hit, Mode, Query
from retriever.searchers.faiss_index import FaissSearcher
from retriever.searchers.searcher import Memory

ROWS = [{"id": str(i), "contents": f'"{name}"\n{name} is the capital of {land} .'} for i, (name, land) in enumerate(
    [("Oslo", "Norway"), ("Rome", "Italy"), ("Paris", "France"), ("Berlin", "Germany"), ("Madrid", "Spain")]
)]  # fmt: skip
SMALL = HashedSettings(dim=128)
SPEC = BuildSpec(encoder=SMALL)
WITH_WORDS = BuildSpec(encoder=SMALL, bm25=True)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def document(number: int, contents: str) -> Document:
    return Document(id=str(number), contents=contents, json=json.dumps({"id": str(number), "contents": contents}).encode())


def asked(*texts: str, topk: int = 3, mode: Mode | None = None) -> list[Query]:
    return [Query(text=text, topk=topk, mode=mode) for text in texts]


def found(index: Index, query: str, topk: int = 3) -> list[str]:
    [hits] = index.search(asked(query, topk=topk))
    return [json.loads(index.documents[hit.row])["id"] for hit in hits]


def test_the_passage_asked_for_comes_first(corpus: Path):
    index = load(corpus, settings=SMALL)
    assert [found(index, f"capital of {land}")[0] for land in ("Norway", "Italy", "France", "Germany", "Spain")] == list("01234")
    assert all(hit.score <= 1.0001 for [hit, *_] in index.search(asked("Oslo", "Rome")))


def test_scores_are_inner_products_in_descending_order(corpus: Path):
    index = load(corpus, settings=SMALL)
    [hits] = index.search(asked("capital of Norway", topk=5))
    assert index.encoder is not None
    vectors = index.encoder.encode_documents([row["contents"] for row in ROWS])
    [query] = index.encoder.encode_queries(["capital of Norway"])
    np.testing.assert_allclose([hit.score for hit in hits], sorted(vectors @ query, reverse=True), atol=1e-6)


def test_more_passages_than_there_are_gives_all_there_are_and_none_gives_none(corpus: Path):
    index = load(corpus, settings=SMALL)
    assert sorted(found(index, "capital", topk=100)) == list("01234")
    assert index.search(asked("capital", topk=0)) == [[]]
    assert index.search([]) == []


def test_each_query_of_a_batch_gets_as_many_as_it_asks_for(corpus: Path):
    index = load(corpus, settings=SMALL)
    hits = index.search([Query(text="capital", topk=1), Query(text="capital", topk=4), Query(text="capital", topk=0)])
    assert [len(some) for some in hits] == [1, 4, 0]


@pytest.mark.parametrize("nothing", ["?!", "", " \n\t"])
def test_a_query_without_a_word_finds_nothing_and_disturbs_no_other(corpus: Path, nothing: str):
    index = load(corpus, settings=SMALL)
    first, none, second = index.search(asked("Oslo", nothing, "Rome", topk=1))
    assert none == []
    assert (first[0].row, second[0].row) == (0, 1)


def test_rows_that_faiss_reports_as_missing_are_dropped():
    """FAISS fills up with id -1, which Python would take for the last document."""

    class Short(faiss.IndexFlatIP):
        def search(self, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
            scores, rows = super().search(vectors, k)
            rows[:, 1:] = -1
            return scores, rows

    index = Index.of([document(0, "a b"), document(1, "c d")], SMALL)
    assert index.encoder is not None
    short = Short(SMALL.dim)
    short.add(index.encoder.encode_documents(["a b", "c d"]))
    index = Index(documents=index.documents, manifest=index.manifest, encoder=index.encoder, dense=FaissSearcher(short, memory=Memory()))
    assert [hit.row for hit in index.search(asked("c", topk=2))[0]] == [1]


def test_a_vector_that_is_no_number_finds_nothing(corpus: Path):
    index = load(corpus, settings=SMALL)
    queries = asked("Oslo", "Rome", topk=1)
    vectors = index.encode(queries)
    vectors[0, 3] = np.nan
    assert [[hit.row for hit in hits] for hits in index.find(queries, vectors)] == [[], [1]]


def test_a_megabyte_as_a_query_is_cut_not_refused(corpus: Path):
    assert found(load(corpus, settings=SMALL), "Norway " + "x" * 1_000_000, topk=1) == ["0"]


def test_a_lone_surrogate_in_a_query_is_no_error(corpus: Path):
    assert found(load(corpus, settings=SMALL), "\ud800 Norway", topk=1) == ["0"]


def test_one_at_a_time_gives_the_same_answers_whatever_is_asked_beside(corpus: Path):
    index = load(corpus, settings=SMALL, serving=Serving(one_at_a_time=True))
    together = index.search(asked(*[f"capital of {land}" for land in ("Norway", "Italy", "France", "Germany", "Spain")]))
    assert together[3] == index.search(asked("capital of Germany"))[0]


def test_words_and_vectors_and_both_answer_one_batch(corpus: Path, tmp_path: Path):
    index = Index.open(build(corpus, tmp_path / "index", WITH_WORDS))
    assert index.modes == (Mode.DENSE, Mode.BM25, Mode.HYBRID)
    dense, words, both = index.search([Query(text="capital Oslo", topk=1, mode=mode) for mode in (None, Mode.BM25, Mode.HYBRID)])
    assert [hits[0].row for hits in (dense, words, both)] == [0, 0, 0]
    assert both == [Hit(row=0, score=2 / 61)], "first of both lists"
    assert index.search(asked("Oslo", topk=5, mode=Mode.BM25)) == [[Hit(row=0, score=pytest.approx(words[0].score, abs=2))]], "others lack the word"


def test_words_alone_need_no_encoder_and_are_the_default_of_such_an_index(corpus: Path, tmp_path: Path):
    index = Index.open(build(corpus, tmp_path / "index", BuildSpec(encoder=None, bm25=True)))
    assert index.modes == (Mode.BM25,)
    assert found(index, "Spain") == ["4"]
    assert found(index, "nowhere") == []


def test_a_mode_or_reranker_that_is_not_there_is_refused(corpus: Path, tmp_path: Path):
    index = load(corpus, settings=SMALL)
    with pytest.raises(ValueError, match="not searched by bm25: it has dense"):
        index.search(asked("Oslo", mode=Mode.BM25))
    with pytest.raises(ValueError, match="without a reranker"):
        index.search([Query(text="Oslo", topk=1, rerank=True)])
    with pytest.raises(IndexFault, match="cannot be searched by hybrid: it has dense"):
        Index.open(build(corpus, tmp_path / "index", SPEC), Serving(mode=Mode.HYBRID))


def test_the_first_mode_is_the_one_that_is_served(corpus: Path, tmp_path: Path):
    index = Index.open(build(corpus, tmp_path / "index", WITH_WORDS), Serving(mode=Mode.HYBRID))
    assert index.modes == (Mode.HYBRID, Mode.DENSE, Mode.BM25)
    assert index.search(asked("Oslo", topk=1)) == [[Hit(row=0, score=2 / 61)]]


@pytest.mark.parametrize(
    ("serving", "told"),
    [
        (Serving(parameters="nprobe=4"), "--parameters nprobe=4 is of a FAISS index, and here are words"),
        (Serving(model="/m"), "--model /m says where a model lies, and this index was made without one"),
        (Serving(mmap=False), "--no-mmap is of a FAISS index"),
        (Serving(devices=("cuda:0",)), "--device cuda:0 is of vectors and models"),
    ],
)
def test_an_option_that_words_alone_do_not_have_is_refused(corpus: Path, tmp_path: Path, serving: Serving, told: str):
    out = build(corpus, tmp_path / "index", BuildSpec(encoder=None, bm25=True))
    with pytest.raises(IndexFault, match=told):
        Index.open(out, serving)


def test_the_reranker_orders_what_was_found_and_its_scores_are_told(corpus: Path):
    class Longest:
        """Scores a document by its length."""

        def score_pairs(self, pairs: list[tuple[str, str]]) -> np.ndarray:
            return np.array([len(text) for _, text in pairs], np.float32)

    plain = load(corpus, settings=SMALL)
    index = Index(documents=plain.documents, manifest=plain.manifest, encoder=plain.encoder, dense=plain.dense, reranker=Longest())  # type: ignore[arg-type]
    ranked, unranked = index.search([Query(text="Oslo Norway", topk=2, rerank=True), Query(text="Oslo Norway", topk=2)])
    lengths = sorted((len(row["contents"]) for row in ROWS), reverse=True)
    assert [hit.score for hit in ranked] == lengths[:2]
    assert unranked == plain.search(asked("Oslo Norway", topk=2))[0]
    assert index.reranks
    assert not plain.reranks


def test_the_identity_changes_with_what_is_answered(corpus: Path, tmp_path: Path):
    out = build(corpus, tmp_path / "index", WITH_WORDS)
    same, other = Index.open(out), Index.open(out, Serving(mode=Mode.BM25))
    assert same.identity == Index.open(out).identity
    assert len({same.identity, other.identity, load(corpus, settings=SMALL).identity}) == 3


def test_a_built_index_opens_with_the_answers_of_one_in_memory(corpus: Path, tmp_path: Path):
    opened, inside = Index.open(build(corpus, tmp_path / "out" / "index", SPEC)), load(corpus, settings=SMALL)
    queries = asked("capital of Spain", "Oslo", topk=5)
    assert opened.search(queries) == inside.search(queries)
    assert list(opened.documents) == list(inside.documents)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["index"]


def test_a_cache_holds_an_index_per_content(corpus: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    load(corpus, settings=SMALL, cache=cache)
    load(corpus, settings=SMALL, cache=cache)
    assert len(list(cache.iterdir())) == 1
    load(corpus, settings=HashedSettings(dim=64), cache=cache)
    assert len(list(cache.iterdir())) == 2


def test_an_index_in_memory_is_a_plain_one(corpus: Path):
    with pytest.raises(ValueError, match=r"give .* a --cache"):
        load(corpus, spec=WITH_WORDS)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    with pytest.raises(CorpusError):
        build(bad, tmp_path / "out" / "index", SPEC)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quick_starts_queries_find_their_passage(seed: int):
    rng, used = random.Random(seed), set()
    kbs = [KnowledgeBase(rng, size, used) for size in (TRAIN_SIZE, HELDOUT_SIZE)]
    facts = [(kb, subject, relation, object_) for kb in kbs for (subject, relation), object_ in kb.facts.items()]
    texts = [f'"{subject}"\n{RELATIONS[relation].passage.format(subject=subject, object=object_)}' for _, subject, relation, object_ in facts]
    index = Index.of([document(i, text) for i, text in enumerate(texts)], HashedSettings())
    hits = index.search(asked(*[f"{subject} {RELATIONS[relation].keyword}" for _, subject, relation, _ in facts]))
    for kb in kbs:
        rows = [row for row, fact in enumerate(facts) if fact[0] is kb]
        assert np.mean([hits[row][0].row == row for row in rows]) >= 0.95
        assert np.mean([row in {hit.row for hit in hits[row]} for row in rows]) >= 0.99


def test_the_models_of_the_index_before_are_used_again_where_they_are_the_same(tmp_path: Path):
    record = {"kind": "transformer", "model": "m", "weights_sha256": "0"}

    class Loaded:
        def __init__(self) -> None:
            self.record = dict(record)

    models = Models(serving=Serving(), encoder=Loaded(), reranker=None)  # type: ignore[arg-type]
    manifest = replace(Index.of([document(0, "Oslo")], SMALL).manifest, encoder=record)
    assert _open_encoder(tmp_path, manifest, record, Serving(), models) is models.encoder
    for other in (record | {"weights_sha256": "1"}, record | {"kind": "none"}):
        with pytest.raises(EncoderFault):
            _open_encoder(tmp_path, manifest, other, Serving(), models)
