"""The HTTP API: Search-R1's `POST /retrieve`, and what a server needs beside it.

    {"queries": ["capital of Norway"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "7", "contents": "\\"Oslo\\"\\nOslo is ..."}, "score": 0.83}, ...]]}

Without scores (the default) a hit is the document itself.

    POST /retrieve          documents for queries                 GET /health         the process lives
    GET  /documents/{id}    one document                          GET /ready          it answers; 503 with the progress of loading before
    POST /access            documents by URL, ASearcher's way     GET /info /metrics /openapi.json
    POST /admin/reload      open the index again

Wrong requests are answered by 400 (not JSON), 401 (no token), 413 (too large) or 422 (another shape), an overloaded server by 503 with
Retry-After, a passed deadline by 504; always as `{"detail": what was expected}`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from types import TracebackType
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from retriever.api import (
    JSON,
    MAX_BODY_BYTES,
    MSGPACK,
    WrongRequest,
    document_bytes,
    documents_bytes,
    parse_access,
    parse_retrieve,
    retrieve_bytes,
)
from retriever.batching import BatcherClosed
from retriever.local import Reloaded
from retriever.metrics import CONTENT_TYPE, Metrics
from retriever.openapi import openapi
from retriever.query import NotReady, Refused, Service

__all__ = ["DEADLINE_S", "create_app"]

DEADLINE_S = 60.0
BODY_S = 20.0  # for all of a body to arrive: of 2 MB at 1 Mbit/s
CLIENT_GONE = 499  # nobody reads it; it is in /metrics
MAX_DEADLINE_DIGITS = 9  # of milliseconds: 11 days
OPEN_PATHS = ("/health", "/ready")  # what a load balancer asks; they tell nothing of the documents
READY_FIELDS = ("documents", "modes", "identity", "waiting")  # of /info
ROUTES = {"/retrieve", "/documents", "/access", "/health", "/ready", "/info", "/metrics", "/openapi.json", "/admin"}
MEDIA = (JSON.encode(), MSGPACK.encode())  # by whether msgpack is wanted
UNAUTHORISED = ((b"www-authenticate", b"Bearer"), (b"connection", b"close"))  # a body that came with it is not read
PHP_PATH, PHP_QUERY = "index.php/", "index.php?title="
INTERNAL = "the server failed: its log says how"


def create_app(
    service: Service,
    *,
    topk: int = 3,
    token: str | None = None,
    deadline_s: float = DEADLINE_S,
    reload: Callable[[], Awaitable[Reloaded]] | None = None,
    metrics: Metrics | None = None,
) -> Starlette:
    """The server's application. The service is entered when it starts and left when it ends.

    Args:
        topk: hits per query where a request does not say.
        token: what a request must bring (`Authorization: Bearer TOKEN`), but to /health and /ready; None: nobody is asked.
        deadline_s: of a request that brings none (`X-Deadline-Ms`), and the longest of those that do.
        reload: what POST /admin/reload does; None: it is answered by 404.
        metrics: counted here besides what the service counts.
    """
    metrics = metrics or Metrics()
    retrieve = _Retrieve(service=service, metrics=metrics, topk=topk, deadline_s=deadline_s)
    routes = _Routes(service=service, metrics=metrics, reload=reload, token=token is not None)
    return _App(service, retrieve, routes, metrics, token)


class _App(Starlette):
    """Requests to /retrieve go past Starlette's router and middleware, which would take as long as all else does beside the search."""

    def __init__(self, service: Service, retrieve: _Retrieve, routes: _Routes, metrics: Metrics, token: str | None) -> None:
        self._service, self._retrieve, self._metrics = service, retrieve, metrics
        self._token = None if token is None else token.encode()
        handlers: Mapping[Any, Any] = {HTTPException: _http_error, Refused: _refused, Exception: _failed}
        super().__init__(routes=[Route("/retrieve", retrieve, methods=["POST"]), *routes.all()], lifespan=self._lifespan, exception_handlers=handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        path = scope["path"]
        if self._token is not None and path not in OPEN_PATHS and not _allowed(scope, self._token):
            await _answer(send, 401, _detail("a bearer token is needed: Authorization: Bearer TOKEN"), headers=UNAUTHORISED)
            self._metrics.requests[_route(path), 401] += 1
        elif path == "/retrieve" and scope["method"] == "POST":
            await self._retrieve(scope, receive, send)
        else:
            await super().__call__(scope, receive, self._counting(path, send))

    def _counting(self, path: str, send: Send) -> Send:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests[_route(path), message["status"]] += 1
            await send(message)

        return counted

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self._service:
            yield


@dataclass(frozen=True, kw_only=True, slots=True)
class _Retrieve:
    """POST /retrieve."""

    service: Service
    metrics: Metrics
    topk: int
    deadline_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = perf_counter()
        try:
            head = _head(scope, self.deadline_s)
            asked = parse_retrieve(await _body(receive, head), packed=head.packed, default_topk=self.topk)
            with _Connected(receive):
                found = await self.service.retrieve(asked.queries, deadline_s=head.deadline_s)
            body = retrieve_bytes(found, asked, packed=head.wants_packed)
        except Refused as error:
            self.metrics.requests["/retrieve", error.status] += 1
            await _answer(send, error.status, _detail(str(error)), headers=_headers(error))
        except Exception:
            self.metrics.requests["/retrieve", 500] += 1
            await _answer(send, 500, _detail(INTERNAL))
            raise
        else:
            await _answer(send, 200, body, MEDIA[head.wants_packed])
            self.metrics.answered(len(asked.queries), perf_counter() - started)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Routes:
    """What is asked less often."""

    service: Service
    metrics: Metrics
    reload: Callable[[], Awaitable[Reloaded]] | None
    token: bool

    def all(self) -> list[Route]:
        return [
            Route("/documents/{id:path}", self.document),
            Route("/access", self.access, methods=["POST"]),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/info", self.info),
            Route("/metrics", self.prometheus),
            Route("/openapi.json", self.description),
            Route("/admin/reload", self.reloaded, methods=["POST"]),
        ]

    async def document(self, request: Request) -> Response:
        id = request.path_params["id"]
        document = await self.service.document(id)
        if document is None:
            raise HTTPException(404, f"there is no document with the id {id!r}")
        packed = _head(request.scope, 0.0).wants_packed
        return Response(document_bytes(document, packed=packed), media_type=MSGPACK if packed else JSON)

    async def access(self, request: Request) -> Response:
        head = _head(request.scope, 0.0)
        urls = parse_access(await _body(request.receive, head), packed=head.packed)
        documents = [await self._page(url) for url in urls]
        return Response(documents_bytes(documents, packed=head.wants_packed), media_type=MSGPACK if head.wants_packed else JSON)

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        try:
            info = self.service.info()
        except NotReady as error:
            progress = {"doing": error.doing, "done": error.done, "of": error.of}
            return _json({"status": "loading", "detail": str(error), "progress": progress}, 503, _headers(error))
        return _json({"status": "ready", **{name: info[name] for name in READY_FIELDS if name in info}})

    async def info(self, request: Request) -> Response:
        return _json(dict(self.service.info()))

    async def prometheus(self, request: Request) -> Response:
        return Response(self.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def description(self, request: Request) -> Response:
        try:
            reranks = self.service.info().get("reranker") is not None
        except NotReady:
            reranks = True  # perhaps: it is being opened
        return _json(openapi(self.service.modes, reranks=reranks, reload=self.reload is not None, token=self.token))

    async def reloaded(self, request: Request) -> Response:
        if self.reload is None:
            raise HTTPException(404, "there is nothing to reload: this server has no index that could be opened again")
        return _json(asdict(await self.reload()))

    async def _page(self, url: str) -> bytes | None:
        """The document whose id is the URL. Links of PHP wikis are looked up in their other form, too, as ASearcher's server does."""
        found = await self.service.document(url)
        return found if found is not None or PHP_PATH not in url else await self.service.document(url.replace(PHP_PATH, PHP_QUERY))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """What a request's headers say."""

    packed: bool
    wants_packed: bool
    deadline_s: float
    length: int


def _head(scope: Scope, deadline_s: float) -> _Head:
    packed = wants_packed = False
    length = 0
    for name, value in scope["headers"]:
        if name == b"content-type":
            packed = b"msgpack" in value
        elif name == b"accept":
            wants_packed = b"msgpack" in value
        elif name == b"x-deadline-ms":
            if not value.isdigit() or len(value) > MAX_DEADLINE_DIGITS or not int(value):
                raise WrongRequest("x-deadline-ms must be a whole number of milliseconds")
            deadline_s = min(deadline_s, int(value) / 1000)
        elif name == b"content-length":
            length = int(value)
    return _Head(packed=packed, wants_packed=wants_packed, deadline_s=deadline_s, length=length)


async def _body(receive: Receive, head: _Head) -> bytes:
    if head.length > MAX_BODY_BYTES:
        raise _BodyRefused(f"the body has {head.length} bytes: at most {MAX_BODY_BYTES}", status=413)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _ClientLeft
                part = message.get("body", b"")
                if not message.get("more_body", False) and not parts and len(part) <= MAX_BODY_BYTES:
                    return bytes(part)
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise _BodyRefused(f"the body exceeds {MAX_BODY_BYTES} bytes", status=413)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as error:
        raise _BodyRefused(f"the body did not arrive within {BODY_S:g} s", status=408) from error


class _BodyRefused(Refused):
    """The rest of the body is not read: the connection is closed."""


class _ClientLeft(Refused):
    status = CLIENT_GONE

    def __init__(self) -> None:
        super().__init__("the client left")


class _Connected:
    """Cancels what is in the block when the client leaves. What is answered at once starts nothing."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._left = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._start = asyncio.get_running_loop().call_soon(self._watch)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._start.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if kind is asyncio.CancelledError:  # by the watcher, or by a server that has waited long enough for its last requests
            assert self._task is not None
            self._task.uncancel()
            raise _ClientLeft if self._left else BatcherClosed from None

    def _watch(self) -> None:
        self._watcher = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        assert self._task is not None
        self._task.cancel()


async def _answer(send: Send, status: int, body: bytes, media: bytes = MEDIA[False], *, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    own = [(b"content-type", media), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})


def _allowed(scope: Scope, expected: bytes) -> bool:
    """Whether the request brings the token. Takes as long whatever it brings."""
    brought = [value for name, value in scope["headers"] if name == b"authorization"]
    return any(value[:7].lower() == b"bearer " and hmac.compare_digest(value[7:].strip(), expected) for value in brought)


def _route(path: str) -> str:
    """A route's name in the metrics: one for all that do not exist."""
    route = "/" + path[1:].partition("/")[0]
    return route if route in ROUTES else "other"


def _headers(error: Refused) -> list[tuple[bytes, bytes]]:
    headers = [] if error.retry_after_s is None else [(b"retry-after", b"%d" % error.retry_after_s)]
    return [*headers, (b"connection", b"close")] if isinstance(error, _BodyRefused) else headers


def _detail(message: str) -> bytes:
    return json.dumps({"detail": message}, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _json(value: Mapping[str, Any], status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> Response:
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(body, status, {name.decode(): text.decode() for name, text in headers}, JSON)


async def _http_error(request: Request, error: HTTPException) -> Response:
    headers = [(name.encode(), value.encode()) for name, value in (error.headers or {}).items()]
    return _json({"detail": error.detail}, error.status_code, headers)


async def _refused(request: Request, error: Refused) -> Response:
    return _json({"detail": str(error)}, error.status, _headers(error))


async def _failed(request: Request, error: Exception) -> Response:
    return _json({"detail": INTERNAL}, 500)
