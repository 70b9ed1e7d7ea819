"""alarms.jsonl: the alarms of a run and the rollbacks they led to, a line each, on the disk before anything follows from it.

    {"kind": "alarm", "time", "alarm", "metric", "step", "since", "value", "bound", "actions"}
    {"kind": "rollback", "time", "number", "alarm", "step", "to", "to_step", "good_until", "abandoned", "learning_rate_scale"}   about to go back
    {"kind": "restored", "time", "number", "to", "to_step", "version"}                                                           ... done

A rollback without its `restored` was cut short by a crash: whoever starts the learner again finishes it. Half a line, as a killed writer
leaves it, is passed over.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from agentrl.metrics.files import to_json

__all__ = ["ALARMS", "AlarmLog", "RolledBack", "read_alarms"]

ALARMS = "alarms.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    """A rollback: to which checkpoint, from where."""

    number: int  # 1, 2, ... in the life of the run
    alarm: str
    step: int  # the alarm was raised in
    to: str  # the checkpoint's id
    to_step: int
    good_until: int  # weights of later steps may be bad
    abandoned: tuple[str, ...]  # ids of newer checkpoints, which are removed
    learning_rate_scale: float  # from here on


class AlarmLog:
    """The file of one run, read and added to by the learner's first rank."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ALARMS
        lines = read_alarms(run_dir)
        self.rollbacks = [_rolled_back(line) for line in lines if line["kind"] == "rollback"]
        restored = [line for line in lines if line["kind"] == "restored"]
        self._finished = restored[-1]["number"] if restored else 0

    @property
    def last(self) -> RolledBack | None:
        """The newest rollback."""
        return self.rollbacks[-1] if self.rollbacks else None

    @property
    def unfinished(self) -> bool:
        """... and whether it was begun and is not done."""
        return self.last is not None and self.last.number > self._finished

    def alarm(self, told: dict[str, Any]) -> None:
        """An alarm was raised."""
        self._append("alarm", told)

    def rollback(self, rolled_back: RolledBack) -> None:
        """The run is about to go back."""
        self._append("rollback", asdict(rolled_back))
        self.rollbacks.append(rolled_back)

    def restored(self, *, version: int) -> None:
        """The journal is rolled back to the last rollback's checkpoint, and `version` reserved for its weights."""
        assert self.last is not None, "what was never begun does not end"
        self._append("restored", {"number": self.last.number, "to": self.last.to, "to_step": self.last.to_step, "version": version})
        self._finished = self.last.number

    def _append(self, kind: str, told: dict[str, Any]) -> None:
        line = to_json({"kind": kind, "time": time.time()} | told)
        with self._path.open("ab") as file:
            torn = file.tell() > 0 and not self._path.read_bytes().endswith(b"\n")
            file.write((b"\n" if torn else b"") + line + b"\n")
            file.flush()
            os.fsync(file.fileno())


def read_alarms(run_dir: Path) -> list[dict[str, Any]]:
    """The lines, oldest first; none where nothing was raised."""
    path = run_dir / ALARMS
    lines = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:  # torn by a kill
            continue
    return lines


def _rolled_back(line: dict[str, Any]) -> RolledBack:
    return RolledBack(**{field.name: line[field.name] for field in fields(RolledBack)} | {"abandoned": tuple(line["abandoned"])})
