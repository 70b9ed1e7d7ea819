"""An index: documents, their vectors in a flat FAISS index, and the encoder that made them. In memory, or a directory:

    manifest.json      format, the corpus's sha256, count, encoder, versions, and the sha256 of the files below
    documents.jsonl    as they are served, one per line; line i is row i of the vectors
    vectors.faiss      IndexFlatIP
    idf.npy            the encoder's table

A directory is opened only if every file is the one that the manifest names, and if its vectors are what this encoder makes of its
documents. Row numbers are FAISS's ids; rows that FAISS reports as -1 (none left) are dropped.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from retriever.corpus import Document
from retriever.encoders.hashed import HashedEncoder, HashedSettings

__all__ = ["FORMAT", "MANIFEST", "Hit", "Index", "IndexFault", "Progress", "manifest_of", "tune_faiss"]

FORMAT = 1
MANIFEST, DOCUMENTS, VECTORS, IDF = "manifest.json", "documents.jsonl", "vectors.faiss", "idf.npy"
MAX_QUERY_CHARACTERS = 4096  # Search-R1 reads the first 256 tokens of a query
PROBES = 8
SAME_VECTOR = 0.999  # cosine

Progress = Callable[[str, int, int], None]  # what is done, how many of it are, of how many


class IndexFault(Exception):
    """A directory is not an index that can be used. The message says what is wrong and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """A document found: its row, and the inner product."""

    row: int
    score: float


class Index:
    """Documents that can be searched. Used by one thread at a time.

    Args:
        documents: as served (JSON), by row.
        vectors: the FAISS index, as many rows.
    """

    def __init__(self, documents: Sequence[bytes], vectors: Any, encoder: HashedEncoder) -> None:
        self.documents = documents
        self.vectors = vectors
        self.encoder = encoder

    def __len__(self) -> int:
        return len(self.documents)

    @classmethod
    def of(cls, documents: Sequence[Document], settings: HashedSettings, progress: Progress = lambda what, done, of: None) -> Index:
        """Index documents, in memory."""
        texts = [document.contents for document in documents]
        encoder = HashedEncoder.fit(settings, texts, lambda done: progress("counted", done, len(texts)))
        vectors = faiss.IndexFlatIP(settings.dim)
        vectors.add(encoder.encode(texts, lambda done: progress("encoded", done, len(texts))))
        return cls([document.json for document in documents], vectors, encoder)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """At most `topk` hits per query, best first. A query without a letter or digit has none."""
        encoded = self.encoder.encode([query[:MAX_QUERY_CHARACTERS] for query in queries])
        wanted = min(topk, len(self))
        if not len(queries) or wanted < 1:
            return [[] for _ in queries]
        scores, rows = self.vectors.search(encoded, wanted)
        says_something = np.any(encoded != 0, axis=1).tolist()
        return [
            [Hit(row=int(row), score=float(score)) for row, score in zip(rows[i], scores[i], strict=True) if row >= 0] if says_something[i] else []
            for i in range(len(queries))
        ]

    def save(self, directory: Path, corpus: Mapping[str, Any]) -> None:
        """Write the files into an existing directory, the manifest last. `corpus` says what was indexed, e.g. its sha256."""
        (directory / DOCUMENTS).write_bytes(b"".join(document + b"\n" for document in self.documents))
        faiss.write_index(self.vectors, str(directory / VECTORS))
        np.save(directory / IDF, self.encoder.table, allow_pickle=False)
        manifest = manifest_of(corpus, self.encoder.settings) | {
            "count": len(self),
            "files": {name: _sha256(directory / name) for name in (DOCUMENTS, VECTORS, IDF)},
            "versions": {"faiss": faiss.__version__, "numpy": np.__version__, "python": platform.python_version()},
        }
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def open(cls, directory: Path) -> Index:
        """The index of a directory.

        Raises:
            IndexFault: it is none, was altered, or was made by an encoder that works differently.
        """
        manifest = _read_manifest(directory)
        for name, expected in manifest["files"].items():
            if not (directory / name).is_file() or _sha256(directory / name) != expected:
                raise IndexFault(f"{directory / name} is missing or not the file that was built (sha256 differs from the manifest's): build again")
        table = np.load(directory / IDF, allow_pickle=False)
        encoder = HashedEncoder(HashedSettings(**manifest["encoder"]), passages=manifest["count"], table=table)
        index = cls((directory / DOCUMENTS).read_bytes().splitlines(), faiss.read_index(str(directory / VECTORS)), encoder)
        index._check(directory, manifest["count"])
        return index

    def _check(self, directory: Path, count: int) -> None:
        sizes = {"documents": len(self), "vectors": self.vectors.ntotal, "the manifest's count": count}
        if len(set(sizes.values())) != 1 or self.vectors.d != self.encoder.settings.dim:
            raise IndexFault(f"{directory} does not fit together: {sizes}, dimensions {self.vectors.d} and {self.encoder.settings.dim}: build again")
        rows = np.linspace(0, count - 1, num=min(PROBES, count), dtype=np.int64)
        texts = [json.loads(self.documents[row])["contents"] for row in rows]
        stored = np.stack([self.vectors.reconstruct(int(row)) for row in rows])
        fresh = self.encoder.encode(texts)
        if np.any((fresh * stored).sum(axis=1)[np.any(fresh != 0, axis=1)] < SAME_VECTOR):
            raise IndexFault(f"{directory}: the vectors are not those that this version's encoder makes of the documents: build again")


def manifest_of(corpus: Mapping[str, Any], settings: HashedSettings) -> dict[str, Any]:
    """What decides whether an index can be used for a corpus: equal values, same index."""
    return {"format": FORMAT, "corpus": dict(corpus), "encoder": asdict(settings)}


def tune_faiss(dim: int, *, one_at_a_time: bool = False) -> None:
    """Set FAISS, for the whole process, to one thread, and to search 4 or more queries by one matrix product.

    FAISS does that only from 128,000 / dim queries on, and otherwise scans once per query: at a batch of 64, a sixth of the speed. Below 4
    the scans win. With `one_at_a_time` there is no matrix product at all, so a query's scores are, to the last bit, its own.
    """
    faiss.omp_set_num_threads(1)
    faiss.cvar.distance_compute_blas_threshold = np.iinfo(np.int32).max if one_at_a_time else 4 * dim


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise IndexFault(f"{directory} is no index: {error}") from error
    except ValueError as error:
        raise IndexFault(f"{path} is not JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise IndexFault(f"{path} has format {found!r}, this version reads {FORMAT}: build again")
    if set(manifest.get("files", ())) != {DOCUMENTS, VECTORS, IDF} or not {"count", "encoder", "corpus"} <= manifest.keys():
        raise IndexFault(f"{path} is incomplete: build again")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
