"""A passage, and how one is read from a server's answer.

RetrieverError          the retriever refused, or failed until the deadline left no time for another attempt, or answered nonsense
├── RetrieverTimeout    it did not answer within the deadline
└── CassetteError       a cassette that is replayed does not hold the query, or cannot be read
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["EXCERPT_CHARACTERS", "CassetteError", "Passage", "Retriever", "RetrieverError", "RetrieverTimeout", "passages_of"]

EXCERPT_CHARACTERS = 300


class RetrieverError(Exception):
    """The retriever refused, failed, or answered something else than passages."""


class RetrieverTimeout(RetrieverError):
    """The retriever did not answer within the deadline."""


class CassetteError(RetrieverError):
    """A cassette does not hold a query, or is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """A retrieved document. `contents` is its title line, in quotes in Search-R1's corpora, and its text."""

    id: str
    contents: str
    score: float = 0.0

    @property
    def title(self) -> str:
        """The first line, as it is."""
        return self.contents.partition("\n")[0]

    @property
    def text(self) -> str:
        """All lines but the first."""
        return self.contents.partition("\n")[2]


class Retriever(Protocol):
    """What finds passages."""

    async def retrieve(self, queries: Sequence[str], *, topk: int, deadline_s: float | None = None) -> list[list[Passage]]:
        """At most `topk` passages per query, best first."""
        ...


def passages_of(answer: bytes, *, queries: int, topk: int, url: str) -> list[list[Passage]]:
    """The passages of an answer with scores of Search-R1's API; a hit may lack its score, as those of its servers for web search do.

    Raises:
        RetrieverError: it is something else.
    """
    return [[_passage(hit, url) for hit in hits[:topk]] for hits in _result(answer, queries, url)]


def _result(answer: bytes, expected: int, url: str) -> list[list[Any]]:
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or lists in lists in lists
        raise RetrieverError(f"the retriever at {url} answered no JSON: {error}") from error
    result = value.get("result") if isinstance(value, dict) else None
    if not isinstance(result, list) or not all(isinstance(hits, list) for hits in result):
        raise RetrieverError(f'the retriever at {url}: expected {{"result": [[...], ...]}}, got {answer[:EXCERPT_CHARACTERS]!r}')
    if len(result) != expected:
        raise RetrieverError(f"the retriever at {url} answered {len(result)} lists of passages to {expected} queries")
    return result


def _passage(hit: object, url: str) -> Passage:
    document = hit.get("document") if isinstance(hit, dict) else None
    if not isinstance(hit, dict) or not isinstance(document, dict) or not isinstance(document.get("contents"), str):
        raise RetrieverError(f'the retriever at {url}: expected {{"document": {{"id", "contents"}}, "score"}}, got {str(hit)[:EXCERPT_CHARACTERS]}')
    score = hit.get("score", 0.0)
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= sys.float_info.max:
        raise RetrieverError(f"the retriever at {url}: expected a finite number as score, got {str(score)[:EXCERPT_CHARACTERS]}")
    return Passage(id=_encodable(str(document.get("id", ""))), contents=_encodable(document["contents"]), score=float(score))


def _encodable(text: str) -> str:
    """The text with lone surrogates, which JSON can carry and UTF-8 cannot, replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
