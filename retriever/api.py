"""The bodies of the HTTP API: a request's bytes to queries, found documents to an answer's bytes. JSON or msgpack, both ways.

A request is Search-R1's, `{"queries": [...], "topk": 3, "return_scores": false}` (its retrieval_server.py at a14dc3a), or SkyRL's with one
`"query"`; besides `mode`, `rerank`, `fields` and `max_chars`. Fields that nobody knows are ignored, as Search-R1's server ignores them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from retriever.documents import rendered
from retriever.query import Found, Mode, Query, Refused

__all__ = [
    "JSON",
    "MAX_BODY_BYTES",
    "MAX_CHARACTERS",
    "MAX_FIELDS",
    "MAX_QUERIES",
    "MAX_TOPK",
    "MAX_URLS",
    "MSGPACK",
    "Asked",
    "WrongRequest",
    "document_bytes",
    "documents_bytes",
    "parse_access",
    "parse_retrieve",
    "retrieve_bytes",
]

JSON, MSGPACK = "application/json", "application/msgpack"
MAX_BODY_BYTES = 2 * 1024 * 1024
MAX_QUERIES = 1024
MAX_TOPK = 100
MAX_URLS = 1024
MAX_FIELDS = 64
MAX_CHARACTERS = 10_000_000
MODES = {str(mode): mode for mode in Mode}


class WrongRequest(Refused):
    """The request is not what was expected; the message says what was."""

    status = 422


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a request to /retrieve wants."""

    queries: list[Query]
    with_scores: bool
    fields: tuple[str, ...] | None  # of a document; None: all
    max_chars: int | None  # of its contents


def parse_retrieve(body: bytes, *, packed: bool, default_topk: int) -> Asked:
    """The queries of a request.

    Args:
        packed: the body is msgpack, not JSON.
        default_topk: where the request does not say.

    Raises:
        WrongRequest: 400 it is not JSON or msgpack; 413 too many queries; 422 it has another shape.
    """
    value = _loads(body, packed, '{"queries": [...], "topk": 3, "return_scores": false}')
    texts = _texts(value)
    topk = value.get("topk")
    topk = default_topk if topk is None else _whole(topk, "topk", 1, MAX_TOPK)
    mode = value.get("mode")
    if mode is not None:
        mode = MODES.get(mode) if isinstance(mode, str) else None
        if mode is None:
            raise WrongRequest(f"mode must be one of {', '.join(MODES)}")
    rerank = _flag(value, "rerank")
    return Asked(
        queries=[Query(text=text if text.isascii() else _encodable(text), topk=topk, mode=mode, rerank=rerank) for text in texts],
        with_scores=_flag(value, "return_scores"),
        fields=_fields(value.get("fields")),
        max_chars=None if value.get("max_chars") is None else _whole(value["max_chars"], "max_chars", 1, MAX_CHARACTERS),
    )


def retrieve_bytes(found: Sequence[Sequence[Found]], asked: Asked, *, packed: bool) -> bytes:
    """The answer to a request. Documents are JSON already: in JSON they are spliced in as they are."""
    if asked.fields is not None or asked.max_chars is not None:
        found = [[Found(document=_shaped(hit.document, asked), score=hit.score) for hit in some] for some in found]
    if packed:
        return _packed(found, asked.with_scores)
    if asked.with_scores:
        lists = [b",".join([b'{"document":%b,"score":%b}' % (hit.document, repr(hit.score).encode()) for hit in some]) for some in found]
    else:
        lists = [b",".join([hit.document for hit in some]) for some in found]
    return b'{"result":[%b]}' % b",".join([b"[%b]" % some for some in lists])


def parse_access(body: bytes, *, packed: bool) -> list[str]:
    """The URLs of a request to /access.

    Raises:
        WrongRequest: as for `parse_retrieve`.
    """
    urls = _loads(body, packed, '{"urls": [...]}').get("urls")
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise WrongRequest("urls must be a list of strings")
    if len(urls) > MAX_URLS:
        raise WrongRequest(f"{len(urls)} urls in one request: at most {MAX_URLS}", status=413)
    return [_encodable(url) for url in urls]


def documents_bytes(documents: Sequence[bytes | None], *, packed: bool) -> bytes:
    """The answer of /access: documents, or null."""
    if packed:
        return _packb({"result": [None if document is None else json.loads(document) for document in documents]})
    return b'{"result":[%b]}' % b",".join([b"null" if document is None else document for document in documents])


def document_bytes(document: bytes, *, packed: bool) -> bytes:
    """The answer of /documents."""
    return _packb(json.loads(document)) if packed else document


def _loads(body: bytes, packed: bool, expected: str) -> Mapping[str, Any]:
    try:
        value = msgpack.unpackb(body) if packed else json.loads(body)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        # ValueError: not JSON, not UTF-8, a number of thousands of digits, a key that is a map
        nested = isinstance(error, msgpack.exceptions.StackError)
        reason = str(error) or ("lists or maps lie too deep in one another" if nested else "no such type of value")  # msgpack says nothing itself
        raise WrongRequest(f"the body is not {'msgpack' if packed else 'JSON'}: {reason}", status=400) from error
    if not isinstance(value, dict):
        raise WrongRequest(f"expected {expected}, got {type(value).__name__}")
    return value


def _texts(value: Mapping[str, Any]) -> list[str]:
    queries, query = value.get("queries"), value.get("query")
    if query is not None:
        if queries is not None:
            raise WrongRequest("either queries or query, not both")
        queries = [query]
    if not isinstance(queries, list) or not all(isinstance(text, str) for text in queries):
        raise WrongRequest("queries must be a list of strings, or query a string")
    if len(queries) > MAX_QUERIES:
        raise WrongRequest(f"{len(queries)} queries in one request: at most {MAX_QUERIES}", status=413)
    return queries


def _flag(value: Mapping[str, Any], name: str) -> bool:
    flag = value.get(name)
    if flag is not None and not isinstance(flag, bool):
        raise WrongRequest(f"{name} must be true or false")
    return bool(flag)


def _fields(fields: object) -> tuple[str, ...] | None:
    if fields is None:
        return None
    if not isinstance(fields, list) or not all(isinstance(name, str) for name in fields) or not 1 <= len(fields) <= MAX_FIELDS:
        raise WrongRequest(f"fields must be a list of 1 to {MAX_FIELDS} names of a document's fields")
    return tuple(fields)


def _whole(number: object, name: str, least: int, most: int) -> int:
    """The number: JSON Schema's integers, 3.0 among them, as Search-R1's pydantic takes them."""
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if type(number) is not int or not least <= number <= most:
        raise WrongRequest(f"{name} must be an integer from {least} to {most}")
    return number


def _shaped(document: bytes, asked: Asked) -> bytes:
    return rendered(document, fields=asked.fields, max_chars=asked.max_chars)


def _packed(found: Sequence[Sequence[Found]], with_scores: bool) -> bytes:
    if with_scores:
        lists: list[list[Any]] = [[{"document": json.loads(hit.document), "score": hit.score} for hit in some] for some in found]
    else:
        lists = [[json.loads(hit.document) for hit in some] for some in found]
    return _packb({"result": lists})


def _packb(value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(value)
    except OverflowError:
        packed = msgpack.packb(_without_large(value))
    return packed


def _without_large(value: Any) -> Any:
    """The value with integers of more than 64 bits, which msgpack does not have, as the nearest floating-point numbers."""
    if isinstance(value, dict):
        return {name: _without_large(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_large(each) for each in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value) if abs(value) <= sys.float_info.max else str(value)
    return value


def _encodable(text: str) -> str:
    """The text with lone surrogates, which JSON can carry and UTF-8 cannot, replaced."""
    return text.encode("utf-8", "replace").decode()
