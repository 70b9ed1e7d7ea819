"""The client of a retriever that speaks Search-R1's HTTP API: this package's server or anybody's.

    async with RetrieverClient("http://127.0.0.1:8000") as retriever:
        [[best, *others]] = await retriever.retrieve(["capital of Norway"], topk=3)
        best.title, best.text

A call has a deadline that holds for all of it. Within it no connection, 429 and 5xx are tried again: after a pause that doubles, with jitter, or as
long as Retry-After says; no more often than the budget that all calls share allows (`retries`); and while the server fails again and again, one
attempt at a time (`breaker`). All of these delay a call, none of them ends it before its deadline would.

    RetrieverError          it refused, or failed until the deadline left no time for another attempt, or answered nonsense
    ├── RetrieverTimeout    it did not answer within the deadline
    └── CassetteError       a cassette that is replayed does not hold the query, or cannot be read or written
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import trio

from retriever.breaker import CircuitBreaker
from retriever.cassette import Cassette, Recorded
from retriever.coalescing import Coalescer
from retriever.passage import EXCERPT_CHARACTERS, CassetteError, Passage, Retriever, RetrieverError, RetrieverTimeout, passages_of
from retriever.retries import RetryBudget
from retriever.transport import Answer, ResponseTooLarge, trio_client

__all__ = ["MAX_RESPONSE_BYTES", "Cassette", "CassetteError", "Passage", "Retriever", "RetrieverClient", "RetrieverError", "RetrieverTimeout"]

MAX_RESPONSE_BYTES = 32 * 1024 * 1024
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


class RetrieverClient:
    """A `Retriever` over HTTP. Safe to use from many trio tasks at once; close it, or use it as an async context manager.

    Args:
        url: of the server, without `/retrieve`.
        deadline_s: of a whole call, further attempts and all.
        max_connections: calls in flight at once; further ones wait.
        token: for a server that asks for one, sent as a bearer token.
        mode: how this package's server finds passages: `dense`, `bm25` or `hybrid`; None for its own way. Other servers know no modes.
        rerank: have this package's server order the best by its cross-encoder.
        coalesce: requests in flight at once, in which the queries of concurrent calls go together; 0 for a request per call.
        max_response_bytes: of an answer; a longer one is an error.
        cassette: answers from a file; see `retriever.cassette`. A replayed one asks no server.
        transport: used instead of the network, e.g. a fake.

    Raises:
        ValueError: a token that no header can carry, or a negative number of requests.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = 30.0,
        max_connections: int = 128,
        token: str | None = None,
        mode: str | None = None,
        rerank: bool = False,
        coalesce: int = 0,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        cassette: Cassette | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if coalesce < 0:
            raise ValueError(f"coalesce must be 0 or more requests, got {coalesce}")
        self.url = url.rstrip("/").removesuffix("/retrieve")
        self._deadline_s = deadline_s
        self._mode, self._rerank = mode, rerank
        self._cassette = cassette
        self._client = trio_client(
            base_url=self.url,
            max_connections=max_connections,
            max_response_bytes=max_response_bytes,
            headers=_authorization(token),
            transport=transport,
        )
        self._breaker, self._budget = CircuitBreaker(), RetryBudget()
        self._coalescer = Coalescer(self._asked, requests=coalesce) if coalesce else None

    async def retrieve(self, queries: Sequence[str], *, topk: int, deadline_s: float | None = None) -> list[list[Passage]]:
        """At most `topk` passages per query, best first.

        Raises:
            RetrieverTimeout: there was no answer within the deadline.
            RetrieverError: the server refused, its answer is not what the API says, or the time left allows no other attempt.
            CassetteError: the cassette that is replayed does not hold a query.
        """
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        if self._cassette is None:
            return await self._retrieve(queries, topk, deadline_s)
        asked = [Recorded(query=query, topk=topk, mode=self._mode, rerank=self._rerank) for query in queries]
        found = [self._cassette.find(one) for one in asked]
        missing = list(dict.fromkeys(one for one, passages in zip(asked, found, strict=True) if passages is None))
        if missing:
            answers = await self._retrieve([one.query for one in missing], topk, deadline_s)
            self._cassette.add(list(zip(missing, answers, strict=True)))
        return [self._cassette.find(one) or [] for one in asked]

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def _retrieve(self, queries: Sequence[str], topk: int, deadline_s: float) -> list[list[Passage]]:
        call = _Call()
        self._budget.deposit()
        with trio.move_on_after(deadline_s):
            return await (self._coalescer.get(queries, topk=topk) if self._coalescer else self._asked(queries, topk, call))
        if call.failure is not None and not call.asking:
            raise self._told(call.failure)
        if self._breaker.is_open and not call.asking:
            raise RetrieverError(f"the retriever at {self.url} had no turn within {deadline_s:g} s: {self._breaker.state}")
        raise self._told(RetrieverTimeout(f"the retriever at {self.url} did not answer within {deadline_s:g} s"))

    async def _asked(self, queries: Sequence[str], topk: int, call: _Call | None = None) -> list[list[Passage]]:
        """The answer to one request, tried again until the caller's deadline leaves no time for it."""
        call = _Call() if call is None else call
        options: dict[str, Any] = ({"mode": self._mode} if self._mode else {}) | ({"rerank": True} if self._rerank else {})
        body = json.dumps({"queries": list(queries), "topk": topk, "return_scores": True, **options}).encode()
        deadline, pause_s = trio.current_effective_deadline(), FIRST_PAUSE_S
        while True:
            await self._breaker.admission()
            call.asking = True
            outcome = await self._attempt(body, deadline)
            call.asking = False
            if isinstance(outcome, Answer):
                if call.failure is not None:
                    self._budget.pay_back()
                return passages_of(outcome.content, queries=len(queries), topk=topk, url=self.url)
            call.failure, wait_s = outcome
            wait_s = max(wait_s, pause_s * random.uniform(0.5, 1.5))
            if trio.current_time() + wait_s >= deadline:
                raise self._told(call.failure)
            await trio.sleep(wait_s)
            await self._budget.withdraw()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _attempt(self, body: bytes, deadline: float) -> Answer | tuple[RetrieverError, float]:
        """The answer; or why there is none, where another attempt may help, and in how many seconds the server would have it."""
        try:
            response = await self._client.exchange("POST", "/retrieve", body, _JSON)
        except (ResponseTooLarge, httpx.UnsupportedProtocol) as error:
            raise RetrieverError(f"the retriever at {self.url}: {error}") from error
        except httpx.TransportError as error:
            self._breaker.failed(f"{type(error).__name__}: {error}")
            failure = RetrieverError(f"the retriever at {self.url} cannot be reached: {error}")
            failure.__cause__ = error
            return failure, 0.0
        except trio.Cancelled:
            if trio.current_time() >= deadline:
                self._breaker.failed("no answer within the deadline of a call")
            raise
        status, wait_s = response.status_code, _retry_after_s(response)
        if status >= 500 and not wait_s:
            self._breaker.failed(f"status {status}")
        else:  # it is there, though it may be busy: then it says until when
            self._breaker.succeeded()
        if status == 200:
            return response
        failure = RetrieverError(f"the retriever at {self.url} answered {status}: {response.text[:EXCERPT_CHARACTERS]}")
        if status != 429 and status < 500:
            raise failure
        return failure, wait_s

    def _told(self, error: RetrieverError) -> RetrieverError:
        """The error, with what the breaker knows where it is open."""
        if not self._breaker.is_open:
            return error
        told = type(error)(f"{error}; {self._breaker.state}")
        told.__cause__ = error.__cause__
        return told


@dataclass(kw_only=True, slots=True)
class _Call:
    """How far a call has come."""

    asking: bool = False  # rather than pausing, or waiting for a turn
    failure: RetrieverError | None = None  # of its last attempt


_JSON = {"content-type": "application/json"}


def _authorization(token: str | None) -> dict[str, str]:
    if token is None:
        return {}
    if not token or not all("!" <= character <= "~" for character in token):
        raise ValueError("the retriever's token must be printable ASCII without blanks")  # the token itself is never shown
    return {"authorization": f"Bearer {token}"}


def _retry_after_s(response: Answer) -> float:
    """What the server asks for; 0 where it says nothing, or gives a date."""
    text = response.headers.get(b"retry-after", b"")
    return float(text) if text.isdigit() else 0.0
