"""summary.json: what came out of a run, in one small file that scripts read.

    {"steps", "wall_s", "eval": {"set", "initial": {"em", "interval", "by_source", ...}, "final", "sets"}, "ledger", "staleness": {"mean",
     "max", "histogram"}, "idle": {"engine", "learner"}, "tokens_per_s", "tokens_trained", "overlap", "multi_version_share", "memory_mb",
     "alarms": [{"alarm", "step", "metric", "value", "bound", ...}], "rollbacks": [{"alarm", "step", "to_step", "learning_rate_scale", ...}]}

What was not measured is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.metrics.files import to_json, write_whole
from agentrl.metrics.history import History, read_history
from agentrl.metrics.overlap import Overlap

__all__ = ["summarise", "summary_of"]


def summarise(
    run_dir: Path, *, ledger: Mapping[str, Any] | None = None, overlap: Overlap | None = None, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write `run_dir/summary.json` and return what it says.

    Args:
        ledger: the accounts of the run, as the replay buffer gives them.
        overlap: tokens generated during learner steps (`overlap.measure_overlap`).
        extra: further entries, e.g. the phase in which the run ended.
    """
    summary = summary_of(read_history(run_dir), ledger=ledger, overlap=overlap) | dict(extra or {})
    write_whole(run_dir / "summary.json", to_json(summary, indent=2) + b"\n")
    return summary


def summary_of(history: History, *, ledger: Mapping[str, Any] | None = None, overlap: Overlap | None = None) -> dict[str, Any]:
    """The summary of a run's files, without writing it."""
    return {
        "name": history.run.get("name"),
        "steps": history.steps,
        "wall_s": history.elapsed_s,
        "eval": _evaluations(history),
        "ledger": dict(ledger) if ledger is not None else None,
        "staleness": _staleness(history),
        "multi_version_share": _mean(history, "batch/multi_version_share", "batch/trajectories"),
        "overlap": asdict(overlap) if overlap is not None else None,
        "idle": {who: _mean(history, f"idle/{who}", "seconds/step") for who in ("engine", "learner")},
        "tokens_per_s": {who: _mean(history, f"{who}/tokens_per_s", "seconds/step") for who in ("engine", "learner")},
        "tokens_trained": float(history.series("learner/tokens")[1].sum()),
        "updates_skipped": float(history.series("learner/updates_skipped")[1].sum()),
        "drops": _last(history, "drops/"),
        "alarms": [line for line in history.alarms if line["kind"] == "alarm"],
        "rollbacks": [line for line in history.alarms if line["kind"] == "rollback"],
        "memory_mb": {name.removeprefix("memory_mb/"): float(history.series(name)[1].max()) for name in history.names("memory_mb/")},
    }


def _evaluations(history: History) -> dict[str, Any]:
    """The first evaluation (before training) and the last (after its last step) of every set; the headline set's at the top."""
    sets = {
        name: {
            "initial": next((numbers for numbers in found if numbers["stage"] == "initial"), None),
            "final": next((numbers for numbers in found if numbers["stage"] == "final" and numbers["step"] == _last_step(history, found)), None),
        }
        for name, found in history.evaluations.items()
    }
    headline = history.headline
    first = sets[headline] if headline is not None else {"initial": None, "final": None}
    return {"set": headline, **first, "sets": sets}


def _last_step(history: History, found: list[dict[str, Any]]) -> int:
    """The step a last evaluation is of: the run's, or without training (of a checkpoint) the newest there is."""
    return history.steps if history.training else max(int(numbers["step"]) for numbers in found)


def _staleness(history: History) -> dict[str, Any]:
    """Over all generated tokens trained on: a step counts by its number of them."""
    ages = sorted(int(name.rsplit("/", 1)[1]) for name in history.names("batch/staleness/"))
    tokens = {step: m["batch/response_tokens"] * m["batch/trajectories"] for step, m in history.training.items() if "batch/staleness_mean" in m}
    total = sum(tokens.values())
    if not total:
        return {"mean": None, "max": None, "histogram": {}}
    histogram = {str(age): sum(history.training[s].get(f"batch/staleness/{age}", 0.0) * n for s, n in tokens.items()) / total for age in ages}
    mean = sum(history.training[s]["batch/staleness_mean"] * n for s, n in tokens.items()) / total
    return {"mean": mean, "max": float(history.series("batch/staleness_max")[1].max()), "histogram": histogram}


def _mean(history: History, name: str, weight: str) -> float | None:
    """Mean over the steps that have the metric, weighted by another one where every such step has it."""
    having = [metrics for metrics in history.training.values() if name in metrics]
    if not having:
        return None
    weights = [metrics.get(weight, 0.0) for metrics in having]
    weighted = all(weight in metrics for metrics in having) and sum(weights) > 0
    return float(np.average([metrics[name] for metrics in having], weights=weights if weighted else None))


def _last(history: History, prefix: str) -> dict[str, float]:
    """The newest value of each metric that starts so."""
    return {name.removeprefix(prefix): float(history.series(name)[1][-1]) for name in history.names(prefix)}
