"""What an index is made of: the `manifest.json` of its directory, format 2.

    manifest.json      this: counts, encoder, kinds of search, and size and hashes of every other file
    documents.jsonl    as they are served; line i, as raw bytes, is the JSON of document i (an adopted corpus may lie elsewhere)
    offsets.npy        where each line begins
    ids.npy            ids to rows, where ids are something else than the row's number
    idf.npy            the table of the hashed encoder
    vectors.faiss      or vectors/00000.npy ...: row blocks
    rescore/           the vectors that the best are scored again by
    bm25/              the words

A server checks the size and a sample of every file when it opens a directory, which takes milliseconds for any size; `verify` reads all
bytes. A manifest of another format, one that lacks something, or one that somebody edited (it holds a checksum of itself) is refused: the index is
built again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from retriever.query import Progress, silent

__all__ = [
    "BLOCKS",
    "BM25",
    "BUILD",
    "DOCUMENTS",
    "FORMAT",
    "IDF",
    "IDS",
    "MANIFEST",
    "OFFSETS",
    "VECTORS",
    "DenseRecord",
    "DocumentsRecord",
    "FileRecord",
    "IndexFault",
    "Manifest",
    "RescoreRecord",
    "SourceRecord",
    "checksum_of",
    "record_of",
    "sample_of",
]

FORMAT = 2
MANIFEST, DOCUMENTS, OFFSETS, IDS, IDF, VECTORS = "manifest.json", "documents.jsonl", "offsets.npy", "ids.npy", "idf.npy", "vectors.faiss"
BM25, BLOCKS = "bm25", "blocks"
BUILD = "build"  # what a build needs until it is done
CHECKSUM = "checksum"  # of all else that manifest.json says
REMEDY = "copy it again from where it was built, or build again"

BLOCK_BYTES = 64 * 1024
SAMPLED_BLOCKS = 32  # 2 MB: read in about a millisecond each from a cold disk, first and last among them
HASHED_AT_A_TIME = 16 * 1024 * 1024  # bytes between two words of progress


class IndexFault(Exception):
    """A directory is not an index that can be used. The message says what is wrong and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file of an index: its size, the hash of all of it, and of the sample that is checked at every start."""

    bytes: int
    sha256: str
    sample: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRecord:
    """The file that the documents came from."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentsRecord:
    """The documents. `file` is relative to the directory, or the absolute path of an adopted corpus."""

    file: str
    ids: str  # "rows": an id is the number of its row; "hashed": ids.npy knows
    source: SourceRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class RescoreRecord:
    """Row blocks of better vectors than those searched: the best `depth` of a search are scored again by them."""

    dtype: str
    files: Sequence[str]
    depth: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseRecord:
    """Vectors that are searched: a FAISS index by its factory string, or row blocks of a type."""

    backend: str  # "faiss" or "blocks"
    dim: int
    files: Sequence[str]
    factory: str | None = None
    dtype: str | None = None
    metric: str = "ip"
    fidelity: float = 1.0  # least cosine of a stored vector to the encoder's own: below 1 where the index keeps less than the vectors
    rescore: RescoreRecord | None = None
    largest_norm: float | None = None  # of a block's vector, by which what 16 bit get wrong is bounded; None: to be measured

    @property
    def block_type(self) -> Literal["float16", "bfloat16"]:
        """The dtype of blocks."""
        return "bfloat16" if self.dtype == "bfloat16" else "float16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything that decides what an index answers."""

    count: int
    documents: DocumentsRecord
    encoder: Mapping[str, Any] | None
    dense: DenseRecord | None
    bm25: Mapping[str, Any] | None
    spec: Mapping[str, Any] = field(default_factory=dict)  # what was asked for: an index of the same is not built again
    encoder_bytes: int = 0  # of a model's weights, which are resident where it is served
    files: Mapping[str, FileRecord] = field(default_factory=dict)  # by name relative to the directory, or absolute
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def identity(self) -> str:
        """Equal for equal answers: a hash of everything but the versions."""
        told = {key: value for key, value in asdict(self).items() if key != "versions"}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    @property
    def table(self) -> bool:
        """Whether the encoder has one: idf.npy."""
        return self.encoder is not None and self.encoder["kind"] == "hashed"

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a directory.

        Raises:
            IndexFault: there is none, or it is none of this version's.
        """
        path = directory / MANIFEST
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise IndexFault(f"{directory} is no index: {error}") from error
        except ValueError as error:
            raise IndexFault(f"{path} is not JSON: {error}") from error
        return _parsed(plain, path)

    def write(self, directory: Path) -> None:
        """Write it into the directory, by rename once it is on the disk: a build that finds it takes it for whole."""
        partial, plain = directory / f".{MANIFEST}.partial", {"format": self.format, **asdict(self)}
        with partial.open("w", encoding="utf-8") as file:
            file.write(json.dumps({**plain, CHECKSUM: checksum_of(plain)}, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.rename(directory / MANIFEST)

    def check_files(self, directory: Path) -> None:
        """Every file is there, of its size, and its sample is what was written.

        Raises:
            IndexFault: one is not.
        """
        for fault in self.faults(directory):
            raise IndexFault(fault)

    def faults(self, directory: Path, *, wholly: bool = False, progress: Progress = silent) -> Iterator[str]:
        """What is wrong with the files, one line for each: missing, of another size, or not what was built by its sample (or by all of it)."""
        total, before = sum(record.bytes for record in self.files.values()), 0
        for name, expected in self.files.items():
            path = directory / name
            if not path.is_file():
                yield f"{path} is missing, and the manifest names it: {REMEDY}"
            elif (size := path.stat().st_size) != expected.bytes:
                yield f"{path} is not the file that was built: {size} bytes, the manifest says {expected.bytes}: {REMEDY}"
            elif wholly and _sha256(path, progress, before, total) != expected.sha256:
                yield f"{path} is not the file that was built: its sha256 differs from the manifest's: {REMEDY}"
            elif not wholly and sample_of(path) != expected.sample:
                yield f"{path} is not the file that was built: its sampled bytes differ from the manifest's hash: {REMEDY}"
            before += expected.bytes


def checksum_of(plain: Mapping[str, Any]) -> str:
    """sha256 of what a manifest.json says but the checksum itself: as JSON with sorted keys and without spaces."""
    told = {key: value for key, value in plain.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def record_of(path: Path, progress: Progress = silent) -> FileRecord:
    """A file's size and hashes: reads all of it."""
    size = path.stat().st_size
    return FileRecord(bytes=size, sha256=_sha256(path, progress, 0, size), sample=sample_of(path))


def _sha256(path: Path, progress: Progress, before: int, of: int) -> str:
    digest, done = hashlib.sha256(), before
    with path.open("rb") as file:
        while block := file.read(HASHED_AT_A_TIME):
            digest.update(block)
            done += len(block)
            progress("bytes hashed", done, of)
    return digest.hexdigest()


def sample_of(path: Path) -> str:
    """The hash of the size and of blocks at even distances, the first and the last among them; of a small file wholly."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= SAMPLED_BLOCKS * BLOCK_BYTES:
            digest.update(file.read())
        else:
            for i in range(SAMPLED_BLOCKS):
                file.seek((size - BLOCK_BYTES) * i // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def _parsed(plain: Any, path: Path) -> Manifest:
    found = plain.get("format") if isinstance(plain, dict) else None
    if found != FORMAT:
        raise IndexFault(f"{path} has format {found!r}, this version reads {FORMAT}: build again (`retriever build`)")
    if plain.get(CHECKSUM) != checksum_of(plain):
        raise IndexFault(f"{path} was edited after it was built: its content is not that of its {CHECKSUM}. Undo the change, {REMEDY}")
    try:
        return _manifest(plain)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise IndexFault(f"{path} is incomplete or altered: {reason}. Build again") from error


def _manifest(plain: Mapping[str, Any]) -> Manifest:
    documents, dense, count = plain["documents"], plain["dense"], plain["count"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count must be a positive integer, got {count!r}")
    files = {_inside(name): FileRecord(**record) for name, record in plain["files"].items()}
    manifest = Manifest(
        count=count,
        documents=DocumentsRecord(file=documents["file"], ids=documents["ids"], source=SourceRecord(**documents["source"])),
        encoder=plain["encoder"],
        dense=None if dense is None else _dense(dense),
        bm25=plain["bm25"],
        spec=plain["spec"],
        encoder_bytes=plain["encoder_bytes"],
        files=files,
        versions=plain["versions"],
    )
    if missing := [name for name in _needed(manifest) if name not in files]:
        raise ValueError(f"files lacks {', '.join(missing)}")
    if manifest.dense is None and manifest.bm25 is None:
        raise ValueError("neither dense nor bm25 can be searched")
    if (manifest.dense is None) != (manifest.encoder is None):
        raise ValueError("dense and encoder belong together")
    return manifest


def _dense(plain: Mapping[str, Any]) -> DenseRecord:
    rescore = plain["rescore"]
    record = DenseRecord(**{**plain, "rescore": None if rescore is None else RescoreRecord(**rescore)})
    if record.backend == BLOCKS and record.dtype not in ("float16", "bfloat16"):
        raise ValueError(f"blocks are float16 or bfloat16, got {record.dtype}")
    if record.backend not in ("faiss", BLOCKS) or record.metric not in ("ip", "l2") or not record.files:
        raise ValueError(f"dense is a faiss index or blocks with files, by ip or l2, got {record}")
    return record


def _needed(manifest: Manifest) -> list[str]:
    """The files without which it cannot be served."""
    needed = [manifest.documents.file, OFFSETS]
    needed += [IDS] if manifest.documents.ids == "hashed" else []
    needed += [IDF] if manifest.table else []
    if manifest.dense is not None:
        needed += [*manifest.dense.files, *(manifest.dense.rescore.files if manifest.dense.rescore else ())]
    return needed


def _inside(name: str) -> str:
    """A file is the directory's own, or named by its absolute path: nothing in between."""
    if ".." in Path(name).parts:
        raise ValueError(f"a file outside must be named by its absolute path, got {name!r}")
    return name
