"""The service over an index on this machine.

    async with LocalService(index) as service:
        [found] = await service.retrieve([Query(text="capital of Norway", topk=3)], deadline_s=10)

What was asked lately is answered from a cache, in the event loop. Everything else goes through a batcher: one thread tokenises, encodes,
searches and fetches documents, so that nothing is shared between threads and the event loop reads no file but for a document that is asked
for by its id. An index, its batcher and its cache are one engine. To reload is to swap the engine: requests that the old one took in are
answered by it, then its files are closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Self

from retriever.batching import Batcher, BatcherClosed
from retriever.cache import AnswerCache
from retriever.metrics import Metrics
from retriever.query import MAX_QUERY_CHARACTERS, Found, Mode, NotReady, Progress, Query, Refused, Unsupported, Vectors
from retriever.reload import Opener, Searchable

__all__ = ["Limits", "LocalService", "ReloadFailed", "Reloaded"]

CHARACTERS_PER_TOKEN = 4  # of English questions, and a little less of most other text
SPECIAL_TOKENS = 2
MAX_QUERY_TOKENS = 512  # what encoders read of a query at most: longer ones weigh no more


class ReloadFailed(Refused):
    """The index was not opened again. The one opened before goes on."""

    status = 409


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of a service's queue, batches and cache."""

    max_batch: int = 64  # queries: a larger one gains nothing on a CPU, and everybody in it waits for all of it
    max_batch_tokens: int = 16_384  # estimated, as Text Embeddings Inference's default (its README, 1.8)
    max_waiting: int = 4096  # queries; further requests are refused with 503
    cache_entries: int = 32_768
    cache_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Reloaded:
    """What a reload did."""

    identity: str
    changed: bool  # whether it is another index than before
    modes: tuple[Mode, ...]  # that can be asked for now; the first is the default
    seconds: float  # to open, check and warm it


class LocalService:
    """Answers queries from an index. Enter it before use; it closes the index at its end.

    Args:
        index: one, or what opens one, told how far it is: then it is opened in a thread when the service is entered, requests are refused
            with NotReady until it is, and `reload` opens it again.
        overlap: encode a batch while the one before is searched for: worth it with a GPU, or with more cores than one.
        report: told how far the opening is, in its thread.
    """

    def __init__(
        self,
        index: Searchable | Callable[[Progress], Searchable],
        *,
        limits: Limits = Limits(),
        overlap: bool = False,
        metrics: Metrics | None = None,
        report: Progress = lambda what, done, of: None,
    ) -> None:
        self._given: Searchable | None = None if callable(index) else index
        self._opener: Opener | None = Opener(index, report) if callable(index) else None
        self._limits, self._overlap = limits, overlap
        self._metrics = metrics or Metrics()
        self._engine: _Engine | None = None
        self._reloading = asyncio.Lock()

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Of its index; all of them while it is being opened."""
        return self._engine.index.modes if self._engine is not None else tuple(Mode)

    @property
    def identity(self) -> str:
        """The index's."""
        return self._ready().index.identity

    @property
    def waiting(self) -> int:
        """Queries in the queue."""
        return self._engine.batcher.waiting if self._engine is not None else 0

    async def retrieve(self, queries: Sequence[Query], *, deadline_s: float) -> list[list[Found]]:
        """At most `topk` documents per query, best first.

        Raises:
            NotReady, Unsupported, QueueFull, DeadlinePassed, BatcherClosed: it was not served.
        """
        engine = self._ready()
        asked = [_checked(query, engine.index) for query in queries]
        found = [engine.cache.get(query) for query in asked]
        missing = [query for query, some in zip(asked, found, strict=True) if some is None]
        if missing:
            fresh = iter(await engine.batcher.submit(missing, deadline_s=deadline_s))
            for i, some in enumerate(found):
                if some is None:
                    found[i] = some = next(fresh)
                    engine.cache.put(asked[i], some)
        return [some for some in found if some is not None]

    async def document(self, id: str) -> bytes | None:
        """The document of an id, as it is served. Read in the event loop: it is two pages of a mapped file."""
        documents = self._ready().index.documents
        row = documents.row_of(id)
        return None if row is None else documents[row]

    def info(self) -> Mapping[str, Any]:
        """The index's, and the service's own limits.

        Raises:
            NotReady: the index is still being opened.
        """
        engine = self._ready()
        own = {"overlap": self._overlap, "max_batch": self._limits.max_batch, "max_batch_tokens": self._limits.max_batch_tokens}
        return {**engine.index.info(), "modes": list(engine.index.modes), "waiting": self.waiting, "batching": own}

    async def opened(self) -> None:
        """Wait until requests are answered.

        Raises:
            Exception: what opening the index raised.
        """
        await asyncio.shield(self._opening)

    async def reload(self) -> Reloaded:
        """Open the index again, and serve the new one once it has answered a query. No request is refused or lost meanwhile.

        Raises:
            ReloadFailed: it cannot be served. The old one goes on.
            Unsupported: this service was given an index, and cannot open another.
        """
        if self._opener is None:
            raise Unsupported("this server was given an index in memory: there is nothing to open again")
        async with self._reloading:
            old, started = self._ready(), perf_counter()
            try:
                index = await asyncio.wrap_future(self._thread.submit(self._opener.open))
            except Exception as error:  # whatever is wrong with the new one, the old one goes on
                self._metrics.reloads["failed"] += 1
                raise ReloadFailed(f"the index cannot be served: {error}. The one opened before goes on") from error
            default = old.index.modes[0]
            if default not in index.modes:
                index.close()
                self._metrics.reloads["failed"] += 1
                raise ReloadFailed(
                    f"the index there now is searched by {', '.join(index.modes)}, and not by {default}, which requests get that name no mode. "
                    "The one opened before goes on: start a server of the new one beside it"
                )
            changed = index.identity != old.index.identity
            self._engine = self._started(index, None if changed else old.cache)  # from here on nothing new comes to the old one
            self._metrics.reloads["done"] += 1
            await old.batcher.aclose()
            old.index.close()
            return Reloaded(identity=index.identity, changed=changed, modes=tuple(index.modes), seconds=perf_counter() - started)

    async def __aenter__(self) -> Self:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="opening")
        if self._opener is not None:
            self._opening = asyncio.wrap_future(self._thread.submit(self._opener.open))
            self._opening.add_done_callback(self._opened)
        elif self._given is not None:
            self._opening = asyncio.get_running_loop().create_future()
            self._opening.set_result(self._given)
            self._engine = self._started(self._given, None)
        self._metrics.cache = lambda: self._engine.cache if self._engine is not None else None
        self._metrics.batcher = lambda: self._engine.batcher if self._engine is not None else None
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._opener is not None:
            self._opener.stop()
        self._opening.cancel()
        if self._engine is not None:
            await self._engine.batcher.__aexit__(None, None, None)
            self._engine.index.close()
        self._thread.shutdown(wait=False)

    def _opened(self, opening: asyncio.Future[Searchable]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            self._engine = self._started(opening.result(), None)

    def _started(self, index: Searchable, cache: AnswerCache | None) -> _Engine:
        limits = self._limits
        batcher: Batcher[Query, Vectors, list[Found]] = Batcher(
            index.encode,
            partial(_find, index),
            max_batch=limits.max_batch,
            max_weight=limits.max_batch_tokens,
            max_waiting=limits.max_waiting,
            weigh=_tokens,
            overlap=self._overlap,
            observe=self._metrics.batch,
        )
        batcher.start()
        fresh = AnswerCache(limits.cache_entries, limits.cache_bytes)
        return _Engine(index=index, batcher=batcher, cache=fresh if cache is None else cache)  # an empty one is false, and counts on

    def _ready(self) -> _Engine:
        if self._engine is None:
            raise NotReady(*self._opener.progress) if self._opener is not None else BatcherClosed()
        return self._engine


@dataclass(frozen=True, kw_only=True, slots=True)
class _Engine:
    index: Searchable
    batcher: Batcher[Query, Vectors, list[Found]]
    cache: AnswerCache


def _find(index: Searchable, queries: list[Query], vectors: Vectors) -> list[list[Found]]:
    documents = index.documents
    return [[Found(document=documents[hit.row], score=hit.score) for hit in hits] for hits in index.find(queries, vectors)]


def _checked(query: Query, index: Searchable) -> Query:
    if query.mode is not None and query.mode not in index.modes:
        raise Unsupported(f"mode {query.mode}: this index is searched by {' or '.join(index.modes)}")
    if query.rerank and not index.reranks:
        raise Unsupported("rerank: this server has no reranker (serve --reranker MODEL)")
    return query if len(query.text) <= MAX_QUERY_CHARACTERS else replace(query, text=query.text[:MAX_QUERY_CHARACTERS])


def _tokens(query: Query) -> int:
    """About how many an encoder reads of it."""
    return min(len(query.text) // CHARACTERS_PER_TOKEN, MAX_QUERY_TOKENS) + SPECIAL_TOKENS
