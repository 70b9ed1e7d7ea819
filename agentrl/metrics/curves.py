"""curves.png: the main curves of a run as one picture, drawn by matplotlib without a display."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.metrics.chart import smoothed
from agentrl.metrics.files import write_whole
from agentrl.metrics.history import History

__all__ = ["write_curves"]

_COLOURS = ("#2563eb", "#d9480f", "#0d9468", "#9333ea", "#b7791f")
_SMOOTHING = 5  # steps
_PANELS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("staleness of trained tokens (steps)", {"mean": "batch/staleness_mean", "max": "batch/staleness_max"}),
    ("entropy (nats per token)", {"entropy": "learner/entropy"}),
    ("gradient norm", {"gradient norm": "learner/grad_norm"}),
    ("tokens per second", {"generated": "engine/tokens_per_s", "trained, within a step": "learner/tokens_per_s"}),
    ("idle share", {"engines": "idle/engine", "learner": "idle/learner"}),
)


def write_curves(history: History, path: Path) -> None:
    """Draw reward and EM, staleness, entropy, gradient norm, throughput and idle shares."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), dpi=120, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).ravel()
    _learning(axes[0], history)
    for axis, (title, names) in zip(axes[1:], _PANELS, strict=True):
        axis.set_title(title, fontsize=11, loc="left")
        for colour, (label, name) in zip(_COLOURS, names.items(), strict=False):
            steps, values = history.series(name)
            if len(steps):
                axis.plot(steps, values, color=colour, linewidth=1.6, label=label)
        axis.set_ylim(bottom=0)
    for axis in axes:
        _finish(axis)
    picture = io.BytesIO()
    canvas.print_png(picture, metadata={"Software": "agentrl"})
    write_whole(path, picture.getvalue())


def _learning(axis: Any, history: History) -> None:
    """Training reward, and held-out EM with its interval."""
    axis.set_title("training reward and held-out EM", fontsize=11, loc="left")
    steps, rewards = history.series("batch/reward_mean")
    if len(steps):
        axis.plot(steps, rewards, color=_COLOURS[0], linewidth=0.8, alpha=0.35)
        axis.plot(steps, smoothed(rewards, window=_SMOOTHING), color=_COLOURS[0], linewidth=1.8, label=f"reward, mean of {_SMOOTHING} steps")
    for number, (name, found) in enumerate(history.evaluations.items()):
        scored = [one for one in found if one["em"] is not None]
        at, colour = [one["step"] for one in scored], _COLOURS[(1 + number) % len(_COLOURS)]
        axis.fill_between(at, [one["interval"][0] for one in scored], [one["interval"][1] for one in scored], color=colour, alpha=0.15, linewidth=0)
        axis.plot(at, [one["em"] for one in scored], color=colour, linewidth=1.8, marker="o", markersize=4, label=f"EM on {name}")


def _finish(axis: Any) -> None:
    axis.grid(axis="y", color="#e3e7ee", linewidth=0.8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(length=0, labelsize=9, colors="#5d6778")
    axis.set_xlabel("step", fontsize=9, color="#5d6778")
    if len(axis.get_legend_handles_labels()[0]) > 1:
        axis.legend(frameon=False, fontsize=9)
