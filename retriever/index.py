"""An index: documents, and what finds them: vectors with the encoder that made them, words (BM25), or both. In memory, or a directory.

    index = Index.open(Path("wiki-18"))
    vectors = index.encode(queries)         # the encoder's part: a matrix product per layer
    hits = index.find(queries, vectors)     # the searchers' part, and the reranker's

A directory is opened only if every file is the one that its manifest names, and if its vectors are what this encoder makes of its
documents. Rows that a searcher reports as -1 (none left) are dropped, and so is every score that is no number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retriever.corpus import Document
from retriever.documents import DocumentsFault, DocumentStore
from retriever.encoders.encoder import Encoder, EncoderFault
from retriever.encoders.hashed import HashedEncoder, HashedSettings
from retriever.encoders.opening import open_encoder
from retriever.encoders.settings import Runtime
from retriever.footprint import footprint_of
from retriever.manifest import BLOCKS, BM25, IDF, IDS, OFFSETS, DenseRecord, DocumentsRecord, IndexFault, Manifest, SourceRecord
from retriever.query import MAX_QUERY_CHARACTERS, Hit, Mode, Progress, Query, Rows, Vectors, silent
from retriever.searchers.fusion import reciprocal_rank_fusion
from retriever.searchers.searcher import Memory, Searcher, SearcherError

if TYPE_CHECKING:
    from retriever.encoders.cross_encoder import CrossEncoder
    from retriever.searchers.bm25 import Bm25Searcher

__all__ = ["Index", "Models", "Serving", "manifest_for", "modes_of", "open_dense", "probe", "probe_rows"]

HYBRID_DEPTH = 100  # of both lists that are fused: a document that both have at rank 100 adds 1 / 80, less than any that one has at rank 1
RERANK_DEPTH = 50
PROBES = 8  # documents that are embedded again when an index is opened
SAME_VECTOR = 0.99  # cosine; between fp32 and bf16 encoders .999, with a wrong prefix or pooling .97 and less
SAME_VECTOR_INT8 = 0.90  # an int8 encoder's vectors are at .93 and more of the fp32 one's
FIDELITY_SLACK = 0.01  # for what the precision of the encoder changes


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """How an index is served: nothing of it is stored in the directory.

    `model` is where the model that made the vectors lies, if that is elsewhere than the manifest says.
    `devices` hold row blocks or a FAISS index; `parameters` are FAISS's (`efSearch=512`, `nprobe=64`); with `one_at_a_time` no query is
    computed together with another, so that its scores are, to the last bit, its own.
    """

    runtime: Runtime = field(default_factory=Runtime)
    model: str | None = None
    devices: tuple[str, ...] = ("cpu",)
    mmap: bool = True
    one_at_a_time: bool = False
    parameters: str | None = None
    reranker: str | None = None
    rerank_depth: int = RERANK_DEPTH
    mode: Mode | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Models:
    """What an index has loaded. The next one takes what it needs of it: models in memory twice are never quite given back."""

    serving: Serving
    encoder: Encoder | None
    reranker: CrossEncoder | None


class Index:
    """Documents that can be searched. `encode` and `find` may run in two threads, each used by one at a time."""

    def __init__(
        self,
        *,
        documents: DocumentStore,
        manifest: Manifest,
        encoder: Encoder | None = None,
        dense: Searcher | None = None,
        bm25: Bm25Searcher | None = None,
        reranker: CrossEncoder | None = None,
        serving: Serving | None = None,
    ) -> None:
        self.documents = documents
        self.manifest = manifest
        self.encoder = encoder
        self.dense = dense
        self.bm25 = bm25
        self.reranker = reranker
        self.serving = serving or Serving()
        self.modes = modes_of(dense is not None, bm25 is not None, self.serving.mode)

    def __len__(self) -> int:
        return len(self.documents)

    @classmethod
    def of(
        cls,
        documents: Sequence[Document],
        settings: HashedSettings | None = None,
        progress: Progress = silent,
        *,
        serving: Serving | None = None,
    ) -> Index:
        """Index documents by the hashed encoder, in memory, for an exact search."""
        from retriever.searchers.faiss_index import FaissSearcher

        serving = serving or Serving()
        texts = [document.contents for document in documents]
        encoder = HashedEncoder.fit(settings or HashedSettings(), texts, lambda done: progress("counted", done, len(texts)))
        vectors = encoder.encode_documents(texts, lambda done: progress("encoded", done, len(texts)))
        dense = FaissSearcher.of(vectors, one_at_a_time=serving.one_at_a_time)
        return cls(
            documents=DocumentStore.of(documents), manifest=_manifest_in_memory(documents, encoder), encoder=encoder, dense=dense, serving=serving
        )

    @classmethod
    def open(cls, directory: Path, serving: Serving | None = None, progress: Progress = silent, *, models: Models | None = None) -> Index:
        """The index of a directory.

        Args:
            progress: told first, as work of no size, what it takes.
            models: of an index opened before, which are used again where this one is of the same.

        Raises:
            IndexFault: it is none, was altered, was made by an encoder that works differently, or cannot be served in this way.
        """
        serving = serving or Serving()
        manifest = manifest_for(directory, serving)
        footprint = footprint_of(manifest, devices=serving.devices, mmap=serving.mmap, runtime=serving.runtime.resolved)
        progress(f"{directory} {footprint.render()}", 0, 0)
        footprint.check(directory)
        manifest.check_files(directory)
        try:
            index = _opened(directory, manifest, serving, progress, models)
            index._check(directory)
        except (DocumentsFault, SearcherError, EncoderFault) as error:
            raise IndexFault(f"{directory}: {error}") from error
        return index

    @property
    def reranks(self) -> bool:
        """Whether queries may ask for it."""
        return self.reranker is not None

    @property
    def models(self) -> Models:
        """For the next index."""
        return Models(serving=self.serving, encoder=self.encoder, reranker=self.reranker)

    @property
    def same_vector(self) -> float:
        """The least cosine at which a stored vector is the encoder's own. Below .99 where the index keeps less than the vectors, or for int8."""
        fidelity = self.manifest.dense.fidelity if self.manifest.dense is not None else 1.0
        return min(SAME_VECTOR if self.serving.runtime.precision != "int8" else SAME_VECTOR_INT8, fidelity - FIDELITY_SLACK)

    @property
    def identity(self) -> str:
        """Changes when answers may: the manifest, and how it is served."""
        return hashlib.sha256(json.dumps([self.manifest.identity, _plain(self.serving)]).encode()).hexdigest()

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        """At most `topk` hits per query, best first. A query that says nothing has none."""
        return self.find(queries, self.encode(queries))

    def encode(self, queries: Sequence[Query]) -> Vectors:
        """[len(queries), dim]: zero where a query says nothing, or asks for words only."""
        if self.encoder is None:
            return np.zeros((len(queries), 0), np.float32)
        vectors = np.zeros((len(queries), self.encoder.dim), np.float32)
        texts = {i: text for i, query in enumerate(queries) if self._mode(query) != Mode.BM25 and (text := _text(query))}
        if texts and self.serving.one_at_a_time:
            for i, text in texts.items():
                vectors[i] = self.encoder.encode_queries([text])[0]
        elif texts:
            vectors[list(texts)] = self.encoder.encode_queries(list(texts.values()))
        return vectors

    def find(self, queries: Sequence[Query], vectors_QD: Vectors) -> list[list[Hit]]:
        """The hits of queries that `encode` made vectors of: one matrix product for all of them.

        Raises:
            ValueError: a query asks for a mode, or for reranking, that this index has not.
        """
        asked = [self._mode(query) for query in queries]
        if any(query.rerank for query in queries) and self.reranker is None:
            raise ValueError("this index is served without a reranker")
        by_vector = [i for i, mode in enumerate(asked) if mode != Mode.BM25 and np.any(vectors_QD[i]) and np.all(np.isfinite(vectors_QD[i]))]
        by_words = [i for i, mode in enumerate(asked) if mode != Mode.DENSE and _text(queries[i])]
        dense = self._dense_hits(by_vector, [self._depth(query) for query in queries], vectors_QD)
        words = self._bm25_hits(by_words, [self._depth(query) for query in queries], queries)
        found = [_merged(mode, dense.get(i, []), words.get(i, [])) for i, mode in enumerate(asked)]
        found = self._reranked(queries, found)
        return [hits[: max(query.topk, 0)] for query, hits in zip(queries, found, strict=True)]

    def memory(self) -> Memory:
        """Bytes of the searchers. Documents are mapped besides, and read as they are asked for."""
        return sum((part.memory() for part in (self.dense, self.bm25) if part is not None), Memory())

    def info(self) -> Mapping[str, Any]:
        """What it is and how it is served."""
        return {
            "documents": len(self),
            "modes": [str(mode) for mode in self.modes],
            "identity": self.identity,
            "encoder": None if self.encoder is None else {**self.encoder.record, **self.encoder.info()},
            "dense": None if self.dense is None else dict(self.dense.info()),
            "bm25": None if self.bm25 is None else dict(self.manifest.bm25 or {}),
            "reranker": self.serving.reranker,
            "serving": _plain(self.serving),
            "memory": asdict(self.memory()),
            "source": asdict(self.manifest.documents.source),
            "versions": dict(self.manifest.versions),
        }

    def close(self) -> None:
        """Give the files back. Nothing may be asked afterwards."""
        self.documents.close()

    def _check(self, directory: Path) -> None:
        """Do the parts fit together, and are the vectors what the encoder makes of the documents?

        Raises:
            IndexFault: they do not, or are not.
        """
        sizes = {"the manifest's count": self.manifest.count, "documents": len(self)}
        sizes |= {"vectors": self.dense.count} if self.dense is not None else {}
        if len(set(sizes.values())) != 1:
            raise IndexFault(f"{directory} does not fit together: {sizes}. Build again")
        if self.dense is not None and self.encoder is not None and self.manifest.dense is not None:
            if self.dense.dim != self.encoder.dim:
                raise IndexFault(f"{directory} does not fit together: vectors of {self.dense.dim}, an encoder of {self.encoder.dim}. Build again")
            cosines, least = probe(self.documents, self.encoder, self.dense, probe_rows(len(self))), self.same_vector
            if cosines.min() < least:
                raise IndexFault(
                    f"{directory}: the vectors are not those that this encoder makes of the documents "
                    f"(cosine {cosines.min():.4f}, expected at least {least:.4f}): build again"
                )

    def _mode(self, query: Query) -> Mode:
        mode = query.mode or self.modes[0]
        if mode not in self.modes:
            raise ValueError(f"this index is not searched by {mode}: it has {', '.join(self.modes)}")
        return mode

    def _depth(self, query: Query) -> int:
        wanted = self._candidates(query)
        return min(len(self), max(wanted, HYBRID_DEPTH) if wanted and self._mode(query) == Mode.HYBRID else wanted)

    def _candidates(self, query: Query) -> int:
        """How many are found before the reranker orders them."""
        return max(query.topk, self.serving.rerank_depth) if query.rerank and query.topk > 0 else query.topk

    def _dense_hits(self, which: Sequence[int], depths: Sequence[int], vectors_QD: Vectors) -> dict[int, list[Hit]]:
        found: dict[int, list[Hit]] = {}
        for some in self._together(which, depths):
            assert self.dense is not None
            found |= dict(zip(some, _hits(*self.dense.search(vectors_QD[some], max(depths[i] for i in some))), strict=True))
        return found

    def _bm25_hits(self, which: Sequence[int], depths: Sequence[int], queries: Sequence[Query]) -> dict[int, list[Hit]]:
        found: dict[int, list[Hit]] = {}
        for some in self._together(which, depths):
            assert self.bm25 is not None
            found |= dict(zip(some, _hits(*self.bm25.search([_text(queries[i]) for i in some], max(depths[i] for i in some))), strict=True))
        return found

    def _together(self, which: Sequence[int], depths: Sequence[int]) -> list[list[int]]:
        """Queries that are searched together, in one product: all of them, or each alone."""
        which = [i for i in which if depths[i] > 0]
        if self.serving.one_at_a_time:
            return [[i] for i in which]
        return [which] if which else []

    def _reranked(self, queries: Sequence[Query], found: list[list[Hit]]) -> list[list[Hit]]:
        which = [i for i, query in enumerate(queries) if query.rerank and found[i]]
        if not which or self.reranker is None:
            return found
        found = list(found)
        for i in which:
            found[i] = found[i][: self._candidates(queries[i])]
        pairs = [(_text(queries[i]), self.documents.contents(hit.row)) for i in which for hit in found[i]]
        scores = iter(self._scores(pairs, [len(found[i]) for i in which]))
        for i in which:
            rescored = [Hit(row=hit.row, score=next(scores)) for hit in found[i]]
            found[i] = sorted(rescored, key=lambda hit: -hit.score)
        return found

    def _scores(self, pairs: Sequence[tuple[str, str]], lengths: Sequence[int]) -> list[float]:
        """Of the reranker: of all pairs at once, or of a query's at a time."""
        assert self.reranker is not None
        if not self.serving.one_at_a_time:
            return self.reranker.score_pairs(pairs).tolist()  # type: ignore[no-any-return]
        ends = np.cumsum(lengths).tolist()
        return [score for end, length in zip(ends, lengths, strict=True) for score in self.reranker.score_pairs(pairs[end - length : end]).tolist()]


def manifest_for(directory: Path, serving: Serving) -> Manifest:
    """The manifest of a directory that may be served in this way.

    Raises:
        IndexFault: it is no index, has not this mode, or an option would have no effect.
    """
    manifest = Manifest.read(directory)
    modes_of(manifest.dense is not None, manifest.bm25 is not None, serving.mode)
    _refuse_what_has_no_effect(manifest, serving)
    return manifest


def _refuse_what_has_no_effect(manifest: Manifest, serving: Serving) -> None:
    dense = manifest.dense
    if serving.model is not None and (manifest.encoder is None or manifest.table):
        raise IndexFault(f"--model {serving.model} says where a model lies, and this index was made without one: leave it out")
    if dense is None or dense.backend == BLOCKS:
        there = "words" if dense is None else "blocks, which are mapped and searched exactly"
        for option, given in ((f"--parameters {serving.parameters}", serving.parameters is not None), ("--no-mmap", not serving.mmap)):
            if given:
                raise IndexFault(f"{option} is of a FAISS index, and here are {there}: there is nothing to set. Leave it out")
    if dense is None and serving.devices != ("cpu",) and serving.reranker is None:
        raise IndexFault(f"--device {','.join(serving.devices)} is of vectors and models, and here are words: leave it out")


def _opened(directory: Path, manifest: Manifest, serving: Serving, progress: Progress, models: Models | None) -> Index:
    models = models if models is not None and models.serving.runtime == serving.runtime else None
    ids = directory / IDS if manifest.documents.ids == "hashed" else None
    documents = DocumentStore.open(directory / manifest.documents.file, directory / OFFSETS, ids)
    return Index(
        documents=documents,
        manifest=manifest,
        encoder=None if manifest.encoder is None else _open_encoder(directory, manifest, manifest.encoder, serving, models),
        dense=None if manifest.dense is None else open_dense(directory, manifest.dense, serving, progress),
        bm25=None if manifest.bm25 is None else _open_bm25(directory, manifest.bm25),
        reranker=None if serving.reranker is None else _open_reranker(serving, models),
        serving=serving,
    )


def _open_encoder(directory: Path, manifest: Manifest, record: Mapping[str, Any], serving: Serving, models: Models | None) -> Encoder:
    if manifest.table:
        return open_encoder(record, serving.runtime, table=directory / IDF)
    if serving.model is not None:
        record = {**record, "model": serving.model}
    if models is not None and models.encoder is not None and models.encoder.record == record:
        return models.encoder
    if serving.model is not None:
        return open_encoder(record, serving.runtime, table=None)
    model = Path(str(record.get("model")))
    if model.is_absolute() and not model.is_dir():
        raise EncoderFault(
            f"the model that made its vectors is not at {model} any more: say where it lies by --model DIR (retriever.model in a recipe)"
        )
    return open_encoder(record, serving.runtime, table=None)


def open_dense(directory: Path, record: DenseRecord, serving: Serving, progress: Progress = silent) -> Searcher:
    """What searches the vectors of a directory.

    Raises:
        SearcherError: a file is not what it should be, or an option does not fit it.
    """
    from retriever.searchers.shards import VectorShards

    if record.backend == BLOCKS:
        from retriever.searchers.blocks import BlockSearcher

        shards = VectorShards.open([directory / name for name in record.files])
        return BlockSearcher.open(
            shards,
            dtype=record.block_type,
            devices=serving.devices,
            threads=serving.runtime.threads,
            largest_norm=record.largest_norm,
            progress=progress,
        )
    from retriever.searchers.faiss_index import FaissSearcher

    return FaissSearcher.open(
        directory / record.files[0],
        mmap=serving.mmap,
        one_at_a_time=serving.one_at_a_time,
        threads=serving.runtime.threads,
        parameters=serving.parameters,
        device=",".join(serving.devices),
        rescore=VectorShards.open([directory / name for name in record.rescore.files]) if record.rescore else None,
        rescore_depth=record.rescore.depth if record.rescore else 1,
    )


def probe_rows(count: int) -> list[int]:
    """The documents that are embedded again: the first, the last, and some between."""
    return np.unique(np.linspace(0, count - 1, num=min(PROBES, count), dtype=np.int64)).tolist()  # type: ignore[no-any-return]


def probe(documents: DocumentStore, encoder: Encoder, dense: Searcher, rows: Sequence[int]) -> npt.NDArray[np.float64]:
    """Cosines [len(rows)] of stored vectors to what the encoder makes of their documents; 1 where a document says nothing."""
    fresh = encoder.encode_documents([documents.contents(row) for row in rows]).astype(np.float64)
    stored = dense.stored(rows).astype(np.float64)
    norms = np.linalg.norm(fresh, axis=1) * np.linalg.norm(stored, axis=1)
    says_something = np.any(fresh != 0, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = np.where(norms > 0, (fresh * stored).sum(axis=1) / norms, 0.0)
    return np.where(says_something, cosines, 1.0)


def _open_bm25(directory: Path, record: Mapping[str, Any]) -> Bm25Searcher:
    from retriever.searchers.bm25 import Bm25Searcher

    return Bm25Searcher.open(directory / BM25, record)


def _open_reranker(serving: Serving, models: Models | None) -> CrossEncoder:
    from retriever.encoders.cross_encoder import CrossEncoder

    assert serving.reranker is not None
    if models is not None and models.reranker is not None and models.reranker.is_of(serving.reranker):
        return models.reranker
    return CrossEncoder.open(serving.reranker, serving.runtime)


def modes_of(dense: bool, bm25: bool, first: Mode | None) -> tuple[Mode, ...]:
    """How an index of vectors, words or both is searched, `first` by default.

    Raises:
        IndexFault: it is not searched by `first`.
    """
    modes = [Mode.DENSE] * dense + [Mode.BM25] * bm25 + [Mode.HYBRID] * (dense and bm25)
    if first is not None and first not in modes:
        raise IndexFault(f"the index cannot be searched by {first}: it has {', '.join(modes)}. Build it with --bm25, or ask for another mode")
    return (first, *(mode for mode in modes if mode != first)) if first else tuple(modes)


def _text(query: Query) -> str:
    """What is looked for: empty where a query says nothing. A lone surrogate, which is no text, becomes a question mark."""
    return query.text[:MAX_QUERY_CHARACTERS].encode("utf-8", "replace").decode().strip()


def _hits(scores_QK: Vectors, rows_QK: Rows) -> list[list[Hit]]:
    """Without the rows that are none, and the scores that are no numbers."""
    there = (rows_QK >= 0) & np.isfinite(scores_QK)
    return [
        [Hit(row=row, score=score) for row, score, good in zip(rows.tolist(), scores.tolist(), keep.tolist(), strict=True) if good]
        for scores, rows, keep in zip(scores_QK, rows_QK, there, strict=True)
    ]


def _merged(mode: Mode, dense: list[Hit], words: list[Hit]) -> list[Hit]:
    if mode == Mode.HYBRID:
        return reciprocal_rank_fusion([[hit.row for hit in dense], [hit.row for hit in words]])
    return dense if mode == Mode.DENSE else words


def _manifest_in_memory(documents: Sequence[Document], encoder: HashedEncoder) -> Manifest:
    digest, size = hashlib.sha256(), 0
    for document in documents:
        digest.update(document.json + b"\n")
        size += len(document.json) + 1
    source = SourceRecord(name="memory", bytes=size, sha256=digest.hexdigest())
    return Manifest(
        count=len(documents),
        documents=DocumentsRecord(file="", ids="hashed", source=source),
        encoder=encoder.record,
        dense=DenseRecord(backend="faiss", dim=encoder.dim, files=(), factory="Flat"),
        bm25=None,
    )


def _plain(serving: Serving) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(serving), default=str))  # type: ignore[no-any-return]
