"""Documents as they are served, by row and by id: a file of JSON lines and where each line begins, both mapped into memory.

    documents.jsonl    line i is the JSON of document i
    offsets.npy        int64 [n + 1]: document i is between offsets i and i + 1, white space around it aside
    ids.npy            only where ids are not their rows' numbers (see retriever.corpora.ids)

A line goes into an answer as it stands: nothing is parsed to serve it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from retriever.corpora.ids import IdCollector, IdTable, candidates, duplicate, is_row
from retriever.corpora.row import Document

__all__ = ["DocumentStore", "DocumentsFault", "rendered"]

Offsets = npt.NDArray[np.int64]  # [n + 1]

_SAMPLES = 16  # documents that are looked at when a store is opened; each may be a page to fetch from the disk


class DocumentsFault(Exception):
    """The files of a document store are not what was written. The message names the file, says what is wrong and what to do."""


class DocumentStore:
    """Documents by row (JSON, one line, UTF-8, without its line break) and by id. Any thread may read.

    Args:
        data: the lines.
        offsets: where each begins, and the end.
        ids: None where each id is its row's number.
        name: of the file, for messages.
    """

    def __init__(self, data: bytes | mmap.mmap, offsets: Offsets, ids: IdTable | None, *, name: str) -> None:
        self._data, self._ids, self._name = data, ids, name
        self._count = len(offsets) - 1
        self._offsets = memoryview(offsets.data)  # its items are Python's integers, at a third of an array's time

    @classmethod
    def of(cls, documents: Sequence[Document]) -> DocumentStore:
        """In memory.

        Raises:
            ValueError: two documents have one id, or one is not on one line.
        """
        ids = IdCollector()
        for document in documents:
            if b"\n" in document.json:
                raise ValueError(f"the JSON of document {document.id!r} is not on one line")
            ids.add(document.id)
        offsets = np.zeros(len(documents) + 1, np.int64)
        np.cumsum([len(document.json) + 1 for document in documents], out=offsets[1:])
        table = ids.table()
        twice = duplicate(table, lambda row: documents[row].id) if table is not None else None
        if twice is not None:
            raise ValueError(f"documents {twice[0]} and {twice[1]} have one id, {documents[twice[0]].id!r}: ids must be unique")
        return cls(b"".join(document.json + b"\n" for document in documents), offsets, table, name="memory")

    @classmethod
    def open(cls, documents: Path, offsets: Path, ids: Path | None) -> DocumentStore:
        """Map files. Takes milliseconds, whatever their size: a few documents are looked at, not all.

        Raises:
            DocumentsFault: they do not fit together.
            OSError: one cannot be read.
        """
        starts = _array(offsets, np.dtype(np.int64), shape=(None,))
        if len(starts) < 2:
            raise DocumentsFault(f"{offsets}: there is no document: build again")
        table = _array(ids, np.dtype(np.uint64), shape=(2, len(starts) - 1)) if ids is not None else None
        with documents.open("rb") as file:
            size = file.seek(0, 2)
            if size != starts[-1]:
                raise DocumentsFault(f"{documents} has {size} bytes, {offsets} says {starts[-1]}: it was cut off or altered; build again")
            store = cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), starts, table, name=str(documents))
        try:
            store._check()
        except DocumentsFault:
            store.close()
            raise
        return store

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> bytes:
        if not 0 <= row < self._count:
            raise IndexError(f"document {row} of {self._count}")
        line = self._data[self._offsets[row] : self._offsets[row + 1]].strip()
        if line[:1] != b"{":
            raise DocumentsFault(f"{self._name}: document {row} does not begin where it should: the file was altered; build again")
        return line

    def __iter__(self) -> Iterator[bytes]:
        return (self[row] for row in range(self._count))

    def contents(self, row: int) -> str:
        """The text of a document."""
        contents: str = json.loads(self[row])["contents"]
        return contents

    def row_of(self, id: str) -> int | None:
        """The row of the document with this id; None where there is none."""
        if self._ids is None:
            return int(id) if is_row(id, self._count) else None
        return next((row for row in candidates(self._ids, id) if self._id(row) == id), None)

    def close(self) -> None:
        """Give the files back. What reads afterwards gets a ValueError."""
        if isinstance(self._data, mmap.mmap):
            self._data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _id(self, row: int) -> str:
        return str(json.loads(self[row])["id"])

    def _check(self) -> None:
        """Are some documents, the first and the last among them, whole lines that have their ids?"""
        for row in np.unique(np.linspace(0, self._count - 1, num=_SAMPLES, dtype=np.int64)).tolist():
            start = self._offsets[row]
            try:
                begins = row == 0 or self._data[start - 1 : start] == b"\n"
                found = self.row_of(self._id(row)) if begins else None
            except (ValueError, KeyError, TypeError) as error:
                raise DocumentsFault(f"{self._name}: document {row} is no line of JSON with an id: build again") from error
            if found != row:
                raise DocumentsFault(f"{self._name}: document {row} does not begin where it should, or has another id: build again")


def rendered(line: bytes, *, fields: Sequence[str] | None, max_chars: int | None) -> bytes:
    """A document with some of its fields, and with its contents cut. The line itself where neither is asked.

    Args:
        fields: those to keep, where the document has them; None: all.
        max_chars: longest contents in Unicode characters, a title's line included; None: as long as they are.

    Raises:
        ValueError: `max_chars` is less than 1.
    """
    if max_chars is not None and max_chars < 1:
        raise ValueError(f"max_chars must be at least 1, got {max_chars}")
    if fields is None and max_chars is None:
        return line
    document: dict[str, Any] = json.loads(line)
    if fields is not None:
        document = {name: value for name, value in document.items() if name in fields}
    if max_chars is not None and isinstance(document.get("contents"), str):
        document["contents"] = document["contents"][:max_chars]
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _array(path: Path, dtype: np.dtype[Any], *, shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
    """A mapped array of this type and shape (None: of any length)."""
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DocumentsFault(f"{path} is not a whole .npy file ({error}): build again") from error
    fits = array.ndim == len(shape) and all(wanted in (None, found) for wanted, found in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits or not array.flags.c_contiguous:
        wanted = ", ".join("n" if length is None else str(length) for length in shape)
        raise DocumentsFault(f"{path} holds {array.dtype} {list(array.shape)}, expected {dtype} [{wanted}]: build again")
    return array.view(np.ndarray)
