"""A circuit breaker: a server that fails again and again is asked now and then, not by everybody at once.

    closed     every attempt is made. `failures` of them in a row within `window_s`: it opens
    open       one attempt is made every so often, as a probe; all others wait. The pause doubles with every probe that fails, from
               `first_pause_s` to `longest_pause_s`. A success closes it, and lets all go on

Nobody is refused: who waits for an open breaker waits until its own deadline, and the longest pause is no longer than that of a lone caller
between attempts. So an open breaker takes load off a server that is starting, and ends no call before its deadline would. A probe that hangs
holds up nobody: the next one is made after the pause, whether or not it has ended.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import UTC, datetime

import trio

__all__ = ["CircuitBreaker"]

FAILURES = 10  # a lone caller does not come to so many within the window
WINDOW_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 2.0


class CircuitBreaker:
    """The breaker of one server, for trio tasks."""

    def __init__(
        self,
        *,
        failures: int = FAILURES,
        window_s: float = WINDOW_S,
        first_pause_s: float = FIRST_PAUSE_S,
        longest_pause_s: float = LONGEST_PAUSE_S,
    ) -> None:
        self._window_s = window_s
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._failed_at: deque[float] = deque(maxlen=failures)  # in a row: a success empties it
        self._pause_s = first_pause_s
        self._next_probe = 0.0
        self._probing = False  # since the last probe none has failed: attempts from before it opened fail late, and are none
        self._closed: trio.Event | None = None  # set when it closes; None while it is closed
        self._failing_since = 0.0  # Unix time of the first failure of the row
        self._failures = 0
        self._reason = ""

    @property
    def is_open(self) -> bool:
        """Whether attempts wait."""
        return self._closed is not None

    @property
    def state(self) -> str:
        """What an open breaker knows of its server: since when it fails, how often it did, and how; empty while it is closed."""
        if not self.is_open:
            return ""
        since = datetime.fromtimestamp(self._failing_since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"its circuit breaker is open: {self._failures} failures in a row since {since}, the last: {self._reason}"

    async def admission(self) -> None:
        """Wait until an attempt may be made. Whoever is admitted tells how it went."""
        while self._closed is not None:
            now = trio.current_time()
            if now >= self._next_probe:
                self._next_probe = now + self._pause_s
                self._probing = True
                return
            with trio.move_on_at(self._next_probe):
                await self._closed.wait()

    def succeeded(self) -> None:
        """The server answered, be it a refusal: it is there."""
        if not self._failures:
            return
        self._failures = 0
        self._failed_at.clear()
        self._pause_s = self._first_pause_s
        if self._closed is not None:
            self._closed.set()
            self._closed = None

    def failed(self, reason: str) -> None:
        """The server cannot be reached, broke, or did not answer in time."""
        now = trio.current_time()
        if not self._failures:
            self._failing_since = time.time()
        self._failures += 1
        self._reason = reason
        self._failed_at.append(now)
        if self._closed is not None:
            if self._probing:
                self._probing = False
                self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
                self._next_probe = now + self._pause_s
        elif len(self._failed_at) == self._failed_at.maxlen and now - self._failed_at[0] <= self._window_s:
            self._closed = trio.Event()
            self._next_probe = now + self._pause_s
