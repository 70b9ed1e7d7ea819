"""One thing that a self-test looks at, and those that a finished run of it answers by what it left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.system.canary import CANARY_LOG

__all__ = ["Check", "canary", "log_probs", "nothing_changes", "verdict"]

_NAME_WIDTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What was found, and what to do where it is not as it must be."""

    name: str
    passed: bool
    told: str  # with the number
    remedy: str = ""

    def __str__(self) -> str:
        remedy = "" if self.passed or not self.remedy else f". {self.remedy}"
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name:<{_NAME_WIDTH}}  {self.told}{remedy}"


def log_probs(run_dir: Path, bounds: tuple[float, float]) -> Check:
    """Whether the log-probs that came with the engines' tokens are the learner's. At learning rate 0 every version has the same weights."""
    steps = [metrics for metrics in _steps(run_dir) if metrics.get("learner/logprob_gap_max") is not None]
    if not steps:
        return Check(name="log-probs", passed=False, told="no token was trained on", remedy=_early(run_dir))
    largest = max(metrics["learner/logprob_gap_max"] for metrics in steps)
    tokens = sum(metrics["learner/tokens"] for metrics in steps)
    mean = sum(metrics["learner/logprob_gap_mean"] * metrics["learner/tokens"] for metrics in steps) / max(tokens, 1)
    return Check(
        name="log-probs",
        passed=largest <= bounds[0] and mean <= bounds[1],
        told=f"of {tokens:.0f} tokens that engines sampled: {largest:.2g} at most and {mean:.2g} on average from the learner's"
        f" (accepted: {bounds[0]:g} and {bounds[1]:g})",
        remedy="Where the canary below agrees, it is what only sampling does: rollout.temperature, top-p or top-k of the engine, prefix reuse"
        " (weights.pause in_place) or stop tokens. Where it does not, see there",
    )


def nothing_changes(run_dir: Path) -> Check:
    """Whether updates at learning rate 0, and the ways by disk and by group, leave every bit of the weights as it was."""
    lines = _canary_lines(run_dir)
    name, sent = "no change", {line["checksum"] for line in lines}
    if len(lines) < 2:
        return Check(name=name, passed=False, told=f"{len(lines)} versions were published: expected 2 at least", remedy=_early(run_dir))
    held: dict[int, set[str]] = {}
    for line in lines:
        for engine in line["engines"]:
            if "checksum" in engine:  # one that died just then gave none
                held.setdefault(engine["engine"], set()).add(engine["checksum"])
    moved = [index for index, sums in sorted(held.items()) if len(sums) > 1]
    told = f"{len(lines)} versions at learning rate 0: {len(sent)} checksum{'s' if len(sent) > 1 else ''} at the learner"
    if len(sent) > 1:
        return Check(name=name, passed=False, told=told, remedy="The learner changes weights besides its gradient: look at learner.* of the recipe")
    if moved:
        told += f", several at engine {', '.join(map(str, moved))}"
        return Check(name=name, passed=False, told=told, remedy="Weights by disk and by group are not the same there: names, dtype or tied weights")
    return Check(name=name, passed=bool(held), told=f"{told}, 1 at each of {len(held)} engines", remedy="No engine answered: see the canary")


def canary(run_dir: Path) -> Check:
    """Whether the canary was heard at every engine, and what it was."""
    if (ended_by := verdict(run_dir)) is not None:
        return Check(name="canary", passed=False, told=ended_by)
    lines = _canary_lines(run_dir)
    heard = {engine["engine"] for line in lines for engine in line["engines"]}
    silent = {index for line in lines for index in line["unheard"]} - heard
    gaps = [engine["gap_max"] for line in lines for engine in line["engines"]]
    told = f"{len(gaps)} checks of {len(heard)} engines under {len(lines)} versions" + (f": {max(gaps):.2g} at most" if gaps else "")
    remedy = f"Not heard at engine {', '.join(map(str, sorted(silent)))}: see {run_dir / 'logs'}, or raise canary.deadline_s"
    return Check(name="canary", passed=bool(gaps) and not silent, told=told, remedy=remedy)


def verdict(run_dir: Path) -> str | None:
    """What the canary ended the run by; None where it did not."""
    return next((line["verdict"] for line in _lines(run_dir / CANARY_LOG) if "verdict" in line), None)


def _early(run_dir: Path) -> str:
    return f"See {run_dir / 'logs'}" if verdict(run_dir) is None else "The canary ended the run before"


def _steps(run_dir: Path) -> list[dict[str, Any]]:
    return [line["metrics"] for line in _lines(run_dir / "metrics.jsonl")]


def _canary_lines(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in _lines(run_dir / CANARY_LOG) if "verdict" not in line]


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
