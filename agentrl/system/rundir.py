"""The run directory: what a run leaves on the disk, who may write it, and whether the same command may go on with it.

runs/<name>/
    recipe.yaml run.json     the resolved recipe; seed, commit, versions, hardware, incarnations
    journal/ checkpoints/    what a resume needs
    logs/ eval/ metrics.jsonl summary.json report.html curves.png
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import psutil

from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError

__all__ = ["RunDirectory", "is_running", "write_json"]

# Sections a resume may change: they do not alter what has been done so far.
_FREE_TO_CHANGE = (
    "run.steps",
    "run.epochs",
    "run.hours",
    "run.launcher",
    "run.ray_address",
    "run.debug",
    "metrics.",
    "checkpoint.",
    "health.",
    "resources.",
    "smoke",
)
_PACKAGES = ("agentrl", "torch", "transformers", "tokenizers", "ray", "trio", "httpx", "msgpack", "numpy", "faiss-cpu", "pydantic")
_INCARNATIONS_PER_RUN = 1000  # restarts of a role within one incarnation of the run stay below this
_PROBED_S = 0.2  # `is_running` holds the lock for a moment: a start tries for longer than that


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """An opened run directory: this process holds its lock."""

    path: Path
    incarnation: int  # of the run: 1, 2, ... with every start
    extended: bool  # the recipe now ends elsewhere (steps, epochs, hours) than when the run was last started

    @classmethod
    @contextmanager
    def open(cls, recipe: Recipe, *, resolved: str, command: list[str], fresh: bool) -> Iterator[RunDirectory]:
        """Lock, check and describe `<run.dir>/<name>`.

        Args:
            resolved: the resolved recipe as YAML text.
            fresh: put an existing run aside (renamed, never deleted) and begin anew.

        Raises:
            ConfigError: it cannot be made, another process works in it, or it holds a run of another recipe.
        """
        path = Path(recipe.run.dir).resolve() / recipe.name
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run.dir: {path} cannot be made: {error}") from error
        with _locked(path):
            previous = None if fresh else _read_json(path / "run.json")
            changes = [] if previous is None else _changes(previous["recipe"], recipe)
            if changes and _has_results(path):
                raise ConfigError(
                    f"{path} holds a run of another recipe:\n"
                    + "\n".join(changes)
                    + "\nGive this run another name (name=...), or begin anew with --fresh"
                )
            if (fresh or changes) and (path / "run.json").exists():
                _put_aside(path)
                previous = None
            incarnation = 1 if previous is None else int(previous["incarnation"]) + 1
            (path / "recipe.yaml").write_text(resolved, encoding="utf-8")
            write_json(path / "run.json", _describe(recipe, command, incarnation, previous))
            yield cls(
                path=path, incarnation=incarnation, extended=previous is not None and _end_of(previous["recipe"]) != _end_of(recipe.model_dump())
            )

    @property
    def finished(self) -> bool:
        """The run has ended by itself, where the recipe still ends it: summary.json says so."""
        summary = _read_json(self.path / "summary.json")
        return summary is not None and summary.get("phase") == "finished" and not self.extended

    def first_incarnation(self) -> int:
        """The first incarnation of any role in this incarnation of the run: larger than any before."""
        return self.incarnation * _INCARNATIONS_PER_RUN


def is_running(path: Path) -> bool:
    """Whether a process holds the lock of a run directory."""
    try:
        with open(path / ".lock", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False  # closing the file let go of it


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file so that it is there whole or not at all."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")
    temporary.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path / ".lock", "a+", encoding="utf-8") as lock:
        if not _taken(lock):
            lock.seek(0)
            raise ConfigError(f"{path} is in use by process {lock.read().strip() or 'unknown'}: wait for it, or give this run another name")
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _taken(lock: IO[str]) -> bool:
    deadline = time.monotonic() + _PROBED_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_PROBED_S / 10)


def _put_aside(path: Path) -> None:
    number = 1
    while (target := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    target.mkdir()
    for entry in path.iterdir():
        if entry.name != ".lock":
            entry.rename(target / entry.name)


def _changes(before: dict[str, Any], recipe: Recipe) -> list[str]:
    """What differs, of what a resume may not change: a line each."""
    old, new = dict(_leaves(before)), dict(_leaves(recipe.model_dump(mode="json")))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key) and not key.startswith(_FREE_TO_CHANGE)]
    return [f"  {key}: {old.get(key)!r} -> {new.get(key)!r}" for key in changed]


def _has_results(path: Path) -> bool:
    """A step was trained or an evaluation ended: nothing less is worth refusing a corrected recipe for."""
    metrics = path / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def _end_of(recipe: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(recipe["run"][name] for name in ("steps", "epochs", "hours"))


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}{key}.")
    else:
        yield prefix.rstrip("."), value


def _describe(recipe: Recipe, command: list[str], incarnation: int, previous: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "seed": recipe.seed,
        "command": command,
        "incarnation": incarnation,
        "started_s": [*(previous or {}).get("started_s", []), time.time()],
        "commit": _commit(),
        "python": sys.version.split()[0],
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "hardware": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cpus": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "recipe": recipe.model_dump(mode="json"),
    }


def _commit() -> str | None:
    """The commit this package is run from, "-dirty" where files differ; None outside a checkout."""
    here = Path(__file__).resolve().parent
    asked = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=here, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor()


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}): put it right, or begin anew under another name") from error
    return value
