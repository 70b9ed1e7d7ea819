"""The client of a retriever that speaks Search-R1's HTTP API: this package's server or anybody's.

async with RetrieverClient("http://127.0.0.1:8000") as retriever:
    [[best, *others]] = await retriever.retrieve(["capital of Norway"], topk=3)
    best.title, best.text

RetrieverError          it refused, or failed until the deadline left no time for another attempt, or answered nonsense
└── RetrieverTimeout    it did not answer within the deadline
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import httpx
import trio

from retriever.transport import Answer, ResponseTooLarge, trio_client

__all__ = ["Passage", "Retriever", "RetrieverClient", "RetrieverError", "RetrieverTimeout"]

MAX_RESPONSE_BYTES = 32 * 1024 * 1024
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
EXCERPT_CHARACTERS = 300


class RetrieverError(Exception):
    """The retriever refused, failed, or answered something else than passages."""


class RetrieverTimeout(RetrieverError):
    """The retriever did not answer within the deadline."""


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


class RetrieverClient:
    """A `Retriever` over HTTP. Safe to use from many trio tasks at once; close it, or use it as an async context manager.

    Args:
        url: of the server, without `/retrieve`.
        deadline_s: of a whole call, further attempts and all.
        max_connections: calls in flight at once; further ones wait.
        transport: used instead of the network, e.g. a fake.
    """

    def __init__(self, url: str, *, deadline_s: float = 30.0, max_connections: int = 128, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/retrieve")
        self._deadline_s = deadline_s
        self._client = trio_client(base_url=self.url, max_connections=max_connections, max_response_bytes=MAX_RESPONSE_BYTES, transport=transport)

    async def retrieve(self, queries: Sequence[str], *, topk: int, deadline_s: float | None = None) -> list[list[Passage]]:
        """At most `topk` passages per query, best first. No connection, 429 and 5xx are tried again within the deadline.

        Raises:
            RetrieverTimeout: there was no answer within the deadline.
            RetrieverError: the server refused, its answer is not what the API says, or the time left allows no other attempt.
        """
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        body = json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()
        with trio.move_on_after(deadline_s) as scope:
            answer = await self._ask(body, scope)
            return [[_passage(hit, self.url) for hit in hits[:topk]] for hits in _result(answer, len(queries), self.url)]
        raise RetrieverTimeout(f"the retriever at {self.url} did not answer within {deadline_s:g} s")

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def _ask(self, body: bytes, scope: trio.CancelScope) -> bytes:
        pause_s = FIRST_PAUSE_S
        while True:
            wait_s = 0.0
            try:
                response = await self._client.exchange("POST", "/retrieve", body, _JSON)
            except (ResponseTooLarge, httpx.UnsupportedProtocol) as error:
                raise RetrieverError(f"the retriever at {self.url}: {error}") from error
            except httpx.TransportError as error:
                failure = RetrieverError(f"the retriever at {self.url} cannot be reached: {error}")
                failure.__cause__ = error
            else:
                if response.status_code == 200:
                    return response.content
                failure = RetrieverError(f"the retriever at {self.url} answered {response.status_code}: {response.text[:EXCERPT_CHARACTERS]}")
                if response.status_code != 429 and response.status_code < 500:
                    raise failure
                wait_s = _retry_after_s(response)
            wait_s = max(wait_s, pause_s * random.uniform(0.5, 1.5))
            if trio.current_time() + wait_s >= scope.deadline:
                raise failure
            await trio.sleep(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


_JSON = {"content-type": "application/json"}


def _retry_after_s(response: Answer) -> float:
    """What the server asks for; 0 where it says nothing, or gives a date."""
    text = response.headers.get(b"retry-after", b"")
    return float(text) if text.isdigit() else 0.0


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
