"""Opening an index beside a running event loop, the first time and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from retriever.query import Hit, Mode, Progress, Query, Vectors

__all__ = ["Opener", "Searchable", "Stopped", "Store"]

WARM_TEXT = "who wrote the first dictionary of the english language"
WARM_TOPK = 3


class Store(Protocol):
    """Documents by row and by id."""

    def __getitem__(self, row: int, /) -> bytes: ...

    def row_of(self, id: str, /) -> int | None: ...


class Searchable(Protocol):
    """What a service needs of an index. Used by two threads at most: one in `encode`, one in `find`."""

    @property
    def modes(self) -> tuple[Mode, ...]: ...

    @property
    def reranks(self) -> bool: ...

    @property
    def identity(self) -> str: ...

    @property
    def documents(self) -> Store: ...

    def encode(self, queries: Sequence[Query], /) -> Vectors: ...

    def find(self, queries: Sequence[Query], vectors: Vectors, /) -> list[list[Hit]]: ...

    def info(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


class Stopped(Exception):
    """The server ends while its index is being opened."""


class Opener:
    """Opens an index in another thread, and says how far it is.

    Args:
        opens: told of its progress; what it raises is raised by `open`.
        report: told of it, too.
    """

    def __init__(self, opens: Callable[[Progress], Searchable], report: Progress) -> None:
        self._opens, self._report = opens, report
        self._stopped = False
        self.progress: tuple[str, int, int] = ("opening the index", 0, 0)

    def open(self) -> Searchable:
        """The index, opened and warm: it has answered a query in each of its modes.

        Raises:
            Stopped: `stop` was called. Work that reports no progress goes on to its end first.
            Exception: what opening it, or asking it, raised.
        """
        index = self._opens(self._tell)
        self._tell("warming the index up", 0, len(index.modes))
        for mode in index.modes:
            queries = [Query(text=WARM_TEXT, topk=WARM_TOPK, mode=mode, rerank=rerank) for rerank in ([False, True] if index.reranks else [False])]
            index.find(queries, index.encode(queries))
        return index

    def stop(self) -> None:
        """End what is going on when it next reports progress."""
        self._stopped = True

    def _tell(self, what: str, done: int, of: int) -> None:
        if self._stopped:
            raise Stopped("the server is ending")
        self.progress = (what, done, of)
        self._report(what, done, of)
