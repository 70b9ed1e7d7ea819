"""The row shards of a build: each is a file of vectors and, once it is whole and on the disk, a mark with its hash.

    build/00007.npy     rows 7 * R to 8 * R - 1
    build/00007.done    {"rows": R, "file": {"bytes": ..., "sha256": ..., "sample": ...}, "largest_norm": ...}

A build that was killed goes on with the shards that have no mark; those that have one are read and compared, and not embedded again.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from retriever.building.workshop import write_whole
from retriever.documents import DocumentStore
from retriever.encoders.encoder import Encoder
from retriever.manifest import FileRecord, IndexFault, record_of
from retriever.query import Progress, Vectors, silent
from retriever.searchers.searcher import SearcherError
from retriever.searchers.shards import VectorShards, VectorType, write_shard

__all__ = ["Shard", "ShardRecord", "embed_shard", "finished", "narrowed", "shards_of", "write_marked"]

TEXTS_AT_A_TIME = 4096  # sorted by length together, so that little is padded; what an encoder is given at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Rows `start` to `stop` - 1, in a file."""

    number: int
    start: int
    stop: int
    path: Path

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start

    @property
    def mark(self) -> Path:
        """There once the file is whole."""
        return self.path.with_suffix(".done")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """What a mark says."""

    rows: int
    file: FileRecord
    largest_norm: float | None = None  # of a vector as it is stored


def shards_of(directory: Path, count: int, shard_rows: int) -> list[Shard]:
    """The shards of `count` rows."""
    starts = range(0, count, shard_rows)
    return [Shard(number=i, start=start, stop=min(start + shard_rows, count), path=directory / f"{i:05}.npy") for i, start in enumerate(starts)]


def finished(shards: Sequence[Shard], progress: Progress = silent) -> dict[int, ShardRecord]:
    """The marks of the shards that are whole, by number. All of their bytes are read and compared."""
    done: dict[int, ShardRecord] = {}
    marked = [shard for shard in shards if shard.mark.is_file() and shard.path.is_file()]
    for i, shard in enumerate(marked, start=1):
        plain = json.loads(shard.mark.read_text(encoding="utf-8"))
        record = ShardRecord(rows=plain["rows"], file=FileRecord(**plain["file"]), largest_norm=plain.get("largest_norm"))
        if record.rows == shard.rows and record_of(shard.path) == record.file:
            done[shard.number] = record
        progress("finished shards checked", i, len(marked))
    return done


def narrowed(shards: Sequence[Shard], records: dict[int, ShardRecord], dtype: VectorType, progress: Progress) -> dict[int, ShardRecord]:
    """Finished shards with those of float32 rounded to the type that is asked for now: what embedding them again would give."""
    rounded = dict(records)
    for shard in shards:
        if shard.number in records:
            found = VectorShards.open([shard.path])
            if found.dtype == "float32" != dtype:
                rounded[shard.number] = write_marked(shard, found.rows(range(shard.rows)), dtype)
                progress(f"finished shards rounded to {dtype}", len(rounded), len(records))
    return rounded


def embed_shard(encoder: Encoder, documents: DocumentStore, shard: Shard, dtype: VectorType, tell: Callable[[int], None]) -> ShardRecord:
    """Embed the documents of a shard, and mark it. `tell` is told how many are done.

    Raises:
        IndexFault: the encoder makes no finite vector of a document, or one that the type cannot hold.
    """
    vectors = np.empty((shard.rows, encoder.dim), np.float32)
    for start in range(shard.start, shard.stop, TEXTS_AT_A_TIME):
        before, stop = start - shard.start, min(start + TEXTS_AT_A_TIME, shard.stop)
        texts = [documents.contents(row) for row in range(start, stop)]
        vectors[before : stop - shard.start] = encoder.encode_documents(texts, lambda done, before=before: tell(before + done))  # type: ignore[misc]
    wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(wrong):
        row = shard.start + int(wrong[0])
        raise IndexFault(f"the encoder makes NaN or infinity of document {row}, {documents[row][:80]!r}, and {len(wrong) - 1} more of its shard")
    return write_marked(shard, vectors, dtype)


def write_marked(shard: Shard, vectors: Vectors, dtype: VectorType) -> ShardRecord:
    """Write the vectors of a shard, and its mark once they are on the disk.

    Raises:
        IndexFault: the type cannot hold them.
    """
    partial = shard.path.with_suffix(f".{os.getpid()}.partial")  # a process that a killed build left behind may be writing the same
    try:
        write_shard(partial, vectors, dtype)
    except SearcherError as error:
        raise IndexFault(f"rows {shard.start} to {shard.stop - 1}: {error}") from error
    except OSError as error:  # NumPy's own says only how many numbers were written
        raise OSError(error.errno or errno.ENOSPC, error.strerror or "the disk did not take all of it", str(shard.path)) from error
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(shard.path)
    record = ShardRecord(rows=shard.rows, file=record_of(shard.path), largest_norm=VectorShards.open([shard.path]).largest_norm())
    write_whole(shard.mark, json.dumps(asdict(record)).encode())
    return record
