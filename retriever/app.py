"""The HTTP API: Search-R1's `POST /retrieve`, and `GET /health`, `GET /ready`.

    {"queries": ["capital of Norway"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "7", "contents": "\\"Oslo\\"\\nOslo is ..."}, "score": 0.83}, ...]]}

Without scores (the default) a hit is the document itself. Wrong requests are answered by 400 (not JSON), 413 (too large) or 422 (JSON of
another shape), an overloaded server by 503 with Retry-After, a passed deadline by 504; always as `{"detail": what was expected}`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retriever.batching import Batcher, BatcherClosed, DeadlinePassed, QueueFull
from retriever.index import Hit, Index

__all__ = ["MAX_BODY_BYTES", "MAX_QUERIES", "MAX_TOPK", "Query", "create_app"]

MAX_BODY_BYTES = 2 * 1024 * 1024
MAX_QUERIES = 1024
MAX_TOPK = 100
MAX_BATCH = 256
MAX_WAITING = 4096
DEADLINE_S = 60.0
CLIENT_GONE = 499  # nobody reads it; it is in logs

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """One query of a request."""

    text: str
    topk: int


def create_app(index: Index, *, topk: int = 3, max_waiting: int = MAX_WAITING, deadline_s: float = DEADLINE_S) -> Starlette:
    """The server's application.

    Args:
        topk: hits per query where a request does not say.
        max_waiting: queries that may wait before further requests are refused.
    """
    batcher = Batcher[Query, list[Hit]](partial(_search, index), max_batch=MAX_BATCH, max_waiting=max_waiting)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with batcher:
            yield

    async def retrieve(request: Request) -> Response:
        queries, with_scores = _parse(await _body(request), topk)
        hits = await _unless_gone(request, batcher.submit(queries, deadline_s=deadline_s))
        return Response(_answer(index, hits, with_scores), media_type="application/json")

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        return JSONResponse({"status": "ready", "documents": len(index), "dim": index.encoder.settings.dim, "waiting": batcher.waiting})

    routes = [
        Route("/retrieve", retrieve, methods=["POST"]),
        Route("/health", health),
        Route("/ready", ready),
    ]
    handlers = {HTTPException: _http_error, QueueFull: _overloaded, DeadlinePassed: _too_late, BatcherClosed: _ending}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


def _search(index: Index, queries: list[Query]) -> list[list[Hit]]:
    hits = index.search([query.text for query in queries], max((query.topk for query in queries), default=0))
    return [some[: query.topk] for query, some in zip(queries, hits, strict=True)]


def _answer(index: Index, hits: Sequence[Sequence[Hit]], with_scores: bool) -> bytes:
    """The JSON of an answer. Documents are JSON already: they are spliced in as they are."""
    if with_scores:
        lists = [[b'{"document":%s,"score":%s}' % (index.documents[hit.row], repr(hit.score).encode()) for hit in some] for some in hits]
    else:
        lists = [[index.documents[hit.row] for hit in some] for some in hits]
    return b'{"result":[' + b",".join(b"[" + b",".join(some) + b"]" for some in lists) + b"]}"


def _parse(body: bytes, default_topk: int) -> tuple[list[Query], bool]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8, or a number of thousands of digits
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise HTTPException(422, f'expected {{"queries": [...], "topk": 3, "return_scores": false}}, got {type(value).__name__}')
    queries, topk, with_scores = value.get("queries"), value.get("topk"), value.get("return_scores")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise HTTPException(422, "queries must be a list of strings")
    if len(queries) > MAX_QUERIES:
        raise HTTPException(413, f"{len(queries)} queries in one request: at most {MAX_QUERIES}")
    topk = default_topk if topk is None else topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise HTTPException(422, f"topk must be an integer from 1 to {MAX_TOPK}")
    if with_scores is not None and not isinstance(with_scores, bool):
        raise HTTPException(422, "return_scores must be true or false")
    return [Query(text=query.encode("utf-8", "replace").decode(), topk=topk) for query in queries], bool(with_scores)


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """The outcome of `work`, which is cancelled when the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(CLIENT_GONE, "the client left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


async def _overloaded(request: Request, error: Exception) -> Response:
    assert isinstance(error, QueueFull)
    return JSONResponse({"detail": str(error)}, 503, {"retry-after": str(error.retry_after_s)})


async def _too_late(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 504)


async def _ending(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 503, {"retry-after": "1"})
