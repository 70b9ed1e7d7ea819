"""The OpenAPI document of the HTTP API, kept true by a test that asks the server everything it allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retriever.api import JSON, MAX_CHARACTERS, MAX_FIELDS, MAX_QUERIES, MAX_TOPK, MAX_URLS, MSGPACK
from retriever.query import Mode

__all__ = ["openapi"]

Schema = dict[str, Any]


def openapi(modes: Sequence[Mode], *, reranks: bool, reload: bool, token: bool) -> Schema:
    """The document.

    Args:
        modes: that this server's documents can be found by.
        reranks: whether a request may ask for it.
        reload: whether there is /admin/reload.
        token: whether a bearer token is needed.
    """
    paths: Schema = {
        "/retrieve": {"post": _retrieve(modes, reranks)},
        "/documents/{id}": {"get": _document()},
        "/access": {"post": _access()},
        "/health": {"get": {**_get("health", "The process lives.", _object({"status": {"const": "ok"}})), "security": []}},
        "/ready": {"get": {**_get("ready", "It answers queries.", {"type": "object"}, 503), "security": []}},
        "/info": {"get": _get("info", "What is served, and how.", {"type": "object"}, 503)},
        "/metrics": {"get": _metrics()},
        "/openapi.json": {"get": _get("openapi", "This document.", {"type": "object"})},
    }
    if reload:
        kinds: dict[str, Schema] = {"identity": {"type": "string"}, "changed": {"type": "boolean"}, "seconds": {"type": "number"}}
        answer = _object({**kinds, "modes": {"type": "array", "items": {"enum": [*map(str, Mode)]}}})
        paths["/admin/reload"] = {"post": _get("reload", "Open the index again; the one opened before serves meanwhile.", answer, 409, 503)}
    document: Schema = {"openapi": "3.1.0", "info": {"title": "retriever", "version": "1"}, "paths": paths}
    if token:
        document["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        document["security"] = [{"token": []}]
        _add_401(paths)
    return document


def _retrieve(modes: Sequence[Mode], reranks: bool) -> Schema:
    body = {
        "type": "object",
        "properties": {
            "queries": {"type": ["array", "null"], "items": {"type": "string"}, "description": f"413 for more than {MAX_QUERIES}"},
            "query": {"type": ["string", "null"], "description": "instead of queries: one"},
            "topk": {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_TOPK},
            "return_scores": {"type": ["boolean", "null"]},
            "mode": {"enum": [*map(str, modes), None]},
            "rerank": {"type": ["boolean", "null"]} if reranks else {"enum": [False, None], "description": "this server has no reranker"},
            "fields": {"type": ["array", "null"], "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_FIELDS},
            "max_chars": {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_CHARACTERS},
        },
        "oneOf": [
            {"required": ["queries"], "properties": {"queries": {"type": "array"}, "query": {"type": "null"}}},
            {"required": ["query"], "properties": {"queries": {"type": "null"}, "query": {"type": "string"}}},
        ],
    }
    document = {"type": "object", "description": "as it is in the corpus: id, contents and more"}
    scored = {"type": "object", "required": ["document", "score"], "properties": {"document": document, "score": {"type": "number"}}}
    hits = {"type": "array", "items": {"anyOf": [scored, document]}}
    deadline = {"name": "X-Deadline-Ms", "in": "header", "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999}}
    return {
        "operationId": "retrieve",
        "summary": "Documents for queries, best first.",
        "parameters": [deadline],
        "requestBody": {"required": True, "content": {JSON: {"schema": body}, MSGPACK: {"schema": body}}},
        "responses": _responses(_object({"result": {"type": "array", "items": hits}}), 400, 408, 413, 422, 503, 504, packed=True),
    }


def _document() -> Schema:
    return {
        "operationId": "document",
        "summary": "The document of an id.",
        "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}],
        "responses": _responses({"type": "object"}, 404, 503, packed=True),
    }


def _access() -> Schema:
    body = {
        "type": "object",
        "required": ["urls"],
        "properties": {"urls": {"type": "array", "items": {"type": "string"}, "description": f"413 for more than {MAX_URLS}"}},
    }
    pages = _object({"result": {"type": "array", "items": {"type": ["object", "null"]}}})
    return {
        "operationId": "access",
        "summary": "The documents whose ids are these URLs; null where there is none.",
        "requestBody": {"required": True, "content": {JSON: {"schema": body}, MSGPACK: {"schema": body}}},
        "responses": _responses(pages, 400, 408, 413, 422, 503, packed=True),
    }


def _metrics() -> Schema:
    text = {"200": {"description": "Prometheus' text", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    return {"operationId": "metrics", "summary": "Counts and times.", "responses": text | _errors(501)}


def _get(name: str, summary: str, schema: Schema, *statuses: int) -> Schema:
    return {"operationId": name, "summary": summary, "responses": _responses(schema, *statuses)}


def _responses(schema: Schema, *statuses: int, packed: bool = False) -> Schema:
    content = {media: {"schema": schema} for media in ((JSON, MSGPACK) if packed else (JSON,))}
    return {"200": {"description": "as asked", "content": content}} | _errors(*statuses)


def _errors(*statuses: int) -> Schema:
    detail = {JSON: {"schema": _object({"detail": {"type": "string"}})}}
    return {str(status): {"description": MEANINGS[status], "content": detail} for status in statuses}


def _object(properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _add_401(paths: Schema) -> None:
    for operations in paths.values():
        for operation in operations.values():
            if "security" not in operation:
                operation["responses"] |= _errors(401)


MEANINGS = {
    400: "the body is not JSON, or not msgpack",
    401: "no token, or a wrong one",
    404: "there is none",
    408: "the body did not arrive",
    409: "the index cannot be served: the one opened before goes on",
    413: "too large",
    422: "the body has another shape",
    501: "prometheus-client is not installed",
    503: "not ready, or too much is waiting: see Retry-After",
    504: "the deadline passed",
}
