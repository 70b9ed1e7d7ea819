"""Import a corpus of any size: written as it is served, with where each document begins and, where needed, which row has an id.

Files are written under other names (`.documents.jsonl.partial`) and appear when they are whole and on the disk, offsets.npy last: without it
there is no corpus. One import writes into a directory at a time; what a killed one left is written over by the next.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, Self

import numpy as np

from retriever.corpora.ids import IdCollector, IdTable, duplicate
from retriever.corpora.row import ContentsMissing, CorpusError, Document, RowFault, document_of
from retriever.corpora.source import Source, SourceFile
from retriever.query import Progress

__all__ = ["DOCUMENTS", "IDS", "OFFSETS", "CorpusRecord", "adopt_corpus", "import_corpus", "read_documents", "same_id"]

DOCUMENTS, OFFSETS, IDS = "documents.jsonl", "offsets.npy", "ids.npy"

_ROWS_TOLD = 4096  # between two calls of progress
_WRITTEN_BYTES = 4 << 20  # at a time
_SIGNED_64 = "<i8"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusRecord:
    """A corpus that was imported."""

    count: int
    ids: Literal["rows", "hashed"]  # "rows": each document's id is its row's number, and there is no ids.npy
    documents: Path  # the file of lines: in the directory, or the adopted one, wherever it lies
    sha256: str  # of that file
    source: SourceFile


def import_corpus(source: Path, directory: Path, *, progress: Progress = lambda what, done, of: None) -> CorpusRecord:
    """Write a corpus into a directory as documents.jsonl, offsets.npy and, unless ids are rows' numbers, ids.npy.

    Takes a few MB of memory, and where ids are not rows' numbers 8 bytes per document, 32 at the end.

    Args:
        source: JSON lines (also compressed, also in a tar archive) or Parquet.
        progress: told "imported", bytes of the source that were read, its bytes.

    Raises:
        CorpusError: a row is not what it should be, an id comes twice, there is no row at all, or the file is damaged.
        OSError: the source cannot be read, or the directory not be written to.
    """
    with Source(source) as file, _Lines(directory / DOCUMENTS) as lines, _Tables(directory) as tables:
        for number, _, document in read_documents(file, progress, "imported"):
            tables.add(document.id, number, lines.size)
            lines.add(document.json)
        sha256 = lines.finish()
        tables.finish(lines.path, lines.size, file)
        tables.retract()
        lines.appear()
        tables.appear()
        return CorpusRecord(count=tables.count, ids=tables.kind, documents=directory / DOCUMENTS, sha256=sha256, source=file.file())


def adopt_corpus(source: Path, directory: Path, *, progress: Progress = lambda what, done, of: None) -> CorpusRecord:
    """Like `import_corpus`, but leave the lines where they are if each can be served as it stands: only offsets.npy and ids.npy are written.

    A file that is compressed, a table, or has a row of `title` and `text` without `contents` is imported instead: `record.documents` says which.
    """
    with Source(source) as file:
        if not file.is_plain:
            return import_corpus(source, directory, progress=progress)
        try:
            return _adopted(file, directory, progress)
        except ContentsMissing:
            return import_corpus(source, directory, progress=progress)


def read_documents(source: Source, progress: Progress, what: str, *, as_it_is: bool = False) -> Iterator[tuple[int, int, Document]]:
    """The documents of a file, each behind the number and the start of its row (see `corpora.source.Row`).

    Raises:
        CorpusError: a row is no document, or there is no row at all.
        ContentsMissing: as in `document_of`.
    """
    count = 0
    for number, start, content in source.rows():
        try:
            document = document_of(content, as_it_is=as_it_is)
        except RowFault as error:
            raise CorpusError(f"{source.place(number)}: {error}") from error
        yield number, start, document
        count += 1
        if count % _ROWS_TOLD == 0:
            progress(what, source.done, source.size)
    if not count:
        raise CorpusError(f"{source.path}: the corpus is empty")
    progress(what, source.size, source.size)


def same_id(id: str, source: Source, number: int) -> str:
    """What is wrong with a row whose id another has, too."""
    return f"the id {id!r} is that of {source.unit} {number}, too: ids must be unique"


def _adopted(file: Source, directory: Path, progress: Progress) -> CorpusRecord:
    _partial_of(directory / DOCUMENTS).unlink(missing_ok=True)  # of a killed import: nothing is copied now
    with _Tables(directory) as tables:
        for number, start, document in read_documents(file, progress, "adopted", as_it_is=True):
            tables.add(document.id, number, start)
        read = file.file()
        tables.finish(file.path, read.bytes, file)
        tables.retract()
        tables.appear()
        return CorpusRecord(count=tables.count, ids=tables.kind, documents=file.path.absolute(), sha256=read.sha256, source=read)


class _Partial:
    """A file that is written under another name, and is gone if it does not appear."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.path = _partial_of(target)
        self.file: IO[bytes] = self.path.open("wb")

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def appear(self) -> None:
        self.path.replace(self._target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.file.close()
        except OSError:
            if error is None:  # what is left in its buffer finds no place either: the first error says that already
                raise
        finally:
            self.path.unlink(missing_ok=True)


def _partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


class _Lines(_Partial):
    """documents.jsonl as it is written."""

    def __init__(self, target: Path) -> None:
        super().__init__(target)
        self.size = 0
        self._written = 0  # bytes of it that are
        self._sha256 = hashlib.sha256()
        self._waiting: list[bytes] = []

    def add(self, line: bytes) -> None:
        self._waiting.append(line)
        self.size += len(line) + 1
        if self.size - self._written > _WRITTEN_BYTES:
            self._write()

    def finish(self) -> str:
        """Bring them to the disk. Returns their sha256."""
        self._write()
        self.sync()
        return self._sha256.hexdigest()

    def _write(self) -> None:
        data = b"".join(line + b"\n" for line in self._waiting)
        self._waiting.clear()
        self._written = self.size
        self._sha256.update(data)
        self.file.write(data)


class _Offsets(_Partial):
    """offsets.npy as it is written: its header tells the length, which is known at the end."""

    def __init__(self, target: Path) -> None:
        super().__init__(target)
        self._count = 0
        self._waiting = array("q")
        self._header(0)

    def add(self, start: int) -> None:
        self._waiting.append(start)
        if len(self._waiting) * self._waiting.itemsize > _WRITTEN_BYTES:
            self._write()

    def finish(self, end: int) -> None:
        self.add(end)
        self._write()
        self.file.seek(0)
        self._header(self._count)
        self.sync()

    def _write(self) -> None:
        self._count += len(self._waiting)
        self.file.write(self._waiting.tobytes())
        del self._waiting[:]

    def _header(self, length: int) -> None:
        """As long for any length: NumPy leaves room for the digits of a first dimension that grows."""
        np.lib.format.write_array_header_1_0(self.file, {"descr": _SIGNED_64, "fortran_order": False, "shape": (length,)})


class _Tables:
    """offsets.npy and ids.npy as they are written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        _partial_of(directory / IDS).unlink(missing_ok=True)  # of a killed import: this one may need no such file
        self._open = ExitStack()
        self._offsets = self._open.enter_context(_Offsets(directory / OFFSETS))
        self._ids = IdCollector()
        self._numbers = _Numbers()
        self._table: _Partial | None = None

    @property
    def count(self) -> int:
        return self._ids.count

    @property
    def kind(self) -> Literal["rows", "hashed"]:
        return "rows" if self._table is None else "hashed"

    def add(self, id: str, number: int, start: int) -> None:
        """A document: its id, the number of its row in the source, its first byte in the file of lines."""
        self._numbers.add(self._ids.count, number)
        self._ids.add(id)
        self._offsets.add(start)

    def finish(self, documents: Path, size: int, source: Source) -> None:
        """Bring them to the disk, unless an id comes twice."""
        self._offsets.finish(size)
        table = self._ids.table()
        if table is None:
            return
        self._refuse_duplicates(table, documents, source)
        self._table = self._open.enter_context(_Partial(self._directory / IDS))
        np.save(self._table.file, table, allow_pickle=False)
        self._table.sync()

    def retract(self) -> None:
        """Take away what a former import left: it must not be taken for whole while files are exchanged."""
        (self._directory / OFFSETS).unlink(missing_ok=True)
        (self._directory / IDS).unlink(missing_ok=True)

    def appear(self) -> None:
        if self._table is not None:
            self._table.appear()
        self._offsets.appear()
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.__exit__(kind, error, trace)

    def _refuse_duplicates(self, table: IdTable, documents: Path, source: Source) -> None:
        starts = np.load(self._offsets.path, mmap_mode="r", allow_pickle=False)
        with documents.open("rb") as file:

            def id_of(row: int) -> str:
                file.seek(int(starts[row]))
                return str(json.loads(file.read(int(starts[row + 1] - starts[row])).strip())["id"])

            twice = duplicate(table, id_of)
            if twice is not None:
                earlier, later = (self._numbers.of(row) for row in twice)
                raise CorpusError(f"{source.place(later)}: {same_id(id_of(twice[0]), source, earlier)}")


class _Numbers:
    """The numbers of documents' rows in their source. Takes memory only where lines were empty."""

    def __init__(self) -> None:
        self._rows, self._shifts = array("q"), array("q")

    def add(self, row: int, number: int) -> None:
        if not self._shifts or number - row != self._shifts[-1]:
            self._rows.append(row)
            self._shifts.append(number - row)

    def of(self, row: int) -> int:
        return row + self._shifts[bisect_right(self._rows, row) - 1]
