"""From documents and row shards to an index: the FAISS file or the blocks, the words, and the manifest that names them.

Row shards stay where they were embedded until the manifest is written, and are moved after it (`settle`): whenever a build is killed, the next
one finds either all shards, or a manifest with nothing left to compute.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from retriever.building.contents import Contents, open_documents
from retriever.building.shards import ShardRecord
from retriever.building.spec import BuildSpec
from retriever.building.workers import runtime_on
from retriever.corpus import CorpusRecord
from retriever.encoders.files import ModelFiles
from retriever.encoders.opening import open_encoder
from retriever.encoders.settings import TransformerSettings
from retriever.index import Serving, open_dense, probe, probe_rows
from retriever.manifest import (
    BLOCKS,
    BM25,
    BUILD,
    DOCUMENTS,
    IDF,
    IDS,
    OFFSETS,
    VECTORS,
    DenseRecord,
    DocumentsRecord,
    FileRecord,
    IndexFault,
    Manifest,
    RescoreRecord,
    SourceRecord,
    record_of,
)
from retriever.query import Progress, silent
from retriever.searchers.searcher import SearcherError
from retriever.searchers.shards import VectorShards

__all__ = ["assemble", "documents_record", "fidelity_of", "file_records", "settle", "versions"]

OF_BLOCKS, OF_RESCORE = "vectors", "rescore"  # directories of row shards
PACKAGES = ("faiss-cpu", "faiss-gpu", "numpy", "onnxruntime", "torch", "transformers", "tokenizers")
AFTER_BUILD = 0.3  # cosine: codes of one bit decode to .57 of what they stand for; less, and the index does not hold what was embedded


def assemble(
    directory: Path,
    corpus: CorpusRecord,
    spec: BuildSpec,
    encoder: Mapping[str, Any] | None,
    shards: Sequence[tuple[Path, ShardRecord]],
    progress: Progress,
    *,
    content: Mapping[str, Any],
    adopted: DenseRecord | None = None,
) -> Manifest:
    """Make what searches, and write the manifest.

    Args:
        encoder: its record, as the shards were embedded by it; None where there are none.
        shards: files of row shards with their records, in order, below `directory`.
        content: what was asked for.
        adopted: vectors that are there already, instead of shards.

    Raises:
        IndexFault: FAISS cannot make the index.
    """
    dense, kept = None, {}
    if encoder is not None:
        dense = adopted or _dense(directory, spec, encoder, shards, progress)
        kept = {} if adopted else _kept(spec, shards)
        dense = replace(dense, fidelity=fidelity_of(directory, _unsettled(dense, shards), corpus, encoder, spec))
    words = _words(directory, corpus, progress) if spec.bm25 else None
    names = [OFFSETS] + [IDS] * (corpus.ids == "hashed") + [IDF] * (directory / IDF).is_file()
    names += list(dense.files) if dense is not None and dense.backend != BLOCKS else []
    names += sorted(str(path.relative_to(directory)) for path in (directory / BM25).rglob("*") if path.is_file())
    documents = documents_record(directory, corpus)
    files = file_records(directory, [documents.file, *names], progress) | kept
    if files[documents.file].sha256 != corpus.sha256:
        raise IndexFault(f"{directory / documents.file} was written to while the index was made of it: remove {directory}, and begin anew")
    manifest = Manifest(
        count=corpus.count,
        documents=documents,
        encoder=encoder,
        dense=dense,
        bm25=words,
        spec=content,
        encoder_bytes=_weights(spec),
        files=files,
        versions=versions(),
    )
    manifest.write(directory)
    return manifest


def settle(directory: Path) -> None:
    """Move the row shards that the manifest names to where it says they are."""
    manifest = Manifest.read(directory)
    for name in _shard_names(manifest.dense):
        path, found = directory / name, directory / BUILD / Path(name).name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            found.rename(path)


def documents_record(directory: Path, corpus: CorpusRecord) -> DocumentsRecord:
    """Where the documents are, as a manifest says it."""
    source = SourceRecord(name=corpus.source.name, bytes=corpus.source.bytes, sha256=corpus.source.sha256)
    inside = corpus.documents.parent == directory.absolute() or corpus.documents == directory / DOCUMENTS
    return DocumentsRecord(file=DOCUMENTS if inside else str(corpus.documents.absolute()), ids=corpus.ids, source=source)


def fidelity_of(directory: Path, dense: DenseRecord, corpus: CorpusRecord, encoder: Mapping[str, Any], spec: BuildSpec) -> float:
    """The least cosine of some stored vectors to the encoder's own.

    Raises:
        IndexFault: the index does not hold what the encoder makes of the documents.
    """
    runtime = runtime_on(spec.runtime, spec.devices[0])
    embedder = open_encoder(encoder, runtime, table=directory / IDF if (directory / IDF).is_file() else None)
    with open_documents(directory, corpus.documents) as documents:
        cosines = probe(documents, embedder, open_dense(directory, dense, Serving()), probe_rows(corpus.count))
    least = float(cosines.min())
    if least < AFTER_BUILD:
        raise IndexFault(f"{dense.factory or BLOCKS}: a stored vector has a cosine of {least:.2f} to what was embedded: use a finer type of index")
    return round(least, 6)


def file_records(directory: Path, names: Sequence[str], progress: Progress = silent) -> dict[str, FileRecord]:
    """Sizes and hashes of files."""
    records: dict[str, FileRecord] = {}
    total, before = sum((directory / name).stat().st_size for name in names), 0
    for name in names:

        def tell(what: str, done: int, of: int, before: int = before) -> None:
            progress(what, before + done, total)

        records[name] = record_of(directory / name, tell)
        before += records[name].bytes
    return records


def versions() -> dict[str, str]:
    """Of what the vectors depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _dense(
    directory: Path, spec: BuildSpec, encoder: Mapping[str, Any], shards: Sequence[tuple[Path, ShardRecord]], progress: Progress
) -> DenseRecord:
    if spec.index == BLOCKS:
        norms = [record.largest_norm for _, record in shards if record.largest_norm is not None]
        longest = max(norms) if len(norms) == len(shards) else None
        return DenseRecord(backend=BLOCKS, dim=encoder["dim"], dtype=spec.shard_dtype, files=list(_kept(spec, shards)), largest_norm=longest)
    from retriever.searchers.faiss_index import build_faiss

    if not (directory / VECTORS).exists():
        try:
            vectors = VectorShards.open([path for path, _ in shards])
            build_faiss(vectors, spec.index, directory / VECTORS, threads=spec.threads or spec.runtime.threads, progress=progress)
        except SearcherError as error:
            raise IndexFault(f"--index {spec.index}: {error}") from error
    rescore = RescoreRecord(dtype=spec.shard_dtype, files=list(_kept(spec, shards)), depth=spec.rescore_depth) if spec.rescore else None
    return DenseRecord(backend="faiss", dim=encoder["dim"], factory=spec.index, files=[VECTORS], rescore=rescore)


def _weights(spec: BuildSpec) -> int:
    """Bytes of a model."""
    if not isinstance(spec.encoder, TransformerSettings):
        return 0
    return ModelFiles.locate(spec.encoder.model).weights_bytes()


def _words(directory: Path, corpus: CorpusRecord, progress: Progress) -> Mapping[str, Any]:
    from retriever.searchers.bm25 import build_bm25

    (directory / BM25).mkdir(exist_ok=True)
    with open_documents(directory, corpus.documents) as documents:
        return build_bm25(Contents(documents), len(documents), directory / BM25, progress=progress)


def _kept(spec: BuildSpec, shards: Sequence[tuple[Path, ShardRecord]]) -> dict[str, FileRecord]:
    """The row shards that stay, by their final names."""
    if spec.index != BLOCKS and not spec.rescore:
        return {}
    folder = OF_BLOCKS if spec.index == BLOCKS else OF_RESCORE
    return {f"{folder}/{path.name}": record.file for path, record in shards}


def _shard_names(dense: DenseRecord | None) -> Sequence[str]:
    if dense is None:
        return ()
    return dense.files if dense.backend == BLOCKS else dense.rescore.files if dense.rescore else ()


def _unsettled(dense: DenseRecord, shards: Sequence[tuple[Path, ShardRecord]]) -> DenseRecord:
    """The record with the row shards where they still are."""
    files = [f"{BUILD}/{path.name}" for path, _ in shards]
    if dense.backend == BLOCKS:
        return replace(dense, files=files)
    return replace(dense, rescore=replace(dense.rescore, files=files)) if dense.rescore else dense
