"""What is asked of a retriever, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_QUERY_CHARACTERS", "Found", "Hit", "Mode", "Progress", "Query", "Rows", "Service", "Vectors"]

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


class Service(Protocol):
    """What the HTTP API asks: an index on this machine, or a search service on the web. Entered before the first call, left after the last."""

    modes: tuple[Mode, ...]  # that can be asked for; the first is the default

    @property
    def identity(self) -> str:
        """Changes when answers may: the manifest's hash."""
        ...

    async def retrieve(self, queries: Sequence[Query], *, deadline_s: float) -> list[list[Found]]:
        """At most `topk` documents per query, best first.

        Raises:
            batching.QueueFull, batching.DeadlinePassed, batching.BatcherClosed: it was not served.
        """
        ...

    async def document(self, id: str) -> bytes | None:
        """The document of an id, as it is served."""
        ...

    def info(self) -> Mapping[str, Any]:
        """What it is and how it is set, for people and programs (`GET /info`)."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *raised: object) -> None: ...
