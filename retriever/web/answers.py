"""What a search service answered, kept for a while: in memory, and in an append-only file.

A line of the file is one answer, as JSON, in one write:

    {"query": "capital of Norway", "results_asked": 10, "at": 1700000000.0, "requests": 1, "results": [["Oslo", "https://...", "Oslo is ..."]]}

The file belongs to one process at a time. A line that was cut off by a crash is skipped; lines that have expired are dropped when the file is opened
and more than half of it is of no more use.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from retriever.web.providers import Result

__all__ = ["Answers"]

WEEK_S = 7 * 24 * 60 * 60.0
IN_MEMORY = 10_000  # answers, of some 3 KB each


class Answers:
    """Answers by query and number of results asked for. Close it, or use it as a context manager.

    Args:
        file: where they are kept beyond this process; None for memory alone.
        expiry_s: an answer older than this is asked for anew.
        in_memory: answers that are kept in memory; all of the file's can be found.

    Raises:
        OSError: the file cannot be opened, or another process has it.
    """

    def __init__(
        self, file: Path | None = None, *, expiry_s: float = WEEK_S, in_memory: int = IN_MEMORY, clock: Callable[[], float] = time.time
    ) -> None:
        self.expiry_s = expiry_s
        self._in_memory = in_memory
        self._clock = clock
        self._recent: OrderedDict[_Key, _Answer] = OrderedDict()
        self._places: dict[_Key, int] = {}  # of lines in the file
        self._by_url: OrderedDict[str, Result] = OrderedDict()
        self._request_times: list[float] = []
        self.write_error = ""  # why the file is no longer written to
        self._file = None if file is None else _opened(file)
        if self._file is not None:
            self._read(self._file)

    def __len__(self) -> int:
        return len(self._recent) if self._file is None else len(self._places)

    def get(self, query: str, results_asked: int) -> tuple[Result, ...] | None:
        """The answer; None where there is none that has not expired."""
        key = (query, results_asked)
        answer = self._recent.get(key)
        if answer is None and self._file is not None and key in self._places:
            answer = _parsed(_line_at(self._file, self._places[key]))
        if answer is None or answer.at + self.expiry_s <= self._clock():
            return None
        self._remember(key, answer)
        return answer.results

    def put(self, query: str, results_asked: int, results: tuple[Result, ...], *, requests: int) -> None:
        """Keep an answer, which took so many requests."""
        key, answer = (query, results_asked), _Answer(at=self._clock(), requests=requests, results=results)
        self._remember(key, answer)
        if self._file is not None and not self.write_error:
            end = os.lseek(self._file, 0, os.SEEK_END)
            try:
                _write(self._file, _written(key, answer))
            except OSError as error:  # a full disk, say: what was paid for is answered all the same
                self.write_error = f"answers are kept in memory only: {error}"
            else:
                self._places[key] = end

    def of_url(self, url: str) -> Result | None:
        """The result with this URL, of the answers in memory."""
        return self._by_url.get(url)

    def request_times(self) -> list[float]:
        """Unix times of the requests that the answers read from the file took."""
        return list(self._request_times)

    def close(self) -> None:
        """Let others have the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _remember(self, key: _Key, answer: _Answer) -> None:
        self._recent[key] = answer
        self._recent.move_to_end(key)
        for result in answer.results:
            self._by_url[result.url] = result
            self._by_url.move_to_end(result.url)
        while len(self._recent) > self._in_memory:
            self._recent.popitem(last=False)
        while len(self._by_url) > 3 * self._in_memory:
            self._by_url.popitem(last=False)

    def _read(self, file: int) -> None:
        oldest = self._clock() - self.expiry_s
        lines = 0
        for place, line in _lines(file):
            lines += 1
            answer = _parsed(line)
            if answer is None:
                continue
            self._request_times += [answer.at] * answer.requests
            if answer.at > oldest:
                self._places[answer.key] = place
        if 2 * len(self._places) < lines:
            self._rewrite(file)

    def _rewrite(self, file: int) -> None:
        """Keep the lines of use only. In place, for the lock is the file's: a crash here loses answers, and no more."""
        kept = [(key, _line_at(file, place)) for key, place in self._places.items()]
        os.ftruncate(file, 0)
        end = 0
        for key, line in kept:
            self._places[key] = end
            _write(file, line)
            end += len(line)


_Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    at: float  # Unix time
    requests: int
    results: tuple[Result, ...]
    key: _Key = ("", 0)


def _opened(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise OSError(f"{path} is in use by another process: give each server a cache of its own") from error
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":
        os.write(file, b"\n")  # ends the line that a crash cut off
    return file


def _write(file: int, line: bytes) -> None:
    while line:
        line = line[os.write(file, line) :]


def _lines(file: int) -> Iterator[tuple[int, bytes]]:
    place = 0
    with os.fdopen(os.dup(file), "rb") as lines:
        lines.seek(0)
        for line in lines:
            yield place, line
            place += len(line)


def _line_at(file: int, place: int) -> bytes:
    with os.fdopen(os.dup(file), "rb") as lines:
        lines.seek(place)
        return lines.readline()


def _written(key: _Key, answer: _Answer) -> bytes:
    results = [[result.title, result.url, result.snippet] for result in answer.results]
    value = {"query": key[0], "results_asked": key[1], "at": answer.at, "requests": answer.requests, "results": results}
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def _parsed(line: bytes) -> _Answer | None:
    try:
        value: Any = json.loads(line)
        results = tuple(Result(title=str(title), url=str(url), snippet=str(snippet)) for title, url, snippet in value["results"])
        key = (str(value["query"]), int(value["results_asked"]))
        return _Answer(at=float(value["at"]), requests=int(value["requests"]), results=results, key=key)
    except (ValueError, KeyError, TypeError, RecursionError):  # cut off by a crash, or not of our making
        return None
