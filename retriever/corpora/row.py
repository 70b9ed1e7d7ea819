"""A row of a corpus, and the document it becomes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, time
from typing import Any

__all__ = ["ContentsMissing", "CorpusError", "Document", "RowFault", "document_of"]


class CorpusError(Exception):
    """A corpus cannot be used. The message names the file, and the line if it is one."""


class RowFault(ValueError):
    """A row is wrong. The message says how; whoever reads the file knows where."""


class ContentsMissing(Exception):
    """A row without `contents`, where they may not be made of its title and text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A row of a corpus. `json` is the document as it is served: compact, UTF-8, on one line."""

    id: str
    contents: str
    json: bytes


def document_of(row: bytes | Mapping[str, Any], *, as_it_is: bool = False) -> Document:
    """The document of a line of JSON, or of a row of a table.

    Args:
        as_it_is: the row will be served as it stands, so it must have `contents`.

    Raises:
        RowFault: it is none.
        ContentsMissing: it has none, and `as_it_is` was asked.
    """
    fields = _decoded(row) if isinstance(row, bytes) else row
    if not isinstance(fields, Mapping):
        raise RowFault(f"expected an object, got {type(fields).__name__}")
    id = fields.get("id")
    if isinstance(id, bool) or not isinstance(id, str | int):
        raise RowFault(f"expected an id that is a string or an integer, got {id!r}")
    if not isinstance(fields.get("contents"), str):
        if as_it_is:
            raise ContentsMissing
        fields = _with_contents(fields)
    return Document(id=str(id), contents=fields["contents"], json=_encoded(fields))


def _decoded(line: bytes) -> Any:
    try:
        return _DECODE(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowFault(f"not UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RowFault(f"not JSON: {error}") from error


def _encoded(fields: Mapping[str, Any]) -> bytes:
    try:
        return _ENCODE(fields).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowFault(f"a lone surrogate is no text: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:  # an infinite number such as 1e999, or a column's type
        raise RowFault(f"not JSON: {error}") from error


def _with_contents(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    title, text = fields.get("title"), fields.get("text")
    if not isinstance(title, str) or not isinstance(text, str):
        if null := [name for name in ("contents", "title", "text") if name in fields and fields[name] is None]:
            raise RowFault(f"{' and '.join(f'`{name}`' for name in null)} is null: give it text, an empty string at least")
        raise RowFault(f"expected a string `contents`, or strings `title` and `text`; the row has {', '.join(fields)}")
    others = {key: value for key, value in fields.items() if key not in ("id", "title", "text", "contents")}
    return {"id": fields["id"], "contents": f'"{title}"\n{text}', **others}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _of_column(value: object) -> str:
    """Dates and times of a table's columns are text in JSON; what else JSON has no form for is not guessed."""
    if isinstance(value, date | time):
        return value.isoformat()
    raise TypeError(f"JSON has no form for a value of type {type(value).__name__}: leave its column out, or make it text")


# Made once: json.loads and json.dumps would make one for each row, which takes longer than to use it.
_DECODE = json.JSONDecoder(parse_constant=_refuse_constant).decode
_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_of_column).encode
