"""Where a run's metrics go: always metrics.jsonl, and the trackers a recipe names.

A tracker that fails is dropped with one warning and never stops training. metrics.jsonl is never dropped: where its disk is full it warns
once and tries again at the next step. Trackers are opened by factories in a registry, so that a program or a test can bring its own.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from agentrl.config.recipe import Recipe
from agentrl.metrics import trackers
from agentrl.metrics.files import to_json

__all__ = ["TRACKERS", "JsonLines", "Sink", "SinkFactory", "Sinks", "open_sinks"]

_log = logging.getLogger("agentrl.metrics")


class Sink(Protocol):
    """Takes the metrics of steps until it is closed. Either call may raise: the sink is then dropped."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take finite numbers by name."""

    def close(self) -> None:
        """Write out what is held."""


SinkFactory = Callable[[Recipe, Path], Sink]

TRACKERS: Mapping[str, SinkFactory] = {"wandb": trackers.Wandb, "tensorboard": trackers.Tensorboard, "swanlab": trackers.Swanlab}


def open_sinks(recipe: Recipe, run_dir: Path, *, registry: Mapping[str, SinkFactory] = TRACKERS) -> Sinks:
    """metrics.jsonl of the run and the trackers of `recipe.metrics.sinks`; one that cannot be opened is left out with a warning."""
    opened: dict[str, Sink] = {}
    for name in recipe.metrics.sinks:
        with _contained(name):
            opened[name] = registry[name](recipe, run_dir)
    return Sinks(JsonLines(run_dir / "metrics.jsonl"), opened)


class Sinks:
    """All sinks of a run behind one `step`."""

    def __init__(self, lines: JsonLines, others: Mapping[str, Sink]) -> None:
        self._lines = lines
        self._others = dict(others)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers still in use."""
        return tuple(self._others)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. A step may come several times, with other metrics, and steps go back after a rollback."""
        self._lines.step(step, metrics)
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._each(lambda sink: sink.step(step, finite))

    def close(self) -> None:
        """Close every sink. Closing twice does nothing more."""
        self._each(lambda sink: sink.close())
        self._others.clear()
        self._lines.close()

    def _each(self, call: Callable[[Sink], None]) -> None:
        kept: dict[str, Sink] = {}
        for name, sink in self._others.items():
            with _contained(name):
                call(sink)
                kept[name] = sink
        self._others = kept


class JsonLines:
    """metrics.jsonl: a line `{"step", "time", "metrics"}` per call, in the file when the call returns.

    A value that is not finite is written as null and its name listed under `nonfinite`.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._clock = path, clock
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._torn = _ends_torn(self._file)
        self._warned = False

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        line: dict[str, Any] = {"step": step, "time": self._clock(), "metrics": {name: float(value) for name, value in metrics.items()}}
        nonfinite = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        if nonfinite:
            line["nonfinite"] = nonfinite
        data = (b"\n" if self._torn else b"") + to_json(line) + b"\n"
        try:
            self._torn = os.write(self._file, data) < len(data)  # a short write is a full disk
        except OSError as error:
            self._warn(error)
        else:
            if self._torn:
                self._warn("written in part")

    def close(self) -> None:
        """Close the file. Closing twice does nothing more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _warn(self, what: object) -> None:
        if not self._warned:
            _log.warning("%s: a line could not be written (%s); trying on, this is said once", self._path, what)
        self._warned = True


@contextmanager
def _contained(name: str) -> Iterator[None]:
    """A tracker's own trouble ends here, with one warning."""
    try:
        yield
    except ImportError:
        _log.warning("metrics.sinks: %s is not installed, so nothing goes to it. Install it: pip install 'agentrl[%s]'", name, name)
    except Exception as error:  # blast radius: the tracker, never the run
        _log.warning("metrics.sinks: %s failed and gets nothing more of this run (metrics.jsonl goes on): %r", name, error)


def _ends_torn(file: int) -> bool:
    """Whether a killed writer left half a line at the end."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"
