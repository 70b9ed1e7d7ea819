"""How often a paid service may be asked: so many times a second, and so many in any 24 hours."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from retriever.batching import QueueFull
from retriever.web.providers import QuotaExhausted

__all__ = ["DAY_S", "RateLimit"]

DAY_S = 24 * 60 * 60


class RateLimit:
    """A token bucket of a second's requests, and a count of a day's.

    The bucket is kept as the time at which it will be full again (the generic cell rate algorithm, ITU-T I.371), so that waiting is
    a sleep of a known length and first come is first served. The day is counted exactly, as services do: a bucket would allow twice
    the quota in its first day.

    Args:
        per_second: requests; up to a second's worth may come at once.
        per_day: requests in any 24 hours; None for no limit.
        spent: Unix times of requests made before, e.g. by an earlier process.
    """

    def __init__(
        self,
        *,
        per_second: float,
        per_day: int | None = None,
        spent: Iterable[float] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 0 < per_second < math.inf:
            raise ValueError(f"per_second must be more than 0, got {per_second!r}")
        if per_day is not None and per_day < 1:
            raise ValueError(f"per_day must be 1 or more, got {per_day!r}")
        self.per_second, self.per_day = per_second, per_day
        self._clock = clock
        self._full_at = 0.0
        self._given_back: list[float] = []  # a heap: turns to come whose takers were cancelled
        self._spent = deque(sorted(spent))

    @property
    def spent_today(self) -> int:
        """Requests of the last 24 hours."""
        self._forget()
        return len(self._spent)

    async def turn(self, *, within_s: float) -> float:
        """Wait for the turn of one request, and count it: as what is returned, for `uncount`. Cancelled, it is not counted.

        Raises:
            QuotaExhausted: the day's requests are spent.
            QueueFull: the turn would come after `within_s`.
        """
        wait_s = self.reserve(within_s=within_s)
        turn_at = self._spent[-1]
        try:
            await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            self._spent.remove(turn_at)
            heapq.heappush(self._given_back, turn_at)  # others keep theirs, or two would be at once
            raise
        return turn_at

    def uncount(self, turn: float) -> None:
        """A request was not sent after all: it is none of the day's."""
        with suppress(ValueError):  # it is a day old and forgotten
            self._spent.remove(turn)

    def reserve(self, *, within_s: float) -> float:
        """Count a request; seconds until its turn. Raises as `turn`."""
        now = self._clock()
        self._forget()
        if self.per_day is not None and len(self._spent) >= self.per_day:
            again_s = math.ceil(max(1.0, self._spent[0] + DAY_S - now))
            raise QuotaExhausted(f"all {self.per_day} searches that --per-day allows in 24 hours are spent", again_s)
        while self._given_back and self._given_back[0] < now:
            heapq.heappop(self._given_back)
        full_at = max(self._full_at, now) + 1 / self.per_second
        wait_s = self._given_back[0] - now if self._given_back else max(0.0, full_at - now - max(1.0, 1 / self.per_second))
        if wait_s > within_s:
            raise QueueFull(math.ceil(wait_s * self.per_second), math.ceil(wait_s))
        if self._given_back:
            heapq.heappop(self._given_back)
        else:
            self._full_at = full_at
        self._spent.append(now + wait_s)
        return wait_s

    def _forget(self) -> None:
        yesterday = self._clock() - DAY_S
        while self._spent and self._spent[0] <= yesterday:
            self._spent.popleft()
