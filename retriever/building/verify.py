"""Read all of an index: every byte against its hash, every line against its offset and id, and vectors against the encoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from retriever.documents import DocumentsFault, DocumentStore
from retriever.index import Index, Serving, probe
from retriever.manifest import IndexFault, Manifest
from retriever.query import Progress, silent

__all__ = ["verify"]

EMBEDDED = 64  # documents that are embedded again: a second or two on a CPU
TOLD_EVERY = 8192  # documents


def verify(directory: Path, serving: Serving | None = None, progress: Progress = silent) -> list[str]:
    """What was checked, one line each. All files are read to the end; documents and vectors where the files are those that were built.

    Raises:
        IndexFault: something is not as it was built. The message has a line for each file that is not.
    """
    manifest = Manifest.read(directory)
    if faults := list(manifest.faults(directory, wholly=True, progress=progress)):
        raise IndexFault("\n".join(faults))
    told = [f"{len(manifest.files)} files have the bytes that the manifest says"]
    index = Index.open(directory, serving, progress)
    try:
        told += _documents(index.documents, progress)
        told += _vectors(index)
    except DocumentsFault as error:
        raise IndexFault(f"{directory}: {error}") from error
    finally:
        index.close()
    return told


def _documents(documents: DocumentStore, progress: Progress) -> Iterator[str]:
    for row in range(len(documents)):
        try:
            document = json.loads(documents[row])
            id, contents = str(document["id"]), document["contents"]
        except (ValueError, KeyError, TypeError) as error:
            raise IndexFault(f"document {row} is no line of JSON with id and contents: build again") from error
        if not isinstance(contents, str):
            raise IndexFault(f"document {row} has contents that are no text: build again")
        if documents.row_of(id) != row:
            raise IndexFault(f"document {row} is not found by its id {id!r} (that gives row {documents.row_of(id)}): build again")
        if row % TOLD_EVERY == 0 or row + 1 == len(documents):
            progress("documents read", row + 1, len(documents))
    yield f"{len(documents):,} documents begin where they should, and are found by their ids"


def _vectors(index: Index) -> Iterator[str]:
    if index.dense is None or index.encoder is None or index.manifest.dense is None:
        return
    rows = np.unique(np.linspace(0, len(index) - 1, num=min(EMBEDDED, len(index)), dtype=np.int64)).tolist()
    cosines = probe(index.documents, index.encoder, index.dense, rows)
    least = index.same_vector
    wrong = [row for row, cosine in zip(rows, cosines, strict=True) if cosine < least]
    if wrong:
        raise IndexFault(
            f"the vector of document {wrong[0]} is not what the encoder makes of it, nor those of {len(wrong) - 1} of {len(rows)} others"
        )
    yield f"{len(rows)} of {index.dense.count:,} vectors are what the encoder makes of their documents (cosine at least {cosines.min():.4f})"
