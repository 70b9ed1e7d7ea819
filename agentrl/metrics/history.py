"""A run's files read back: the surviving history of its metrics, its evaluations, and what it was.

metrics.jsonl is append-only, so it also holds steps that a rollback took back: a training line of step s replaces everything at s and
later. Half a line, as a killed writer leaves it, is passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.metrics.alarms import read_alarms

__all__ = ["History", "read_history", "read_rows"]

_TRAINING_MARK = "batch/groups"  # in the line of a trained batch, and in no other

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What a run directory says about its run."""

    steps: int  # trained batches
    training: dict[int, dict[str, float]]  # by step, ascending: the finite metrics of that step
    elapsed_s: float  # from the first line to the last, or as the run counted it
    evaluations: dict[str, list[dict[str, Any]]]  # by set, the headline set first: numbers, by ascending step
    alarms: list[dict[str, Any]]  # lines of alarms.jsonl, of alarms and rollbacks, oldest first
    run: dict[str, Any]  # run.json
    recipe: str  # recipe.yaml

    def series(self, name: str) -> tuple[Floats, Floats]:
        """(steps, values) of one metric over the steps that have it."""
        found = [(step, metrics[name]) for step, metrics in self.training.items() if name in metrics]
        pairs = np.array(found, dtype=np.float64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def names(self, prefix: str) -> list[str]:
        """Names of metrics that start so, in order of first appearance."""
        return list(dict.fromkeys(name for metrics in self.training.values() for name in metrics if name.startswith(prefix)))

    @property
    def headline(self) -> str | None:
        """The set whose EM is the run's headline."""
        return next(iter(self.evaluations), None)


def read_history(run_dir: Path) -> History:
    """Read what there is; a file that is missing counts as empty."""
    training, elapsed_s = _training(run_dir / "metrics.jsonl")
    steps = max(training, default=0)
    run = _json(run_dir / "run.json")
    recipe = run_dir / "recipe.yaml"
    return History(
        steps=steps,
        training=training,
        elapsed_s=elapsed_s,
        evaluations=_evaluations(run_dir / "eval", run, steps if training else None),
        alarms=read_alarms(run_dir),
        run=run,
        recipe=recipe.read_text(encoding="utf-8", errors="replace") if recipe.exists() else "",
    )


def read_rows(run_dir: Path, step: int, name: str) -> list[dict[str, Any]]:
    """The transcripts of one set at one step, in order."""
    return [row for row in _json_lines(run_dir / "eval" / f"step_{step}.jsonl") if row.get("set") == name]


def _training(path: Path) -> tuple[dict[int, dict[str, float]], float]:
    surviving: dict[int, dict[str, float]] = {}
    times: list[float] = []
    for line in _json_lines(path):
        step, metrics = int(line["step"]), {name: value for name, value in line["metrics"].items() if value is not None}
        times.append(float(line["time"]))
        if _TRAINING_MARK in metrics:
            for later in [known for known in surviving if known >= step]:
                del surviving[later]
            surviving[step] = metrics
        elif step in surviving:
            surviving[step] |= metrics
    counted = max((metrics["run/elapsed_s"] for metrics in surviving.values() if "run/elapsed_s" in metrics), default=None)
    elapsed_s = counted if counted is not None else (max(times) - min(times) if times else 0.0)
    return dict(sorted(surviving.items())), elapsed_s


def _evaluations(directory: Path, run: dict[str, Any], steps: int | None) -> dict[str, list[dict[str, Any]]]:
    """Numbers by set and step, without those of steps that a rollback took back and the run (of `steps`, if it trained) never reached again."""
    found: dict[int, dict[str, Any]] = {}
    for path in directory.glob("step_*.json"):
        matched = re.fullmatch(r"step_(\d+)\.json", path.name)
        if matched and (steps is None or int(matched[1]) <= steps):
            found[int(matched[1])] = _json(path)
    names = {name for numbers in found.values() for name in numbers}
    section = run.get("recipe", {}).get("eval", {})
    wanted = [section.get("headline"), *section.get("sets", {})]
    order = [*dict.fromkeys(name for name in wanted if name in names), *sorted(names - set(wanted))]
    return {name: [found[step][name] for step in sorted(found) if name in found[step]] for name in order}


def _json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return value if isinstance(value, dict) else {}


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:  # torn by a kill: the writer starts anew on the next line
                continue
