"""How many further attempts a client may make: a budget that all its calls share.

Each call pays a fraction of an attempt in, and the clock pays a little in, too; a further attempt costs one, which comes back when it is answered.
While the server is well, a fifth of the calls may fail and be made twice; when it fails, all callers together ask it no more often than the
clock pays for, however many they are; and when it is well again, nobody waits for the clock. A caller who finds the budget empty waits for
its turn: nothing is given up before its deadline.

SOURCE: Finagle's RetryBudget ("Retry Budgets", finagle.github.io, 2016): 20 % of the calls, at least 10 attempts a second, credits of 10
seconds. That an answered attempt is paid back is from the AWS SDKs' standard retry mode ("Retry behavior", AWS SDKs and Tools Reference Guide). In
both an empty budget ends the call, as in gRPC's retry throttling (proposal A6); here it delays it, for a lost search costs an episode.
"""

from __future__ import annotations

import trio

__all__ = ["RetryBudget"]

SHARE = 0.2  # of the calls
PER_SECOND = 10.0
CREDIT_S = 10.0  # what is not used for so long is lost
ROUNDING = 1e-6  # of an attempt: what a clock's last digit may be short of


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
        self._paid_back = trio.Event()  # while the first of them waits

    def deposit(self) -> None:
        """A call is made."""
        self._left = min(self._most, self._left + self._share)

    async def withdraw(self) -> None:
        """Wait until a further attempt may be made, and count it."""
        async with self._turns:
            while (missing := 1.0 - self._now_left()) > ROUNDING:
                self._paid_back = trio.Event()
                with trio.move_on_after(missing / self._per_second):
                    await self._paid_back.wait()
            self._left -= 1.0

    def pay_back(self) -> None:
        """A further attempt was answered."""
        self._left = min(self._most, self._left + 1.0)
        self._paid_back.set()

    def _now_left(self) -> float:
        now = trio.current_time()
        passed_s = 0.0 if self._counted_at is None else now - self._counted_at
        self._counted_at = now
        self._left = min(self._most, self._left + passed_s * self._per_second)
        return self._left
