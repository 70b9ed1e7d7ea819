"""The ledger: what became of everything that was wanted. Derived from the journal's records by the buffer's fold, live and in recovery.

    training samples     wanted = trained + dropped (by cause) + buffered + training + in flight + not issued
    evaluation samples   wanted = played + failed (by cause) + in flight + not issued

Every wanted sample is in exactly one account. A retry, a crash or a rollback moves it; nothing else makes or ends it. `not issued` are
samples of admitted groups that no open ticket plays at the moment: also those that wait for their next attempt, and those whose ticket
closed as `run_end`, which a longer run takes up.
"""

from __future__ import annotations

from collections import Counter

from agentrl.errors import ReplayBufferError

__all__ = [
    "BUFFERED",
    "DROPPED",
    "IN_FLIGHT",
    "NOT_ISSUED",
    "PLAYED",
    "TRAINED",
    "TRAINING",
    "Ledger",
]

NOT_ISSUED, IN_FLIGHT, BUFFERED, TRAINING, TRAINED, PLAYED = "not_issued", "in_flight", "buffered", "training", "trained", "played"
DROPPED = "dropped/"  # + cause


class Ledger:
    """Accounts of samples by name."""

    def __init__(self, *accounts: str) -> None:
        self.wanted = 0
        self._accounts: Counter[str] = Counter(dict.fromkeys(accounts, 0))

    def want(self, samples: int) -> None:
        """So many more samples are wanted."""
        self.wanted += samples
        self._accounts[NOT_ISSUED] += samples

    def move(self, source: str, target: str, samples: int = 1) -> None:
        """Samples change their account."""
        self._accounts[source] -= samples
        self._accounts[target] += samples

    def __getitem__(self, account: str) -> int:
        return self._accounts[account]

    def balance(self) -> dict[str, int]:
        """All accounts and `wanted`.

        Raises:
            ReplayBufferError: they do not add up, or one is negative: samples were lost or counted twice.
        """
        told = f"wanted {self.wanted} = " + " + ".join(f"{name} {count}" for name, count in sorted(self._accounts.items()))
        if self.wanted != sum(self._accounts.values()):
            raise ReplayBufferError(f"the ledger does not balance: {told}")
        if min(self._accounts.values(), default=0) < 0:
            raise ReplayBufferError(f"the ledger has a negative account: {told}")
        return {"wanted": self.wanted, **self._accounts}

    def dropped(self) -> dict[str, int]:
        """Samples dropped, by cause."""
        return {name.removeprefix(DROPPED): count for name, count in self._accounts.items() if name.startswith(DROPPED) and count}

    def check(self, counted: Counter[str]) -> None:
        """Compare with a count over the samples themselves.

        Args:
            counted: of those accounts that can be counted.

        Raises:
            ReplayBufferError: they differ.
        """
        self.balance()
        differ = {name: (self._accounts[name], counted[name]) for name in counted if self._accounts[name] != counted[name]}
        if differ:
            raise ReplayBufferError(f"the ledger and the groups differ (ledger, groups): {differ}")
