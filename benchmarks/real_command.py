"""The real `agentrl` command as a subprocess, from the repository root as a user would type it, and what it runs on.

Shared by the benchmarks that measure whole runs. A run that has finished is not run again: the command says so itself, and how long it took
is kept beside it in `<name>.timing.json`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Run", "Timing", "evaluate", "hardware", "run"]

ROOT = Path(__file__).resolve().parent.parent
_COMMAND = Path(sys.executable).with_name("agentrl")
_TAIL_LINES = 15  # of a failed command's output


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Of a command that was seen from its start to its end."""

    wall_s: float | None  # of the whole command, interpreter start and all
    warm_start_s: float | None  # None: found in the cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A finished run."""

    directory: Path
    summary: dict[str, Any]
    timing: Timing


def run(recipe: Path, name: str, runs: Path, overrides: Sequence[str] = ()) -> Run:
    """`agentrl run`, to its end; a run that has finished is taken as it is.

    Raises:
        SystemExit: the command failed.
    """
    directory, kept = runs / name, runs / f"{name}.timing.json"
    reused = (directory / "summary.json").exists() and _summary(directory).get("phase") == "finished"
    resumed = not reused and (directory / "run.json").exists()
    timing = _agentrl("run", str(recipe), f"run.dir={runs}", f"name={name}", *overrides)[1]
    if resumed:
        timing = Timing(wall_s=None, warm_start_s=None)  # a part of a run tells nothing of the whole
    if not reused:
        kept.write_text(json.dumps(asdict(timing)) + "\n")
    elif kept.exists():
        timing = Timing(**json.loads(kept.read_text()))
    else:
        timing = Timing(wall_s=None, warm_start_s=None)
    return Run(directory=directory, summary=_summary(directory), timing=timing)


def evaluate(recipe: Path, name: str, runs: Path, checkpoint: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """`agentrl evaluate`: numbers by evaluation set. One that was done before is taken as it is.

    Raises:
        SystemExit: the command failed.
    """
    asked = list(overrides)
    kept = runs / f"{name}.evaluation.json"
    if kept.exists() and (known := json.loads(kept.read_text()))["asked"] == asked and known["checkpoint"] == str(checkpoint):
        print(f"$ found {kept}", flush=True)
        sets: dict[str, Any] = known["sets"]
        return sets
    lines, _ = _agentrl("evaluate", str(recipe), "--checkpoint", str(checkpoint), f"run.dir={runs}", f"name={name}", *overrides)
    where = next(line.split(": ", 1)[1] for line in reversed(lines) if line.startswith("rows and numbers: "))
    sets = json.loads((Path(where) / "evaluation.json").read_text())["sets"]
    kept.write_text(json.dumps({"checkpoint": str(checkpoint), "asked": asked, "rows": where, "sets": sets}) + "\n")
    return sets


def hardware() -> dict[str, Any]:
    """What this process and its children may use, and the versions that matter for speed."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return {
        "cpu": _cpu(),
        "cores": cores,
        "cores_of_machine": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("agentrl", "torch", "transformers", "ray", "faiss-cpu")},
    }


def _agentrl(*arguments: str) -> tuple[list[str], Timing]:
    """The lines the command said, and how long it took. Its own lines are shown as they come."""
    print("$ agentrl " + " ".join(arguments), flush=True)
    began = time.monotonic()
    lines: list[str] = []
    said_at: dict[str, float] = {}
    process = subprocess.Popen([_COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            print("  " + lines[-1], flush=True)
            said_at[_topic(line)] = time.monotonic()
    if process.returncode != 0:
        raise SystemExit(f"agentrl {arguments[0]} failed with exit code {process.returncode}:\n" + "\n".join(lines[-_TAIL_LINES:]))
    warm_start_s = said_at["starting"] - said_at["model"] if {"warm start", "model", "starting"} <= said_at.keys() else None
    return lines, Timing(wall_s=time.monotonic() - began, warm_start_s=warm_start_s)


def _topic(line: str) -> str:
    """What a line of the plain console is about, as far as it is timed. The stage after "model" is the warm start, if there is one to do."""
    if line.startswith("phase preparing"):
        return "warm start" if "warm start" in line else "model" if line.rstrip().endswith("  model") else ""
    return "starting" if line.startswith("phase starting") else ""


def _summary(directory: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
