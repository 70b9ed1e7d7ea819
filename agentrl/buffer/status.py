"""The status of the buffer, as a plain map: counters only, cheap enough to ask for every second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.buffer.journal import Journal
from agentrl.buffer.state import RunState

__all__ = ["status"]

Heartbeats = Mapping[tuple[str, int], tuple[float, Mapping[str, Any]]]


def status(state: RunState, journal: Journal, heartbeats: Heartbeats, now: float) -> dict[str, Any]:
    """What the buffer knows of the run.

    Returns:
        phase, step, total_steps, progress, elapsed_s, halt; `admission` and `filter` in groups; `ledger` and `eval_ledger` in samples; `tickets`;
        `versions`; `evaluation` (the running one); `failed_share`; `journal`; `event` (number of the newest); `incarnations`, `urls` and
        `heartbeats` by process, e.g. "worker-0".
    """
    admission, tickets, halt = state.groups.admission, state.tickets, state.halt
    outstanding = state.batches.outstanding
    return {
        "phase": state.phase,
        "step": state.batches.step,
        "total_steps": state.settings.total_steps,
        "progress": state.progress(now),
        "elapsed_s": state.elapsed_s(now),
        "halt": None if halt is None else {"phase": halt.phase, "reason": halt.reason, "failure": dict(halt.failure)},
        "admission": {"running": admission.running, "buffered": admission.buffered, "training": admission.training, "limit": admission.limit},
        "filter": {"completed": state.groups.completed, "filtered": state.groups.filtered, "in_row": state.groups.filtered_in_row},
        "ledger": state.groups.ledger.balance(),
        "eval_ledger": state.evaluations.ledger.balance(),
        "dropped": state.groups.ledger.dropped(),
        "tickets": {
            "issued": tickets.issued,
            "open": len(tickets.open),
            "closed": {str(cause): count for cause, count in tickets.closed.items()},
            "late": {str(cause): count for cause, count in tickets.late.items()},
        },
        "failed_share": tickets.failed_share,
        "versions": {"newest": state.versions.next - 1, "published": state.versions.published, "serving": state.versions.serving},
        "batch": None if outstanding is None else outstanding.taken.batch,
        "consumed": [list(pair) for pair in state.batches.consumed],
        "evaluation": _evaluation(state),
        "journal": {"bytes": journal.appended, "trouble": None if journal.trouble is None else str(journal.trouble)},
        "event": state.events.last,
        "incarnations": {f"{role}-{index}": number for (role, index), number in state.incarnations.items()},
        "urls": {f"{role}-{index}": url for (role, index), url in state.urls.items() if url},
        "heartbeats": {f"{role}-{index}": {"age_s": now - at, "note": dict(note)} for (role, index), (at, note) in heartbeats.items()},
    }


def _evaluation(state: RunState) -> dict[str, Any] | None:
    running = state.evaluations.running
    if running is None:
        return None
    opened = running.opened
    return {
        "evaluation": opened.evaluation,
        "set": opened.set,
        "step": opened.step,
        "stage": opened.stage,
        "wanted": len(running.samples),
        "unfinished": running.unfinished,
    }
