"""The metrics seam: any code may `record(name, value)`; what happens to it is decided by whoever opened a `Recorder`.

    with Recorder() as recorder:
        record("learner/grad_norm", 0.3)
        record("learner/grad_norm", 0.5)
    recorder.means() == {"learner/grad_norm": 0.4}

Outside a recorder a call does nothing. Recorders nest by context (threads and tasks see the one they were started under). A recorder may also be
given what marks blocks by name for a profiler: `phase` and `span` enter it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token

__all__ = ["Recorder", "phase", "record", "span"]


class Recorder:
    """Collects weighted values by name within a `with` block.

    Args:
        marks: opens a mark of this name around a block.
    """

    def __init__(self, marks: Callable[[str], AbstractContextManager[object]] | None = None) -> None:
        self.marks = marks
        self._sums: dict[str, float] = defaultdict(float)
        self._weights: dict[str, float] = defaultdict(float)
        self._token: Token[Recorder | None] | None = None

    def __enter__(self) -> Recorder:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add one value with its weight."""
        self._sums[name] += value * weight
        self._weights[name] += weight

    def means(self) -> dict[str, float]:
        """Weighted mean by name; a name whose weights sum to 0 is left out."""
        return {name: self._sums[name] / weight for name, weight in self._weights.items() if weight}


_current: ContextVar[Recorder | None] = ContextVar("agentrl_recorder", default=None)


def record(name: str, value: float, weight: float = 1.0) -> None:
    """Tell the open recorder, if there is one, that `name` was `value`. Names are those of docs/metrics.md."""
    recorder = _current.get()
    if recorder is not None:
        recorder.add(name, float(value), weight)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Record the wall seconds of a block as `seconds/<name>`, and mark it."""
    started = time.perf_counter()
    try:
        with span(name):
            yield
    finally:
        record(f"seconds/{name}", time.perf_counter() - started)


def span(name: str) -> AbstractContextManager[object]:
    """Mark a block for the open recorder's profiler, where there is one."""
    recorder = _current.get()
    return nullcontext() if recorder is None or recorder.marks is None else recorder.marks(name)
