"""The documents of a directory that is being built, and their texts as a sequence, read as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import overload

from retriever.documents import DocumentStore
from retriever.manifest import IDS, OFFSETS

__all__ = ["Contents", "open_documents"]


class Contents(Sequence[str]):
    """Text i is that of document i. No more than one is in memory."""

    def __init__(self, documents: DocumentStore) -> None:
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    @overload
    def __getitem__(self, row: int) -> str: ...

    @overload
    def __getitem__(self, row: slice) -> list[str]: ...

    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self._documents.contents(each) for each in range(*row.indices(len(self)))]
        return self._documents.contents(row)

    def __iter__(self) -> Iterator[str]:
        return (self._documents.contents(row) for row in range(len(self)))


def open_documents(directory: Path, documents: Path) -> DocumentStore:
    """The lines of a file by the offsets and ids of a directory."""
    ids = directory / IDS
    return DocumentStore.open(documents, directory / OFFSETS, ids if ids.is_file() else None)
