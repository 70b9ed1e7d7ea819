"""Fault points: named places in the code where a test can make the process fail, freeze or wait.

Armed by the environment variable `AGENTRL_FAULTS`, a comma-separated list of `point=action[@n]`: on the n-th passage (default the
first) through `point` the action is done: `kill` (SIGKILL to this process), `stop` (SIGSTOP) or `raise`.

    AGENTRL_FAULTS=journal.appended=kill@3 agentrl run recipes/quickstart.yaml

With a directory in `AGENTRL_FAULTS_ONCE` each of them is done once by all processes that share it, whichever comes first: one engine of two
is killed, and not once more when it has been restarted.

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
    if _passages[name] != passage or _done_by_another(name):
        return
    if action == "raise":
        raise FaultInjected(f"fault point {name}, passage {passage}")
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def _done_by_another(name: str) -> bool:
    """Whether a process that shares the directory has done it; from now on it has."""
    directory = os.environ.get("AGENTRL_FAULTS_ONCE")
    if directory is None:
        return False
    try:
        os.close(os.open(os.path.join(directory, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    return False


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
