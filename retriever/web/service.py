"""The web as a `query.Service`: the API of an index, answered by a web search service.

    async with open_web_service("serpapi", cache_dir=None, per_second=1, per_day=None, base_url=None) as service:
        [[best, *others]] = await service.retrieve([Query(text="capital of Norway", topk=3)], deadline_s=10)

A document is `{"id": URL, "contents": "\\"title\\"\\nsnippet", "title", "url"}`: `contents` as in Search-R1's servers for web search
(`serp_search_server.py`, `google_search_server.py`, a14dc3a), whose documents have nothing else. A score is 1 / rank: services tell none.

There is one way to search, called `dense`, for it is the service's own; nothing is reranked. Equal queries are asked once, also while the first
is on its way, and what was answered is kept (`answers.Answers`). Each page of ten results is a request that costs; most queries need one.

A service that answers 429 or 5xx, or cannot be reached, is asked again, after Retry-After where it says so, within the deadline. A quota that is used
up is remembered: until it may be over the service is not asked at all, and what is kept is still answered.

A key is sent to the service and is never in a log, an error or `info()`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, quote_plus

import httpx

from retriever.batching import BatcherClosed, DeadlinePassed, QueueFull
from retriever.query import Found, Mode, Query, Refused, Unsupported
from retriever.web.answers import Answers
from retriever.web.providers import PAGE_RESULTS, Provider, ProviderFailed, QuotaExhausted, Result, open_provider
from retriever.web.rate import DAY_S, RateLimit

__all__ = ["MAX_ANSWER_BYTES", "WebService", "open_web_service"]

MAX_ANSWER_BYTES = 4 * 1024 * 1024  # a page of SerpApi's is some 100 KB
MAX_QUERY_CHARACTERS = 1024  # Google reads 32 words
MAX_WAITING = 1024  # queries in work: at a few a second, more would wait for minutes
MAX_CONNECTIONS = 32
CONNECT_S = 5.0
ATTEMPTS = 4
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
EXHAUSTED_S = 3600  # services do not say until when: asked again once an hour
EXCERPT_CHARACTERS = 300


def open_web_service(
    provider: str,
    *,
    cache_dir: Path | None,
    per_second: float,
    per_day: int | None,
    base_url: str | None,
    environment: Mapping[str, str] = os.environ,
) -> WebService:
    """A service by a provider's name (`serpapi` or `google`), with its key from the environment.

    Args:
        cache_dir: answers are kept here, in `PROVIDER.jsonl`, for a week; None for memory alone.
        per_second: requests to the provider a second.
        per_day: requests in any 24 hours, those told by the cache's file included; None for no limit.
        base_url: used instead of the provider's own URL.

    Raises:
        ValueError: no such provider, no key, or a limit below what makes sense.
        OSError: the cache's file cannot be used.
    """
    opened = open_provider(provider, environment, base_url)
    RateLimit(per_second=per_second, per_day=per_day)  # refuses what makes no sense before a file is made
    answers = Answers(None if cache_dir is None else cache_dir / f"{opened.name}.jsonl")
    return WebService(opened, answers=answers, limit=RateLimit(per_second=per_second, per_day=per_day, spent=answers.request_times()))


class WebService:
    """A `query.Service` over a search service. Enter it before the first call."""

    modes: tuple[Mode, ...] = (Mode.DENSE,)

    def __init__(self, provider: Provider, *, answers: Answers, limit: RateLimit, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._provider = provider
        self._answers = answers
        self._limit = limit
        self._first_pause_s = first_pause_s
        self._transport: httpx.AsyncHTTPTransport | None = None
        self._turns: dict[tuple[str, int], _Turn] = {}
        self._waiting = 0
        self._exhausted: tuple[float, str] = (0.0, "")  # until when, and why
        self._counts = {"answered": 0, "from_cache": 0, "requests": 0, "failed": 0}

    @property
    def identity(self) -> str:
        """The provider: what it finds changes without a word."""
        return f"web:{self._provider.name}"

    async def retrieve(self, queries: Sequence[Query], *, deadline_s: float) -> list[list[Found]]:
        """At most `topk` results per query, best first. One query that fails fails the call; what the others found is kept for the next.

        Raises:
            ProviderFailed, QuotaExhausted: the search service did not answer.
            Unsupported: another mode than `modes`, or reranking.
            QueueFull: too many wait for their turn.
            DeadlinePassed: it took too long.
            BatcherClosed: the service has not been entered, or has been left.
        """
        if self._transport is None:
            raise BatcherClosed()
        if wrong := next((query for query in queries if query.rerank or query.mode not in (None, *self.modes)), None):
            raise Unsupported(
                f"{'rerank' if wrong.rerank else f'mode {wrong.mode}'}: a web search is asked in its own way only, called {self.modes[0]}"
            )
        if self._waiting and self._waiting + len(queries) > MAX_WAITING:
            raise QueueFull(self._waiting)
        self._waiting += len(queries)
        give_up_at = time.monotonic() + deadline_s
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._find(query, give_up_at)) for query in queries]
        except TimeoutError as error:
            raise DeadlinePassed(f"not served within {deadline_s:g} s") from error
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            self._waiting -= len(queries)
        return [task.result() for task in asked]

    async def document(self, id: str) -> bytes | None:
        """A result seen lately, by its URL. The page itself is not fetched."""
        result = self._answers.of_url(id)
        return None if result is None else _document(result)

    def info(self) -> Mapping[str, Any]:
        """The provider, its limits and what has been asked."""
        return {
            "backend": "web",
            "provider": self._provider.name,
            "per_second": self._limit.per_second,
            "per_day": self._limit.per_day,
            "spent_today": self._limit.spent_today,
            "cached": len(self._answers),
            "expiry_s": self._answers.expiry_s,
            **self._counts,
            **({"cache_error": self._answers.write_error} if self._answers.write_error else {}),
        }

    async def __aenter__(self) -> Self:
        # The transport itself: httpx's client logs every URL, and with it the key.
        self._transport = httpx.AsyncHTTPTransport(trust_env=False, limits=httpx.Limits(max_connections=MAX_CONNECTIONS))
        return self

    async def __aexit__(self, *raised: object) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()
        self._answers.close()

    async def _find(self, query: Query, give_up_at: float) -> list[Found]:
        text = " ".join(query.text.split())[:MAX_QUERY_CHARACTERS]
        if not text:
            return []
        asked_for = math.ceil(query.topk / PAGE_RESULTS) * PAGE_RESULTS
        results = self._answers.get(text, asked_for)
        if results is not None:
            self._counts["from_cache"] += 1
        else:
            async with self._turn((text, asked_for)):
                results = self._answers.get(text, asked_for)  # the one before may have asked for it
                if results is None:
                    results = await self._ask(text, asked_for, give_up_at)
                else:
                    self._counts["from_cache"] += 1
        self._counts["answered"] += 1
        return [Found(document=_document(result), score=1 / rank) for rank, result in enumerate(results[: query.topk], start=1)]

    @asynccontextmanager
    async def _turn(self, key: tuple[str, int]) -> AsyncIterator[None]:
        """One at a time for equal queries; a turn that is cancelled goes to the next."""
        turn = self._turns.setdefault(key, _Turn())
        turn.takers += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.takers -= 1
            if not turn.takers:
                self._turns.pop(key, None)

    async def _ask(self, text: str, asked_for: int, give_up_at: float) -> tuple[Result, ...]:
        found: dict[str, Result] = {}
        requests = 0
        while len(found) < asked_for and requests * PAGE_RESULTS < asked_for:
            page = await self._page(text, requests * PAGE_RESULTS, give_up_at)
            requests += 1
            new = {result.url: result for result in page if result.url not in found}
            if not new:
                break
            found.update(new)
        results = tuple(found.values())[:asked_for]
        self._answers.put(text, asked_for, results, requests=requests)
        return results

    async def _page(self, text: str, first: int, give_up_at: float) -> list[Result]:
        """A page of results, asked for until it is answered, refused, or out of time."""
        parameters = self._provider.parameters(text, first)
        for attempt in range(1, ATTEMPTS + 1):
            self._check_quota()
            turn = await self._limit.turn(within_s=give_up_at - time.monotonic())
            self._check_quota()  # it may have been used up by those before
            self._counts["requests"] += 1
            try:
                status, retry_after_s, content = await self._get(parameters, turn)
                outcome = self._read(status, content)
            except httpx.TransportError as error:
                status, retry_after_s, outcome = 0, 0.0, f"cannot be reached: {type(error).__name__} {error}"
            except (ProviderFailed, QuotaExhausted):
                self._counts["failed"] += 1
                raise
            if not isinstance(outcome, str):
                return outcome
            self._counts["failed"] += 1
            longest_s = min(LONGEST_PAUSE_S, self._first_pause_s * 2 ** (attempt - 1))
            pause_s = max(retry_after_s, longest_s * random.uniform(0.5, 1.5))
            if attempt == ATTEMPTS or time.monotonic() + pause_s >= give_up_at:
                message = self._shown(outcome)
                raise QuotaExhausted(message, math.ceil(max(1.0, pause_s))) if status == 429 else ProviderFailed(message)
            await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def _check_quota(self) -> None:
        until, reason = self._exhausted
        if time.monotonic() < until:
            raise QuotaExhausted(reason, math.ceil(until - time.monotonic()))

    async def _get(self, parameters: Mapping[str, str], turn: float) -> tuple[int, float, bytes]:
        """Status, seconds of Retry-After, and content. The turn does not count where no connection came about."""
        if self._transport is None:
            raise BatcherClosed()
        headers = {"accept": "application/json", "accept-encoding": "identity"}  # a cap would not bound what compressed content unpacks to
        sent = False

        async def traced(event: str, info: Mapping[str, Any]) -> None:
            nonlocal sent
            sent = sent or event.endswith("send_request_headers.started")

        extensions = {"timeout": httpx.Timeout(None, connect=CONNECT_S).as_dict(), "trace": traced}
        request = httpx.Request("GET", self._provider.url, params=dict(parameters), headers=headers, extensions=extensions)
        try:
            response = await self._transport.handle_async_request(request)
        except BaseException:
            if not sent:
                self._limit.uncount(turn)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ProviderFailed(f"{self._provider.name} answered compressed content, which was not asked for")
            parts, size = [], 0
            async for part in response.stream:
                size += len(part)
                if size > MAX_ANSWER_BYTES:
                    raise ProviderFailed(f"{self._provider.name} answered more than {MAX_ANSWER_BYTES} bytes")
                parts.append(part)
        finally:
            await response.stream.aclose()
        return response.status_code, _retry_after_s(response.headers.get("retry-after", "")), b"".join(parts)

    def _read(self, status: int, content: bytes) -> list[Result] | str:
        """Results, or what went wrong where asking again may help.

        Raises:
            ProviderFailed, QuotaExhausted: asking again will not help.
        """
        try:
            answer: Any = json.loads(content)
        except (ValueError, RecursionError):  # not JSON, not UTF-8, lists in lists in lists
            answer = None
        results = None
        if status == 200:
            try:
                results = self._provider.results(answer) if isinstance(answer, dict) else None
            except ValueError as error:
                raise ProviderFailed(self._shown(f"answered something else than results: {error}")) from None
            if results is not None:
                return results
            if not isinstance(answer, dict) or "error" not in answer:
                raise ProviderFailed(self._shown(f"answered something else than results: {content[:EXCERPT_CHARACTERS]!r}"))
        trouble = self._provider.trouble(answer)
        said = f"answered {status}: {trouble.message or content[:EXCERPT_CHARACTERS].decode(errors='replace')}"
        if trouble.exhausted:
            self._exhausted = time.monotonic() + EXHAUSTED_S, self._shown(said)
            raise QuotaExhausted(self._exhausted[1], EXHAUSTED_S)
        if status in (401, 403):
            raise ProviderFailed(self._shown(f"refused the key in {' and '.join(self._provider.key_variables)}: it {said}"))
        if 300 <= status < 500 and status != 429:
            raise ProviderFailed(self._shown(said))
        return said

    def _shown(self, message: str) -> str:
        """A message of the service's or about it, cut, without its keys in any spelling."""
        text = f"the search service {self._provider.name} {message}"
        for secret in self._provider.secrets:
            for spelling in (secret, quote(secret, safe=""), quote_plus(secret)):
                text = text.replace(spelling, "***")
        return text[: 2 * EXCERPT_CHARACTERS]


class _Turn:
    """Whose turn it is to ask for one query."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.takers = 0


def _document(result: Result) -> bytes:
    contents = f'"{result.title or "No title."}"\n{result.snippet or "No snippet available."}'  # the words for what is missing are Search-R1's
    return json.dumps({"id": result.url, "contents": contents, "title": result.title, "url": result.url}, ensure_ascii=False).encode()


def _retry_after_s(text: str) -> float:
    """Seconds, told as such or as a date, a day at most; 0 where it is neither."""
    if text.isascii() and text.isdigit():
        return min(float(text), DAY_S)
    try:
        return min(max(0.0, parsedate_to_datetime(text).timestamp() - time.time()), DAY_S)
    except (ValueError, OverflowError):
        return 0.0


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """One error for all: of those that belong to the API if there are such."""
    own = group.subgroup(Refused)
    found: BaseException = own if own is not None else group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
