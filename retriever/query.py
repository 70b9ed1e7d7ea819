"""What is asked of a retriever, what it finds, and how it refuses.

Refused                  a request that is not served: `status` is HTTP's, and `retry_after_s` says when another attempt may do better
├── NotReady             503  the index is still being opened
├── Unsupported          422  this server has no such mode, or nothing that reranks
├── Unavailable          502  what it needs of others, a search service on the web, failed
└── BatcherError              (retriever.batching) too much is waiting, or the deadline passed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

__all__ = [
    "MAX_QUERY_CHARACTERS",
    "Found",
    "Hit",
    "Mode",
    "NotReady",
    "Progress",
    "Query",
    "Refused",
    "Rows",
    "Service",
    "Unavailable",
    "Unsupported",
    "Vectors",
    "silent",
]

Vectors = npt.NDArray[np.float32]  # [N, dim]
Rows = npt.NDArray[np.int64]  # [N, k] of documents; -1 where there is none

MAX_QUERY_CHARACTERS = 4096  # what follows is cut off: Search-R1 reads the first 256 tokens of a query


class Mode(StrEnum):
    """How documents are found."""

    DENSE = "dense"  # by the inner product of vectors
    BM25 = "bm25"  # by words
    HYBRID = "hybrid"  # both lists, by reciprocal rank fusion


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """One query of a request."""

    text: str
    topk: int
    mode: Mode | None = None  # None: the index's own
    rerank: bool = False  # order the best by the cross-encoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """A document found: its row, and how well it fits (the higher the better; comparable within one mode only)."""

    row: int
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A document found, as it is served."""

    document: bytes  # JSON on one line, UTF-8
    score: float


class Progress(Protocol):
    """Told of long work, often: what is done, how many of it are, of how many."""

    def __call__(self, what: str, done: int, of: int) -> None: ...


def silent(what: str, done: int, of: int) -> None:
    """The progress that nobody watches."""


class Service(Protocol):
    """What the HTTP API asks: an index on this machine, or a search service on the web. Entered before the first call, left after the last."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        """That can be asked for; the first is the default."""
        ...

    @property
    def identity(self) -> str:
        """Changes when answers may: the manifest's hash."""
        ...

    async def retrieve(self, queries: Sequence[Query], *, deadline_s: float) -> list[list[Found]]:
        """At most `topk` documents per query, best first.

        Raises:
            Refused: it was not served: the queue is full, the deadline passed, the mode is unknown here, it is not ready, ...
        """
        ...

    async def document(self, id: str) -> bytes | None:
        """The document of an id, as it is served."""
        ...

    def info(self) -> Mapping[str, Any]:
        """What it is and how it is set, for people and programs (`GET /info`).

        Raises:
            NotReady: it is still being opened.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *raised: object) -> None: ...


class Refused(Exception):
    """A request is not served. The message says why, and what to do.

    Args:
        retry_after_s: when it may be served; None where another attempt is refused as well.
    """

    status = 503

    def __init__(self, message: str, *, status: int | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status or self.status
        self.retry_after_s = retry_after_s


class NotReady(Refused):
    """The index is still being opened: what is done, and how many of how many."""

    def __init__(self, doing: str, done: int = 0, of: int = 0, *, retry_after_s: int = 1) -> None:
        super().__init__(f"not ready: {doing}" + (f" {done} of {of}" if of else ""), retry_after_s=retry_after_s)
        self.doing, self.done, self.of = doing, done, of


class Unsupported(Refused):
    """It is not served here, whatever else is right with the request."""

    status = 422


class Unavailable(Refused):
    """Another service that this one needs failed."""

    status = 502
