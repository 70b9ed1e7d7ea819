"""Over a real run: every generated token carries the log-prob of exactly the version it names, given exactly the tokens before it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from exactness import gaps, trained_trajectories
from running import finish, output, start

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


def test_every_token_has_the_logprob_of_its_version_also_across_updates_and_at_another_temperature(run_dir):
    trajectories = sorted(trained_trajectories(run_dir), key=lambda t: -t.version_count)
    assert len(trajectories) == 5 * 6 * 4
    crossing = [trajectory for trajectory in trajectories[:CHECKED] if trajectory.version_count >= 2]
    assert len(crossing) >= 20

    assert {trajectory.temperature for trajectory in trajectories} == {0.7}
    found = gaps(run_dir, trajectories[:CHECKED])
    assert found.own <= TOLERANCE
    assert found.others > 10 * TOLERANCE  # the versions do differ: the check above could have failed


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
