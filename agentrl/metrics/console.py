"""What a run shows while it goes on: a live display on a terminal, else one aligned line per step that grep can read.

    step    12/50  reward=0.512  em=0.913  stale=1.20  gen_tok/s=1843  learn_tok/s=2011  idle_engine=0.12  idle_learner=0.30  buffer=40/72  s=2.1

Nothing here runs by itself: the display changes when it is told something. Text from outside is made printable first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any, Literal

from agentrl.metrics.board import Board, Evaluated, Phase, Screen
from agentrl.metrics.printable import one_line

__all__ = ["Console", "Mode"]

Mode = Literal["auto", "live", "plain", "off"]
_PROGRESS_EVERY_S = 5.0  # between plain lines of one phase


class Console:
    """The display of one run.

    Args:
        title: the run's name.
        total_steps: None for a run that ends by time.
        capacity: groups that may be alive at once, (K+1) * groups per batch.
        mode: `auto` is `live` on a terminal and `plain` elsewhere.
        stream: where to; by default stdout.
    """

    def __init__(
        self,
        title: str,
        *,
        total_steps: int | None,
        capacity: int,
        mode: Mode = "auto",
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.board = Board(title=one_line(title), total_steps=total_steps, capacity=capacity)
        self._screen = _screen(mode, stream if stream is not None else sys.stdout, clock)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics after `step` trained batches."""
        board = self.board
        if step <= board.step:  # a rollback took back the steps from here on
            del board.rewards[max(0, len(board.rewards) - (board.step - step + 1)) :]
        board.step, board.metrics = step, dict(metrics)
        if "batch/reward_mean" in metrics:
            board.rewards.append(metrics["batch/reward_mean"])
        self._screen.step(board)

    def evaluation(self, numbers: Mapping[str, Any]) -> None:
        """Show the numbers of one evaluation (as `write_evaluation` returns them)."""
        low, high = numbers.get("interval") or (None, None)
        shown = Evaluated(step=int(numbers["step"]), name=one_line(str(numbers["set"]), limit=24), em=numbers.get("em"), low=low, high=high)
        self.board.evaluations.append(shown)
        self._screen.evaluation(self.board)

    def phase(self, name: str, *, done: int = 0, total: int = 0, detail: str = "") -> None:
        """Show what the run is doing; with `total`, how far it is."""
        self.board.phase = Phase(name=one_line(name, limit=40), done=done, total=total, detail=one_line(detail, limit=80))
        self._screen.phase(self.board)

    def message(self, text: str) -> None:
        """Say something once, e.g. that a process was restarted."""
        self._screen.message(one_line(text), self.board)

    def close(self) -> None:
        """Leave the terminal as it was. Closing twice does nothing more."""
        self._screen.close()


class _PlainScreen:
    """Lines, flushed one by one."""

    def __init__(self, stream: IO[str], clock: Callable[[], float]) -> None:
        self._stream, self._clock = stream, clock
        self._said_phase = ""
        self._said_s = float("-inf")

    def step(self, board: Board) -> None:
        """`step 12/50  reward=...`."""
        width = len(str(board.total_steps or 10**5))
        total = f"/{board.total_steps}" if board.total_steps else ""
        self._write("  ".join([f"step {board.step:>{width}}{total}", *_plain_fields(board)]))

    def evaluation(self, board: Board) -> None:
        """`eval heldout@20  em=...`."""
        last = board.evaluations[-1]
        self._write(f"eval {last.name}@{last.step}  em={_number(last.em, 3)}  interval=[{_number(last.low, 3)}, {_number(last.high, 3)}]")

    def phase(self, board: Board) -> None:
        """A line when the phase changes and when it is done, and every few seconds between."""
        phase, now = board.phase, self._clock()
        if phase.name == self._said_phase and phase.done != phase.total and now - self._said_s < _PROGRESS_EVERY_S:
            return
        self._said_phase, self._said_s = phase.name, now
        counted = f"  {phase.done}/{phase.total}" if phase.total else ""
        self._write(f"phase {phase.name}{counted}" + (f"  {phase.detail}" if phase.detail else ""))

    def message(self, text: str, board: Board) -> None:
        """The text."""
        self._write(text)

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class _SilentScreen:
    """Shows nothing."""

    def step(self, board: Board) -> None:
        """Nothing."""

    def evaluation(self, board: Board) -> None:
        """Nothing."""

    def phase(self, board: Board) -> None:
        """Nothing."""

    def message(self, text: str, board: Board) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _screen(mode: Mode, stream: IO[str], clock: Callable[[], float]) -> Screen:
    if mode == "off":
        return _SilentScreen()
    if mode == "plain" or (mode == "auto" and not stream.isatty()):
        return _PlainScreen(stream, clock)
    from agentrl.metrics.live import LiveScreen

    return LiveScreen(stream)


# label, metric, width, digits
_FIELDS = (
    ("reward", "batch/reward_mean", 6, 3),
    ("stale", "batch/staleness_mean", 5, 2),
    ("gen_tok/s", "engine/tokens_per_s", 6, 0),
    ("learn_tok/s", "learner/tokens_per_s", 6, 0),
    ("idle_engine", "idle/engine", 4, 2),
    ("idle_learner", "idle/learner", 4, 2),
)


def _plain_fields(board: Board) -> list[str]:
    metrics = board.metrics
    em = board.evaluations[-1].em if board.evaluations else None
    fields = [f"{label}={_number(metrics.get(name), digits):<{width}}" for label, name, width, digits in _FIELDS]
    fields.insert(1, f"em={_number(em, 3):<5}")
    alive = sum(metrics.get(f"buffer/{state}", 0.0) for state in ("running", "buffered", "training"))
    occupied = f"{alive:.0f}/{board.capacity}"
    return [*fields, f"buffer={occupied:<{2 * len(str(board.capacity)) + 1}}", f"s={_number(metrics.get('seconds/step'), 1)}"]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
