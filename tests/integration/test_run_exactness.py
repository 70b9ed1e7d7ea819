"""Over a real run: every generated token carries the log-prob of exactly the version it names, given exactly the tokens before it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from running import finish, output, records, start

from agentrl.buffer.records import BatchTaken, BatchTrained, TrajectoryAdded
from agentrl.learner.policy import PolicyModel
from agentrl.types import Trajectory
from agentrl.wire import decode_trajectory

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # nats: two float32 roads to one log-prob
CHECKED = 60  # trajectories, those with several versions first


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of five steps that kept every version. Random weights earn nothing: the entropy bonus is what moves them."""
    directory = tmp_path_factory.mktemp("runs") / "exact"
    moving = ("learner.learning_rate=5e-3", "algorithm.entropy.coefficient=1.0")
    process = start(directory, "run.steps=5", "rollout.temperature=0.7", "weights.keep_snapshots=true", *moving)
    assert finish(process, directory) == 0, output(directory)
    return directory


def trained_trajectories(run_dir: Path) -> list[Trajectory]:
    found = [decode_trajectory(record.data) for record in records(run_dir) if isinstance(record, TrajectoryAdded)]
    trained = {record.batch for record in records(run_dir) if isinstance(record, BatchTrained)}
    ordinals = {o for record in records(run_dir) if isinstance(record, BatchTaken) and record.batch in trained for o, _, _ in record.groups}
    return [trajectory for trajectory in found if trajectory.ticket.ordinal in ordinals]


@torch.no_grad()
def score(policy: PolicyModel, trajectory: Trajectory) -> np.ndarray:
    """[T] log-probs of all generated tokens under one version, each with its full prefix."""
    wanted = torch.from_numpy(trajectory.loss_mask.astype(bool))[None]
    logp, _ = policy(torch.from_numpy(trajectory.token_ids.astype(np.int64))[None], wanted, torch.tensor([trajectory.temperature]))
    return logp[0].numpy()


def test_every_token_has_the_logprob_of_its_version_also_across_updates_and_at_another_temperature(run_dir):
    trajectories = sorted(trained_trajectories(run_dir), key=lambda t: -t.version_count)
    assert len(trajectories) == 5 * 6 * 4
    crossing = [trajectory for trajectory in trajectories[:CHECKED] if trajectory.version_count >= 2]
    assert len(crossing) >= 20

    torch.set_num_threads(1)
    policies: dict[int, PolicyModel] = {}
    worst, other_version = 0.0, []
    for trajectory in trajectories[:CHECKED]:
        assert trajectory.temperature == 0.7
        own = trajectory.loss_mask == 1
        for version in np.unique(trajectory.versions[own]).tolist():
            if version not in policies:
                policies[version] = PolicyModel.load(run_dir / "weights" / f"v{version}").eval()
            theirs = score(policies[version], trajectory)
            at = own & (trajectory.versions == version)
            worst = max(worst, float(np.abs(theirs - trajectory.behaviour_logprobs)[at].max()))
            if (own & ~at).any():
                other_version.append(float(np.abs(theirs - trajectory.behaviour_logprobs)[own & ~at].max()))
    assert worst <= TOLERANCE
    assert max(other_version) > 10 * TOLERANCE  # the versions do differ: the check above could have failed


def test_the_mask_is_exact_on_every_token_and_turns_cover_what_it_says(run_dir):
    for trajectory in trained_trajectories(run_dir):
        expected = np.zeros(len(trajectory), dtype=np.uint8)
        seam = trajectory.prompt_length
        for turn in trajectory.turns:
            assert turn.completion[0] == seam
            expected[slice(*turn.completion)] = 1
            assert turn.observation[0] == turn.completion[1]
            seam = turn.observation[1]
        assert seam == len(trajectory)
        assert trajectory.loss_mask.tolist() == expected.tolist()
        assert (trajectory.versions >= 0).tolist() == (expected == 1).tolist()
