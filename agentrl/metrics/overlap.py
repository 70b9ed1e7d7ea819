"""How asynchronous a run was: the share of generated tokens that were made while the learner trained, and what overlap can gain at most.

A turn's tokens are spread evenly over the time from its start to its last token; everything else is exact interval arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentrl.types import Trajectory

__all__ = ["Overlap", "TurnTime", "measure_overlap", "speedup_bound", "turn_times"]

Floats = npt.NDArray[np.float64]
TurnTime = tuple[float, float, int]
"""(started, generated, tokens): when a completion began, when it was there, and its number of tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """What was measured over a run, or over a part of it."""

    share: float  # of the generated tokens, made within learner steps; 0 where nothing was generated
    generating_s: float  # time in which at least one turn was being generated
    training_s: float  # time within learner steps
    both_s: float  # time in which both went on
    bound: float  # `speedup_bound` of the two times


def measure_overlap(turns: Iterable[TurnTime], steps: Sequence[tuple[float, float]]) -> Overlap:
    """Compare turns with learner steps, on one clock.

    Args:
        turns: every completion of the time looked at.
        steps: (started, ended) of the learner's steps; they may touch or overlap.
    """
    turn_N3 = np.array([turn for turn in turns if turn[2] > 0], dtype=np.float64).reshape(-1, 3)
    training, generating = _union(np.array(steps, dtype=np.float64).reshape(-1, 2)), _union(turn_N3[:, :2])
    total = float(turn_N3[:, 2].sum())
    within = float((turn_N3[:, 2] * _covered_shares(turn_N3[:, :2], training)).sum())
    training_s, generating_s = _length(training), _length(generating)
    return Overlap(
        share=within / total if total else 0.0,
        generating_s=generating_s,
        training_s=training_s,
        both_s=float(_covered(generating, training).sum()),
        bound=speedup_bound(generating_s, training_s),
    )


def speedup_bound(generation_s: float, training_s: float) -> float:
    """(G+T)/max(G,T): how much faster overlapping two kinds of work can be than alternating them, at a fixed split of the hardware.

    Between 1 (one of the two is free) and 2 (both take as long). Work that only looks faster through better use of a
    stalled machine is not bounded by it.
    """
    longer = max(generation_s, training_s)
    return (generation_s + training_s) / longer if longer > 0 else 1.0


def turn_times(trajectories: Iterable[Trajectory]) -> list[TurnTime]:
    """The turns of trajectories, as `measure_overlap` takes them."""
    return [(turn.started_s, turn.generated_s, turn.completion[1] - turn.completion[0]) for t in trajectories for turn in t.turns]


def _union(interval_N2: Floats) -> Floats:
    """The same set of points as disjoint intervals in ascending order; empty and reversed ones are left out."""
    interval_N2 = interval_N2[interval_N2[:, 1] > interval_N2[:, 0]]
    if not len(interval_N2):
        return interval_N2
    interval_N2 = interval_N2[np.argsort(interval_N2[:, 0], kind="stable")]
    reach = np.maximum.accumulate(interval_N2[:, 1])
    begins = np.concatenate(([True], interval_N2[1:, 0] > reach[:-1]))
    last = np.concatenate((np.flatnonzero(begins)[1:] - 1, [len(interval_N2) - 1]))
    return np.stack((interval_N2[begins, 0], reach[last]), axis=1)


def _length(disjoint_M2: Floats) -> float:
    return float((disjoint_M2[:, 1] - disjoint_M2[:, 0]).sum())


def _covered(interval_N2: Floats, disjoint_M2: Floats) -> Floats:
    """[N] length of each interval's part inside the disjoint ones: differences of 'length covered up to t', which is piecewise linear."""
    if not len(disjoint_M2):
        return np.zeros(len(interval_N2))
    origin = disjoint_M2[0, 0]  # epoch seconds keep only 2e-7 s: measure from the first step
    corners = (disjoint_M2 - origin).ravel()
    ends = np.cumsum(disjoint_M2[:, 1] - disjoint_M2[:, 0])
    up_to = np.stack((np.concatenate(([0.0], ends[:-1])), ends), axis=1).ravel()
    covered: Floats = np.interp(interval_N2[:, 1] - origin, corners, up_to) - np.interp(interval_N2[:, 0] - origin, corners, up_to)
    return covered


def _covered_shares(interval_N2: Floats, disjoint_M2: Floats) -> Floats:
    """[N] share of each interval inside the disjoint ones; of an instant, 1 or 0."""
    length = interval_N2[:, 1] - interval_N2[:, 0]
    instants = np.flatnonzero(length <= 0)
    shares = _covered(interval_N2, disjoint_M2) / np.where(length > 0, length, 1.0)
    point_I1 = interval_N2[instants, :1]
    shares[instants] = ((point_I1 >= disjoint_M2[:, 0]) & (point_I1 < disjoint_M2[:, 1])).any(axis=1)
    return shares
