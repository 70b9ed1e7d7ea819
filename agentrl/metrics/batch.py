"""The numbers of one training batch, from its trajectories alone.

Every name is defined in `catalogue`. The staleness of a token is the learner's step at the start of the training step minus the step its
version was made at; for a token of an abandoned version (one a rollback took back), the number of versions reserved since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from agentrl.buffer_api import VersionInfo
from agentrl.errors import TrajectoryError
from agentrl.types import StopReason, Trajectory

__all__ = ["RIGHT_ABOVE", "batch_metrics"]

RIGHT_ABOVE = 0.5
"""An episode is right when its reward exceeds this: exact match gives 0 or 1, and shaped rewards keep a right answer above the middle."""

Ints = npt.NDArray[np.int64]


def batch_metrics(groups: Sequence[Sequence[Trajectory]], versions: Mapping[int, VersionInfo], step: int) -> dict[str, float]:
    """Everything under `batch/` for one batch.

    Args:
        groups: the batch's trajectories by task.
        versions: what is known of each version occurring in them, as the batch's grant says.
        step: the learner's step at the start of this training step.

    Raises:
        TrajectoryError: a token's version is missing from `versions`.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    metrics = {"batch/groups": float(len(groups)), "batch/trajectories": float(len(trajectories))}
    if not trajectories:
        return metrics
    metrics |= _rewards(trajectories) | _group_outcomes(groups) | _lengths(trajectories) | _turns(trajectories) | _stops(trajectories)
    return metrics | _ages(trajectories, versions, step)


def _rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    totals = np.array([t.reward.total for t in trajectories], dtype=np.float64)
    metrics = {
        "batch/reward_mean": float(totals.mean()),
        "batch/reward_std": float(totals.std()),
        "batch/reward_min": float(totals.min()),
        "batch/reward_max": float(totals.max()),
    }
    for name in sorted({name for t in trajectories for name in t.reward.parts}):
        metrics[f"batch/reward/{name}"] = sum(t.reward.parts.get(name, 0.0) for t in trajectories) / len(trajectories)
    return metrics


def _group_outcomes(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    shares = [sum(t.reward.total > RIGHT_ABOVE for t in group) / len(group) for group in groups if group]
    return {
        "batch/groups_all_right": shares.count(1.0) / len(shares),
        "batch/groups_mixed": sum(0.0 < share < 1.0 for share in shares) / len(shares),
        "batch/groups_all_wrong": shares.count(0.0) / len(shares),
    }


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    prompt = sum(t.prompt_length for t in trajectories)
    generated = sum(int(np.count_nonzero(t.loss_mask)) for t in trajectories)
    total = sum(len(t) for t in trajectories)
    count = len(trajectories)
    return {
        "batch/prompt_tokens": prompt / count,
        "batch/response_tokens": generated / count,
        "batch/info_tokens": (total - prompt - generated) / count,
        "batch/episode_s": sum(t.finished_s - t.dispatched_s for t in trajectories) / count,
    }


def _turns(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    actions = [turn.action for t in trajectories for turn in t.turns]
    metrics = {"batch/turns": len(actions) / len(trajectories), "batch/searches": actions.count("search") / len(trajectories)}
    understood = [action for action in actions if action]
    if understood:
        metrics["batch/valid_action_share"] = 1.0 - understood.count("invalid") / len(understood)
    return metrics


def _stops(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    stops = [t.stop for t in trajectories]
    return {f"batch/stop/{reason}": stops.count(reason) / len(stops) for reason in StopReason}


def _ages(trajectories: Sequence[Trajectory], versions: Mapping[int, VersionInfo], step: int) -> dict[str, float]:
    present, tokens = _tokens_by_version(trajectories)  # [V], [N, V]
    if not len(present):
        return {}
    missing = [int(version) for version in present if int(version) not in versions]
    if missing:
        raise TrajectoryError(f"the batch of step {step} holds tokens of versions {missing}, of which its grant says nothing")
    ages = np.array([versions[int(version)].staleness(step) for version in present], dtype=np.int64)
    shares = tokens.sum(axis=0) / tokens.sum()
    authors = np.count_nonzero(tokens, axis=1)  # versions that wrote each trajectory
    authors = authors[authors > 0]
    metrics = {
        "batch/staleness_mean": float(shares @ ages),
        "batch/staleness_max": float(ages.max()),
        "batch/versions_mean": float(authors.mean()),
        "batch/multi_version_share": float(np.mean(authors > 1)),
    }
    for age in range(int(ages.max()) + 1):
        metrics[f"batch/staleness/{age}"] = float(shares[ages == age].sum())
    return metrics


def _tokens_by_version(trajectories: Sequence[Trajectory]) -> tuple[Ints, Ints]:
    """The versions that occur, ascending, and each trajectory's number of generated tokens of each."""
    versions = np.concatenate([t.versions for t in trajectories]).astype(np.int64)
    owners = np.repeat(np.arange(len(trajectories)), [len(t) for t in trajectories])
    written = versions >= 0  # as Trajectory guarantees, exactly where loss_mask is 1
    versions, owners = versions[written], owners[written]
    if not len(versions):
        return np.zeros(0, dtype=np.int64), np.zeros((len(trajectories), 0), dtype=np.int64)
    first, width = int(versions.min()), int(versions.max() - versions.min()) + 1
    counts = np.bincount(owners * width + (versions - first), minlength=len(trajectories) * width).reshape(len(trajectories), width)
    present = np.flatnonzero(counts.sum(axis=0))
    return present + first, counts[:, present]
