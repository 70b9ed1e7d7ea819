"""Corpora: JSON lines of `{"id", "contents"}` as Search-R1's, or of `{"id", "title", "text"}`, which becomes the former.

    {"id": "7", "title": "Oslo", "text": "Oslo is ..."}   ->   {"id": "7", "contents": "\\"Oslo\\"\\nOslo is ..."}

Other fields of a row are kept and served with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CorpusError", "Document", "read_corpus"]


class CorpusError(Exception):
    """A row of a corpus is wrong. The message names file and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A row of a corpus. `json` is the document as it is served: compact, UTF-8, on one line."""

    id: str
    contents: str
    json: bytes


def read_corpus(path: Path) -> list[Document]:
    """The documents of a file, in its order. Empty lines are skipped.

    Raises:
        CorpusError: a row is not what it should be, an id comes twice, or there is no row at all.
        OSError: the file cannot be read.
    """
    seen: dict[str, int] = {}
    documents = []
    for number, line in _lines(path):
        document = _document(line, f"{path}:{number}")
        if document.id in seen:
            raise CorpusError(f"{path}:{number}: the id {document.id!r} is that of line {seen[document.id]}, too: ids must be unique")
        seen[document.id] = number
        documents.append(document)
    if not documents:
        raise CorpusError(f"{path}: the corpus is empty")
    return documents


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise CorpusError(f"{path}:{number}: not UTF-8: {error}") from error
            if text:
                yield number, text


def _document(line: str, where: str) -> Document:
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise CorpusError(f"{where}: expected an object, got {type(row).__name__}")
    if isinstance(row.get("id"), bool) or not isinstance(row.get("id"), str | int):
        raise CorpusError(f"{where}: expected an id that is a string or an integer, got {row.get('id')!r}")
    row = _with_contents(row, where)
    try:
        served = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorpusError(f"{where}: a lone surrogate is no text: {error}") from error
    return Document(id=str(row["id"]), contents=row["contents"], json=served)


def _with_contents(row: dict[str, Any], where: str) -> dict[str, Any]:
    if isinstance(row.get("contents"), str):
        return row
    title, text = row.get("title"), row.get("text")
    if not isinstance(title, str) or not isinstance(text, str):
        raise CorpusError(f"{where}: expected a string `contents`, or strings `title` and `text`; the row has {', '.join(row)}")
    others = {key: value for key, value in row.items() if key not in ("id", "title", "text", "contents")}
    return {"id": row["id"], "contents": f'"{title}"\n{text}', **others}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
