"""Which trajectories go through the model together: right-padded micro-batches under a budget of padded tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MicroBatches", "pack"]

MicroBatches = tuple[tuple[int, ...], ...]  # rows of each micro-batch; an empty one is a dummy


def pack(rows: Sequence[int], lengths: Sequence[int], *, budget: int, ranks: int) -> tuple[MicroBatches, ...]:
    """Micro-batches of every rank.

    Rows are sorted by length (ties by row) and dealt to the ranks to and fro, so that ranks get like amounts of work; each rank cuts its
    rows so that (rows x longest) stays within the budget. Every rank gets the same number, at least one: where it has fewer, empty
    micro-batches are appended, because each forward and backward pass is a collective of all ranks.

    Args:
        rows: rows to pack, each an index into `lengths`.
        budget: padded tokens of a micro-batch. A row longer than that goes alone.

    Returns:
        For each rank its micro-batches, longest rows first: what needs the most memory comes first.
    """
    ordered = sorted(rows, key=lambda row: (-lengths[row], row))
    dealt = [_cut(_hand(ordered, rank, ranks), lengths, budget) for rank in range(ranks)]
    most = max(1, *(len(micro_batches) for micro_batches in dealt))
    return tuple(tuple(micro_batches) + ((),) * (most - len(micro_batches)) for micro_batches in dealt)


def _hand(ordered: Sequence[int], rank: int, ranks: int) -> list[int]:
    """The rows of `rank` where 0, 1, .., n-1, n-1, .., 1, 0, 0, .. are dealt in turn."""
    there, back = rank, 2 * ranks - 1 - rank
    return [row for place, row in enumerate(ordered) if place % (2 * ranks) in (there, back)]


def _cut(rows: Sequence[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    micro_batches: list[tuple[int, ...]] = []
    start = 0
    while start < len(rows):
        fit = max(1, budget // max(1, lengths[rows[start]]))  # the first row is the longest of those that follow
        micro_batches.append(tuple(rows[start : start + fit]))
        start += fit
    return micro_batches
