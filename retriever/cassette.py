"""A cassette: what a retriever answered, in a file of JSON lines, for tests and for runs without a retriever.

    {"query": "capital of Norway", "topk": 3, "passages": [{"id": "7", "contents": "\\"Oslo\\"\\nOslo is ...", "score": 0.83}, ...]}

A line is one query; `mode` and `rerank` stand in it where they were asked for. Who answered does not: a cassette that was recorded from one server is
replayed for any. Of several lines with one query the first counts, so that what was replayed once is replayed always.

    record     what the cassette holds is answered by it; the rest is asked, and appended. Several processes may append to one file
    replay     what it does not hold is an error, and nothing is asked
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from retriever.passage import CassetteError, Passage

__all__ = ["Cassette", "Recorded"]

SHOWN_CHARACTERS = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What is asked, whoever answers."""

    query: str
    topk: int
    mode: str | None = None
    rerank: bool = False


class Cassette:
    """Passages by query, in memory and in a file. `Cassette.record(path)` or `Cassette.replay(path)`."""

    def __init__(self, path: Path, held: dict[Recorded, tuple[Passage, ...]], *, recording: bool) -> None:
        self.path, self.recording = path, recording
        self._held = held

    @classmethod
    def record(cls, path: str | os.PathLike[str]) -> Self:
        """To append to; made where it is not there.

        Raises:
            CassetteError: the file cannot be written, or is something else than a cassette.
        """
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        except OSError as error:
            raise CassetteError(f"the cassette {file} cannot be written: {error}") from error
        return cls(file, _read(file), recording=True)

    @classmethod
    def replay(cls, path: str | os.PathLike[str]) -> Self:
        """To answer from, and from it alone.

        Raises:
            CassetteError: the file cannot be read, or is something else than a cassette.
        """
        return cls(Path(path), _read(Path(path)), recording=False)

    def __len__(self) -> int:
        return len(self._held)

    def find(self, asked: Recorded) -> list[Passage] | None:
        """The passages of a query; None where a recording has yet to ask for them.

        Raises:
            CassetteError: it is replayed and does not hold the query.
        """
        passages = self._held.get(asked)
        if passages is None and not self.recording:
            options = f"topk {asked.topk}" + (f", mode {asked.mode}" if asked.mode else "") + (", rerank" if asked.rerank else "")
            raise CassetteError(
                f"the cassette {self.path} holds no answer to {_short(asked.query)!r} with {options}; it holds {len(self._held)} queries:"
                " record it again with what is asked now"
            )
        return None if passages is None else list(passages)

    def add(self, answers: Sequence[tuple[Recorded, Sequence[Passage]]]) -> None:
        """Append what it does not hold, in one write that is whole or, where the machine fails in it, skipped by readers.

        Raises:
            CassetteError: the file cannot be written.
        """
        lines = []
        for asked, passages in answers:
            if asked not in self._held:
                self._held[asked] = tuple(passages)
                lines.append(_line(asked, passages))
        if lines:
            try:
                _append(self.path, b"".join(lines))
            except OSError as error:
                raise CassetteError(f"the cassette {self.path} cannot be written: {error}") from error


def _append(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed: others append, too
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            data = b"\n" + data  # ends a line that a crash cut off
        while data:
            data = data[os.write(file, data) :]
    finally:
        os.close(file)


def _line(asked: Recorded, passages: Sequence[Passage]) -> bytes:
    options: dict[str, Any] = {"mode": asked.mode} if asked.mode else {}
    options |= {"rerank": True} if asked.rerank else {}
    hits = [{"id": passage.id, "contents": passage.contents, "score": passage.score} for passage in passages]
    value = {"query": asked.query, "topk": asked.topk, **options, "passages": hits}
    return json.dumps(value).encode() + b"\n"


def _read(path: Path) -> dict[Recorded, tuple[Passage, ...]]:
    held: dict[Recorded, tuple[Passage, ...]] = {}
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CassetteError(f"the cassette {path} cannot be read: {error}. Record it first") from error
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            asked, passages = _parsed(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if not _cut_off(line):
                raise CassetteError(
                    f'{path}:{number}: expected {{"query", "topk", "passages"}}, got {_short(line.decode(errors="replace"))!r}'
                ) from error
        else:
            held.setdefault(asked, passages)
    return held


def _cut_off(line: bytes) -> bool:
    """Whether a line that is no JSON is the beginning of one of ours: a crash cut it off."""
    beginning = b'{"query": '
    return (line.startswith(beginning) or beginning.startswith(line)) and not line.endswith(b"]}")


def _parsed(value: Any) -> tuple[Recorded, tuple[Passage, ...]]:
    query, topk, mode, rerank = value["query"], value["topk"], value.get("mode"), value.get("rerank", False)
    if not isinstance(query, str) or type(topk) is not int or not isinstance(mode, str | None) or type(rerank) is not bool:
        raise ValueError("a key of another type")
    passages = tuple(_passage(hit) for hit in value["passages"])
    return Recorded(query=query, topk=topk, mode=mode, rerank=rerank), passages


def _passage(hit: Any) -> Passage:
    if not isinstance(hit["id"], str) or not isinstance(hit["contents"], str) or not isinstance(hit["score"], int | float):
        raise ValueError("a passage of another shape")
    return Passage(id=hit["id"], contents=hit["contents"], score=float(hit["score"]))


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
