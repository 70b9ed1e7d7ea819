"""What a run directory's journal says, from a live run or a dead one: read, never locked, never changed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.buffer import journal
from agentrl.buffer.records import BatchTrained, Record, TrajectoryAdded
from agentrl.buffer.settings import BufferSettings
from agentrl.buffer.state import RunState
from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError
from agentrl.metrics.alarms import read_alarms
from agentrl.metrics.overlap import Overlap, TurnTime, measure_overlap, turn_times
from agentrl.system.rundir import is_running
from agentrl.types import Purpose
from agentrl.wire import decode_trajectory

__all__ = ["ledger_of", "overlap_of", "status"]

_ENDED = ("finished", "stopping", "failed")


def status(run_dir: Path) -> dict[str, Any]:
    """Where a run stands: phase, step, ledger, tickets, drops by cause, versions, alarms.

    The phase of a run that was neither finished nor stopped nor failed, and that no process works on, is `interrupted`.

    Raises:
        ConfigError: the directory holds no run.
        JournalError: its journal was altered.
    """
    state, alarms = _fold(run_dir), read_alarms(run_dir)
    admission = state.groups.admission
    return {
        "run": run_dir.name,
        "phase": state.phase if state.phase in _ENDED or is_running(run_dir) else "interrupted",
        "step": state.batches.step,
        "hours_trained": round(state.elapsed_s(state.last_t or time.time()) / 3600, 3),
        "groups": {"running": admission.running, "buffered": admission.buffered, "training": admission.training, "limit": admission.limit},
        "ledger": _ledger(state),
        "tickets_open": len(state.tickets.open),
        "tickets_closed": {str(cause): count for cause, count in state.tickets.closed.items()},
        "late": state.tickets.late.total(),
        "version": state.versions.published,
        "alarms": {"raised": sum(line["kind"] == "alarm" for line in alarms), "rollbacks": sum(line["kind"] == "restored" for line in alarms)},
        "incarnations": {f"{role}-{index}": number for (role, index), number in state.incarnations.items()},
    }


def ledger_of(run_dir: Path) -> dict[str, Any]:
    """The accounts of a run, drops by cause included."""
    return _ledger(_fold(run_dir))


def overlap_of(run_dir: Path) -> Overlap:
    """How asynchronous the run was: turns of training episodes against learner steps."""
    turns: list[TurnTime] = []
    steps: list[tuple[float, float]] = []
    for record in _records(run_dir):
        if isinstance(record, BatchTrained):
            steps.append((record.started_s, record.ended_s))
        elif isinstance(record, TrajectoryAdded) and record.ticket.purpose is Purpose.TRAIN:
            turns += turn_times([decode_trajectory(record.data)])
    return measure_overlap(turns, steps)


def _ledger(state: RunState) -> dict[str, Any]:
    return state.groups.ledger.balance() | {"dropped_by_cause": state.groups.ledger.dropped()}


def _fold(run_dir: Path) -> RunState:
    described = run_dir / "run.json"
    if not described.exists():
        raise ConfigError(f"{run_dir} is no run directory: it has no run.json")
    try:
        recipe = Recipe.model_validate(json.loads(described.read_text(encoding="utf-8"))["recipe"])
    except (ValueError, KeyError, TypeError) as error:  # pydantic's errors are ValueErrors
        raise ConfigError(f"{described} does not describe a run of this version: {error}") from error
    state = RunState(BufferSettings.of(recipe, total_steps=recipe.run.steps), keep=None)
    state.keeps_data = False
    for location, record in journal.read(run_dir / "journal"):
        state.apply(record, location)
    return state


def _records(run_dir: Path) -> Iterator[Record]:
    return (record for _, record in journal.read(run_dir / "journal"))
