"""Which trajectories go through the model together: micro-batches, padded or packed, dealt to the ranks so that each has as much to do."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

__all__ = ["MicroBatches", "RankTokens", "pack", "rank_tokens"]

# Of the fullest rank over the mean: below it an exchange is not worth looking for.
EVEN = 1.01

MicroBatches = tuple[tuple[int, ...], ...]  # rows of each micro-batch; an empty one is a dummy


def pack(
    rows: Sequence[int], lengths: Sequence[int], *, budget: int, ranks: int, count: int | None = None, padded: bool = True
) -> tuple[MicroBatches, ...]:
    """Micro-batches of every rank.

    Rows are sorted by length (ties by row), and each goes to the rank that has the fewest tokens so far (Graham 1969, largest processing
    time first): ranks end at most one row apart. With few rows for each rank that can be much, so rows are exchanged until the fullest rank is
    within EVEN of the mean or no exchange of two rows makes it less full.

    Each rank cuts its rows where (rows x longest), or without padding their sum, would exceed the budget, or after `count` rows. Every rank
    gets the same number of micro-batches, at least one: where it has fewer, empty ones are appended, because each forward and backward pass
    is a collective of all ranks.

    Args:
        rows: rows to pack, each an index into `lengths`.
        budget: tokens of a micro-batch, padding included. A row longer than that goes alone.
        count: trajectories of a micro-batch, whatever their lengths: where given, it stands in for the budget. No rank then gets
            more than its even share of the rows, rounded up: there are as few micro-batches as there can be.
        padded: rows lie side by side, padded to the longest; else end to end.

    Returns:
        For each rank its micro-batches, longest rows first: what needs the most memory comes first.
    """
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    dealt = _deal(ordered, lengths, ranks=ranks, most_rows=len(ordered) if count is None else -(-len(ordered) // ranks))
    dealt = _evened(dealt, lengths)
    cut = [list(_cut(hand, lengths, budget=budget, count=count, padded=padded)) for hand in dealt]
    most = max(1, *(len(micro_batches) for micro_batches in cut))
    return tuple(tuple(micro_batches) + ((),) * (most - len(micro_batches)) for micro_batches in cut)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTokens:
    """Tokens of the rank that has the most and of the one that has the fewest, padding aside. All others wait for the first."""

    most: int
    fewest: int

    @property
    def spread(self) -> int:
        """How far apart they are."""
        return self.most - self.fewest


def rank_tokens(rows: Sequence[int], lengths: Sequence[int], packed: Sequence[MicroBatches]) -> tuple[RankTokens, RankTokens]:
    """What balancing did: the ranks' tokens had the rows been split as they come, and as `pack` has split them.

    As they come: consecutive pieces of like many rows, the first ones a row longer where the ranks do not divide them.
    """
    ranks = len(packed)
    each, over = divmod(len(rows), ranks)
    ends = [each * rank + min(rank, over) for rank in range(ranks + 1)]
    before = [sum(lengths[row] for row in rows[ends[rank] : ends[rank + 1]]) for rank in range(ranks)]
    after = [sum(lengths[row] for micro_batch in micro_batches for row in micro_batch) for micro_batches in packed]
    return RankTokens(most=max(before), fewest=min(before)), RankTokens(most=max(after), fewest=min(after))


def _deal(ordered: Sequence[int], lengths: Sequence[int], *, ranks: int, most_rows: int) -> list[list[int]]:
    """The rows of each rank; a rank with `most_rows` gets no more."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    open_ranks = [(0, rank) for rank in range(ranks)]  # (tokens, rank), the least loaded first
    for row in ordered:
        tokens, rank = heapq.heappop(open_ranks)
        hands[rank].append(row)
        if len(hands[rank]) < most_rows:
            heapq.heappush(open_ranks, (tokens + lengths[row], rank))
    return hands


def _evened(hands: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Exchange a row of the fullest rank for a shorter one of another, as long as that helps: each time the pair that helps most."""
    loads = [sum(lengths[row] for row in hand) for hand in hands]
    mean = sum(loads) / len(loads)
    while (most := max(loads)) > EVEN * mean:
        full = loads.index(most)
        # what the fuller of the two ranks would have, then who is exchanged
        others = [rank for rank in range(len(hands)) if loads[rank] < most]
        exchanges = (
            (max(most - shift, loads[rank] + shift), longer, shorter, rank)
            for rank in others
            for longer in hands[full]
            for shorter in hands[rank]
            if (shift := lengths[longer] - lengths[shorter]) > 0
        )
        after, longer, shorter, rank = min(exchanges, default=(most, 0, 0, 0))
        if after >= most:
            break
        for giver, taker, row in ((full, rank, longer), (rank, full, shorter)):
            hands[giver].remove(row)
            hands[taker].append(row)
            loads[giver] -= lengths[row]
            loads[taker] += lengths[row]
    return [sorted(hand, key=lambda row: (-lengths[row], row)) for hand in hands]


def _cut(rows: Sequence[int], lengths: Sequence[int], *, budget: int, count: int | None, padded: bool) -> Iterator[tuple[int, ...]]:
    start = 0
    while start < len(rows):
        if count is not None:
            fit = count
        elif padded:
            fit = budget // max(1, lengths[rows[start]])  # the first row is the longest of those that follow
        else:
            totals = accumulate(lengths[row] for row in rows[start:])
            fit = sum(1 for _ in takewhile(lambda total: total <= budget, totals))
        fit = max(1, fit)
        yield tuple(rows[start : start + fit])
        start += fit
