"""Build an index from a corpus file: `build(corpus, out)`, or `load(path)` for whatever a server is pointed at."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from retriever.corpus import read_corpus
from retriever.encoders.hashed import HashedSettings
from retriever.index import MANIFEST, Index, IndexFault, Progress, manifest_of

__all__ = ["build", "load"]


def build(corpus: Path, out: Path, *, settings: HashedSettings | None = None, progress: Progress = lambda what, done, of: None) -> Index:
    """Index `corpus` into the directory `out`, which appears only when it is complete. If it is there already, it is opened.

    Raises:
        CorpusError: a row of the corpus is wrong.
        IndexFault: `out` exists and is something else than this corpus's index with these settings.
    """
    settings = settings or HashedSettings()
    origin = _origin(corpus)
    if out.exists():
        return _reopen(out, origin, settings)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        index = Index.of(read_corpus(corpus), settings, progress)
        index.save(partial, origin)
        _sync(partial)
        try:
            partial.rename(out)
        except OSError:
            if not out.exists():
                raise
            return _reopen(out, origin, settings)  # somebody else built it meanwhile
        return index
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(path: Path, *, settings: HashedSettings | None = None, cache: Path | None = None, progress: Progress = lambda what, done, of: None) -> Index:
    """The index of a directory, or of a corpus file: built into a directory below `cache` named by content, or in memory without one.

    Raises:
        CorpusError: a row of the corpus is wrong.
        IndexFault: the directory is no index that can be used.
    """
    if path.is_dir():
        return Index.open(path)
    settings = settings or HashedSettings()
    if cache is None:
        return Index.of(read_corpus(path), settings, progress)
    identity = json.dumps(manifest_of(_origin(path), settings), sort_keys=True)
    return build(path, cache / hashlib.sha256(identity.encode()).hexdigest()[:24], settings=settings, progress=progress)


def _origin(corpus: Path) -> dict[str, Any]:
    with corpus.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _reopen(out: Path, origin: dict[str, Any], settings: HashedSettings) -> Index:
    index = Index.open(out)
    found = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    wanted = manifest_of(origin, settings)
    different = [key for key in wanted if found.get(key) != wanted[key]]
    if different:
        raise IndexFault(f"{out} is an index of another {' and '.join(different)}: remove it, or build into another directory")
    return index


def _sync(directory: Path) -> None:
    """Bring the directory's files to the disk: the rename that follows must not overtake them."""
    for path in (*directory.iterdir(), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
