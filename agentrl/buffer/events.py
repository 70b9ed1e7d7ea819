"""Events: what happened, for those who watch a run. They are part of the fold, so a restarted buffer numbers them as before."""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["Events"]

REMEMBERED = 4096  # a watcher that is further behind than this misses some


class Events:
    """Numbered plain maps: `{"seq", "kind", "t", ...}`, kinds step, evaluation, published, phase, failure, checkpoint, rollback."""

    def __init__(self) -> None:
        self.last = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=REMEMBERED)

    def tell(self, kind: str, t: float, **details: Any) -> None:
        """Add one."""
        self.last += 1
        self._events.append({"seq": self.last, "kind": kind, "t": t, **details})

    def after(self, number: int) -> list[dict[str, Any]]:
        """Those newer than `number`, oldest first."""
        missing = self.last - number
        if missing <= 0:
            return []
        events = self._events
        return [events[i] for i in range(max(0, len(events) - missing), len(events))]
