"""Fault points: named places in the code where a test can make the process fail, freeze or wait.

Armed by the environment variable `AGENTRL_FAULTS`, a comma-separated list of `point=action[@n]`: on the n-th passage (default the
first) through `point` the action is done: `kill` (SIGKILL to this process), `stop` (SIGSTOP) or `raise`.

    AGENTRL_FAULTS=journal.appended=kill@3 agentrl run recipes/quickstart.yaml

Unarmed, a point costs one dictionary lookup.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

from agentrl.errors import AgentRLError, ConfigError

__all__ = ["FaultInjected", "point"]


class FaultInjected(AgentRLError):
    """Raised by an armed fault point with the action `raise`."""


def point(name: str) -> None:
    """Pass the fault point `name`."""
    if name not in _armed:
        return
    _passages[name] += 1
    action, passage = _armed[name]
    if _passages[name] != passage:
        return
    if action == "raise":
        raise FaultInjected(f"fault point {name}, passage {passage}")
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def _parse(text: str) -> dict[str, tuple[str, int]]:
    armed: dict[str, tuple[str, int]] = {}
    for item in filter(None, text.split(",")):
        name, _, what = item.partition("=")
        action, _, passage = what.partition("@")
        if action not in ("kill", "stop", "raise") or not (passage or "1").isdigit():
            raise ConfigError(f"AGENTRL_FAULTS: expected point=kill|stop|raise[@n], got {item!r}")
        armed[name] = (action, int(passage or "1"))
    return armed


_armed = _parse(os.environ.get("AGENTRL_FAULTS", ""))
_passages: Counter[str] = Counter()
