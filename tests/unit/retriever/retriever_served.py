"""A small index of four cities, and its server in the test's own process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from retriever.app import create_app
from retriever.corpus import Document
from retriever.encoders.hashed import HashedSettings
from retriever.index import Index
from retriever.local import Limits, LocalService
from retriever.metrics import Metrics
from retriever.query import Hit, Query, Vectors

TEXTS = {"Oslo": "Norway", "Rome": "Italy", "Paris": "France", "Zürich": "Schweiz"}
ROWS: list[dict[str, Any]] = [
    {"id": str(i), "contents": f'"{city}"\n{city} lies in {land} .', "n": i} for i, (city, land) in enumerate(TEXTS.items())
]
FOREVER_S = 60.0


def index_of(rows: Sequence[dict[str, Any]]) -> Index:
    """Their index, in memory."""
    documents = [
        Document(id=row["id"], contents=row["contents"], json=json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()) for row in rows
    ]
    return Index.of(documents, HashedSettings(dim=64))


INDEX = index_of(ROWS)


class Held:
    """The index of cities, whose searches wait until they are let go."""

    def __init__(self, index: Index = INDEX, *, held: bool = True) -> None:
        self.index = index
        self.modes, self.reranks, self.identity, self.documents = index.modes, index.reranks, index.identity, index.documents
        self.encode, self.info = index.encode, index.info
        self.busy, self.go = threading.Event(), threading.Event()
        self.searched: list[str] = []
        self.closed = False
        if not held:
            self.go.set()

    def find(self, queries: Sequence[Query], vectors: Vectors) -> list[list[Hit]]:
        self.busy.set()
        assert self.go.wait(FOREVER_S)
        assert not self.closed
        self.searched += [query.text for query in queries]
        return self.index.find(queries, vectors)

    def close(self) -> None:
        self.closed = True


def served(play: Callable[[httpx.AsyncClient], Awaitable[Any]], *, index: Any = None, limits: Limits | None = None, **options: Any) -> Any:
    """What `play` returns, given a client of a server of the index."""

    async def main() -> Any:
        metrics = Metrics()
        service = LocalService(index if index is not None else Held(held=False), limits=limits or Limits(), metrics=metrics)
        app = create_app(service, metrics=metrics, reload=service.reload, **options)
        async with app.router.lifespan_context(app), client_of(app) as client:
            if callable(index):
                await service.opened()
            return await play(client)

    return asyncio.run(main())


def client_of(app: Any) -> httpx.AsyncClient:
    """A client of an app in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://r")


def ask(*bodies: Any, headers: dict[str, str] | None = None, **options: Any) -> list[httpx.Response]:
    """The answers to POST /retrieve, one after another."""

    async def play(client: httpx.AsyncClient) -> list[httpx.Response]:
        contents = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]
        return [await client.post("/retrieve", content=content, headers=headers) for content in contents]

    answers: list[httpx.Response] = served(play, **options)
    return answers
