"""The index of whatever a server is pointed at: a directory, or a corpus file that is indexed on the spot."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from retriever.building.build import build, sha256_of
from retriever.building.spec import BuildSpec
from retriever.corpus import read_corpus
from retriever.encoders.hashed import HashedSettings
from retriever.index import Index, Models, Serving
from retriever.manifest import FORMAT
from retriever.query import Progress, silent

__all__ = ["load"]

NAME_CHARACTERS = 24  # of a hash


def load(
    path: Path,
    *,
    settings: HashedSettings | None = None,
    spec: BuildSpec | None = None,
    cache: Path | None = None,
    serving: Serving | None = None,
    progress: Progress = silent,
    models: Models | None = None,
) -> Index:
    """The index of a directory, or of a corpus file: built into a directory below `cache` named by content, or in memory without one.

    Args:
        settings: of the hashed encoder that a corpus is indexed by, where there is no `spec`.
        spec: what the index of a corpus is to be. Anything but the hashed encoder and "Flat" needs a cache.
        models: of an index opened before, which are used again where this one is of the same.

    Raises:
        CorpusError: a row of the corpus is wrong.
        IndexFault: the directory is no index that can be used.
        ValueError: the index cannot be made in memory.
    """
    if path.is_dir():
        return Index.open(path, serving, progress, models=models)
    spec = spec or BuildSpec(encoder=settings or HashedSettings())
    if cache is not None:
        identity = json.dumps({"format": FORMAT, "corpus": sha256_of(path), **spec.content()}, sort_keys=True)
        out = cache / hashlib.sha256(identity.encode()).hexdigest()[:NAME_CHARACTERS]
        return Index.open(
            out if out.is_dir() else build(path, out, spec, progress, wait=True), serving, progress, models=models
        )  # its name has the corpus's hash
    if not isinstance(spec.encoder, HashedSettings) or spec != BuildSpec(encoder=spec.encoder):
        raise ValueError(f"an index in memory has the hashed encoder and is Flat, without BM25: give {path} a --cache, or build it first")
    return Index.of(read_corpus(path), spec.encoder, progress, serving=serving)
