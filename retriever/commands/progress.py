"""Long work as people see it: a bar on a terminal, and otherwise now and then a line.

documents embedded: 12,288 of 50,000, 455/s, 83 s left
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from retriever.amounts import duration

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

__all__ = ["Lines", "Told", "shown"]

LINE_EVERY_S = 10.0
RATE_AFTER_S = 1.0  # before, a rate is an accident


class Told(Protocol):
    """`retriever.query.Progress`, which would bring NumPy along."""

    def __call__(self, what: str, done: int, of: int) -> None: ...


@contextmanager
def shown(stream: TextIO = sys.stderr) -> Iterator[Told]:
    """Where long work tells how far it is."""
    if not stream.isatty():
        yield Lines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=Console(file=stream)) as bars:
        yield _Bars(bars)


class Lines:
    """Writes a line at the end of each kind of work, and every ten seconds of it.

    Args:
        clock: seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._began: dict[str, tuple[float, int]] = {}  # what -> when, and how much was done then
        self._last_s = 0.0
        self._ended: set[tuple[str, int]] = set()

    def __call__(self, what: str, done: int, of: int) -> None:
        now = self._clock()
        if not of:  # no work, but something to know
            print(what, file=self._stream, flush=True)
            return
        if what not in self._began:
            self._began[what], self._last_s = (now, done), now
        if done >= of and (what, of) not in self._ended:
            self._ended.add((what, of))
        elif done >= of or now - self._last_s < LINE_EVERY_S:
            return
        self._last_s = now
        print(f"{what}: {done:,} of {of:,}{_speed(now, *self._began[what], done, of)}", file=self._stream, flush=True)


class _Bars:
    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, tuple[TaskID, float, int]] = {}

    def __call__(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        if not of:
            self._bars.console.print(what, markup=False, highlight=False)
            return
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=of, completed=done, rate=""), now, done
        task, began_s, before = self._tasks[what]
        rate = (done - before) / (now - began_s) if now - began_s > RATE_AFTER_S else 0.0
        self._bars.update(task, completed=done, total=of, rate=f"{rate:,.0f}/s" if rate else "")


def _speed(now: float, began_s: float, before: int, done: int, of: int) -> str:
    """Of what this run did: an earlier one's part says nothing about it."""
    took = now - began_s
    if took < RATE_AFTER_S or done <= before:
        return ""
    rate = (done - before) / took
    left = f", {duration((of - done) / rate)} left" if done < of else f", in {duration(took)}"
    return f", {rate:,.0f}/s{left}"
