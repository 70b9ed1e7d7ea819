"""How many further attempts a client may make: a budget that all its calls share.

Each call pays a fraction of an attempt in, and the clock pays a little in, too; a further attempt costs one. While the server is well, a fifth of
the calls may be made twice; when it fails, all callers together ask it no more often than the clock pays for, however many they are. A caller who
finds the budget empty waits for its turn: nothing is given up before its deadline.

SOURCE: Finagle's RetryBudget ("Retry Budgets", finagle.github.io, 2016): 20 % of the calls, at least 10 attempts a second, credits of 10
seconds. There an empty budget ends the call, as in gRPC's retry throttling (proposal A6); here it delays it, for a lost search costs an episode.
"""

from __future__ import annotations

import trio

__all__ = ["RetryBudget"]

SHARE = 0.2  # of the calls
PER_SECOND = 10.0
CREDIT_S = 10.0  # what is not used for so long is lost


class RetryBudget:
    """A token bucket of further attempts.

    Args:
        share: of an attempt that each call pays in.
        per_second: attempts that the clock pays in.
    """

    def __init__(self, *, share: float = SHARE, per_second: float = PER_SECOND) -> None:
        self._share, self._per_second = share, per_second
        self._most = per_second * CREDIT_S
        self._left = self._most
        self._counted_at: float | None = None  # trio's clock; None before the first withdrawal
        self._turns = trio.StrictFIFOLock()  # callers wait in their order

    def deposit(self) -> None:
        """A call is made."""
        self._left = min(self._most, self._left + self._share)

    async def withdraw(self) -> None:
        """Wait until a further attempt may be made, and count it."""
        async with self._turns:
            missing = 1.0 - self._now_left()
            if missing > 0:
                await trio.sleep(missing / self._per_second)
            self._left = max(0.0, self._now_left() - 1.0)  # max: a sleep may be short by the clock's last digit

    def _now_left(self) -> float:
        now = trio.current_time()
        passed_s = 0.0 if self._counted_at is None else now - self._counted_at
        self._counted_at = now
        self._left = min(self._most, self._left + passed_s * self._per_second)
        return self._left
