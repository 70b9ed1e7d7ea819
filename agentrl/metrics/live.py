"""The live display of a terminal, drawn with rich. It redraws when the board changes; no thread of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.metrics.board import Board, Evaluated

__all__ = ["LiveScreen", "draw", "sparkline"]

_TICKS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 48
_BAR_WIDTH = 20  # so that the row of the buffer fits 80 columns
_LAST_EVALUATIONS = 4


class LiveScreen:
    """Redraws the board in place; messages scroll by above it."""

    def __init__(self, stream: IO[str]) -> None:
        self._live = Live(console=RichConsole(file=stream), auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def step(self, board: Board) -> None:
        """Redraw."""
        self._live.update(draw(board), refresh=True)

    def evaluation(self, board: Board) -> None:
        """Redraw."""
        self._live.update(draw(board), refresh=True)

    def phase(self, board: Board) -> None:
        """Redraw."""
        self._live.update(draw(board), refresh=True)

    def message(self, text: str, board: Board) -> None:
        """Print the text above the board."""
        self._live.console.print(Text(text))
        self._live.update(draw(board), refresh=True)

    def close(self) -> None:
        """Leave the last board where it is and give the terminal back."""
        self._live.stop()


def draw(board: Board) -> RenderableType:
    """The board as rich draws it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, content in (*_work(board), *_learning(board), *_pace(board)):
        table.add_row(label, content)
    return Panel(table, title=Text(board.title, style="bold"), title_align="left", expand=False, border_style="cyan")


def sparkline(values: list[float], *, width: int = _CURVE_WIDTH) -> str:
    """The last `width` values as blocks between their own minimum and maximum."""
    shown = values[-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(_TICKS[round((value - low) / span * (len(_TICKS) - 1)) if span > 0 else 0] for value in shown)


def _work(board: Board) -> Iterable[tuple[str, RenderableType]]:
    phase = board.phase
    told = Text(phase.name + (f"  {phase.detail}" if phase.detail else ""))
    yield "phase", _bar(phase.done, phase.total, f"{phase.done}/{phase.total}  {told}") if phase.total else told
    if board.total_steps:
        yield "step", _bar(board.step, board.total_steps, f"{board.step}/{board.total_steps}")
    else:
        yield "step", Text(str(board.step))


def _learning(board: Board) -> Iterable[tuple[str, RenderableType]]:
    if board.rewards:
        curve = Text(sparkline(board.rewards), style="green")
        yield "reward", curve.append(f"  {board.rewards[-1]:.3f}", style="bold default")
    if board.evaluations:
        yield "EM", Group(*(_evaluated(one) for one in board.evaluations[-_LAST_EVALUATIONS:]))


def _evaluated(one: Evaluated) -> Text:
    if one.em is None or one.low is None or one.high is None:
        return Text(f"{one.name}@{one.step}  no scored episode")
    return Text(f"{one.name}@{one.step}  ").append(f"{one.em:.3f}", style="bold").append(f"  [{one.low:.3f}, {one.high:.3f}]", style="dim")


def _pace(board: Board) -> Iterable[tuple[str, RenderableType]]:
    metrics = board.metrics
    if not metrics:
        return
    yield "staleness", Text(f"mean {_show(metrics, 'batch/staleness_mean', 2)}  max {_show(metrics, 'batch/staleness_max', 0)}")
    yield "tokens/s", Text(f"generated {_show(metrics, 'engine/tokens_per_s', 0)}  trained {_show(metrics, 'learner/tokens_per_s', 0)}")
    yield "buffer", _occupancy(board)
    for who in ("engine", "learner"):
        if (share := metrics.get(f"idle/{who}")) is not None:
            yield f"idle {who}", _bar(share, 1.0, f"{share:.0%}")


def _occupancy(board: Board) -> RenderableType:
    """One bar of all places: groups running, buffered and training, then free ones."""
    states = (("running", "cyan"), ("buffered", "yellow"), ("training", "magenta"))
    groups = [(name, style, board.metrics.get(f"buffer/{name}", 0.0)) for name, style in states]
    bar, filled, total = Text(), 0, 0.0
    for _, style, count in groups:
        total += count
        cells = round(min(1.0, total / board.capacity) * _BAR_WIDTH) - filled if board.capacity else 0
        bar.append("█" * cells, style=style)
        filled += cells
    bar.append("░" * (_BAR_WIDTH - filled), style="dim")
    for name, style, count in groups:
        bar.append(f"  {count:.0f}", style=f"bold {style}").append(f" {name}", style="dim")
    return bar


def _bar(done: float, total: float, text: str) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(ProgressBar(total=total, completed=min(done, total), width=_BAR_WIDTH), Text(text))
    return grid


def _show(metrics: dict[str, float], name: str, digits: int) -> str:
    value = metrics.get(name)
    return "-" if value is None else f"{value:.{digits}f}"
