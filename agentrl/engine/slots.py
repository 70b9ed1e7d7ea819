"""Who holds which slot of the KV cache: running, kept for a request that continues it, or free."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SlotTable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """A finished sequence whose keys and values are still in its slot."""

    tokens: list[int]
    key: str
    age: int  # larger is newer


class SlotTable:
    """Slots 0..n-1. A finished request's slot is kept until a request continues it, its place is needed, or the weights change."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))
        self._kept: dict[int, _Kept] = {}
        self._ages = itertools.count()

    def resume(self, tokens: Sequence[int], key: str) -> tuple[int, int] | None:
        """Take the kept slot with the longest proper prefix of `tokens`: (slot, prefix length), None where there is none."""
        best: tuple[int, int] | None = None
        for slot, kept in self._kept.items():
            length = len(kept.tokens)
            # the last token first: it tells most candidates apart
            if length < len(tokens) and tokens[length - 1] == kept.tokens[-1] and kept.key == key and (best is None or length > best[1]):
                best = (slot, length) if tokens[:length] == kept.tokens else best
        if best is not None:
            del self._kept[best[0]]
        return best

    def take(self) -> int | None:
        """A free slot, else the one kept longest, else None."""
        if self._free:
            return heapq.heappop(self._free)
        if self._kept:
            oldest = min(self._kept, key=lambda slot: self._kept[slot].age)
            del self._kept[oldest]
            return oldest
        return None

    def keep(self, slot: int, tokens: list[int], key: str) -> None:
        """A running slot's sequence has finished; `tokens` are those whose keys and values it holds."""
        self._kept[slot] = _Kept(tokens=tokens, key=key, age=next(self._ages))

    def release(self, slot: int) -> None:
        """A running slot holds nothing of use any more."""
        heapq.heappush(self._free, slot)

    def drop_kept(self) -> None:
        """Forget every cached prefix."""
        for slot in self._kept:
            heapq.heappush(self._free, slot)
        self._kept.clear()

    def lowest_below(self, limit: int) -> int | None:
        """The lowest slot under `limit` that no running request holds."""
        return min((slot for slot in (*self._free[:1], *self._kept) if slot < limit), default=None)

    def move(self, running: int, other: int) -> int:
        """The contents of a running slot and of one that is not have been exchanged. Returns how many tokens `other` held."""
        if other in self._kept:
            self._kept[running] = self._kept.pop(other)
            return len(self._kept[running].tokens)
        self._free.remove(other)
        heapq.heapify(self._free)
        heapq.heappush(self._free, running)
        return 0
