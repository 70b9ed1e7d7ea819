"""Whether the log-probs a run recorded are those of the versions it names: every kept version scored again by the learner's own model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from running import records

from agentrl.buffer.records import BatchTaken, BatchTrained, TrajectoryAdded
from agentrl.learner.policy import PolicyModel
from agentrl.types import Purpose, Trajectory
from agentrl.wire import decode_trajectory


class Gaps(NamedTuple):
    """Largest absolute differences of log-probs, in nats."""

    own: float  # tokens under the version that wrote them
    others: float  # tokens under versions that did not: what a check of the first could have found
    tokens: int  # that were compared


def trained_trajectories(run_dir: Path) -> list[Trajectory]:
    added = [record for record in records(run_dir) if isinstance(record, TrajectoryAdded) and record.ticket.purpose is Purpose.TRAIN]
    found = [decode_trajectory(record.data) for record in added]
    trained = {record.batch for record in records(run_dir) if isinstance(record, BatchTrained)}
    ordinals = {o for record in records(run_dir) if isinstance(record, BatchTaken) and record.batch in trained for o, _, _ in record.groups}
    return [trajectory for trajectory in found if trajectory.ticket.ordinal in ordinals]


@torch.no_grad()
def score(policy: PolicyModel, trajectory: Trajectory) -> np.ndarray:
    """[T] log-probs of all generated tokens under one version, each with its full prefix."""
    wanted = torch.from_numpy(trajectory.loss_mask.astype(bool))[None]
    logp, _ = policy(torch.from_numpy(trajectory.token_ids.astype(np.int64))[None], wanted, torch.tensor([trajectory.temperature]))
    return logp[0].numpy()


def gaps(run_dir: Path, trajectories: Sequence[Trajectory]) -> Gaps:
    """Of a run that kept its snapshots."""
    torch.set_num_threads(1)
    policies: dict[int, PolicyModel] = {}
    worst, other, tokens = 0.0, 0.0, 0
    for trajectory in trajectories:
        own = trajectory.loss_mask == 1
        for version in np.unique(trajectory.versions[own]).tolist():
            if version not in policies:
                policies[version] = PolicyModel.load(run_dir / "weights" / f"v{version}").eval()
            difference = np.abs(score(policies[version], trajectory) - trajectory.behaviour_logprobs)
            at = own & (trajectory.versions == version)
            worst, tokens = max(worst, float(difference[at].max())), tokens + int(at.sum())
            if (own & ~at).any():
                other = max(other, float(difference[own & ~at].max()))
    return Gaps(worst, other, tokens)
