"""A run whose engine shares the learner's share of the machine: it sleeps in every step, and what it was asked for goes on after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exactness import gaps, trained_trajectories
from running import assert_books_balance, finish, output, records, start

from agentrl.buffer.records import BatchTrained, TrajectoryAdded
from agentrl.wire import decode_trajectory

pytestmark = pytest.mark.slow

STEPS = 3
LATE_S = 0.15  # a reply that was made before the engine fell asleep may be read by a busy worker so much later
# Steps much longer than that, and weights that move although nothing is earned.
LONG_STEPS = ("learner.ppo_epochs=2", "learner.tokens_per_micro_batch=256", "learner.learning_rate=5e-3", "algorithm.entropy.coefficient=1.0")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "colocated"
    process = start(directory, f"run.steps={STEPS}", "resources.colocate=true", "weights.keep_snapshots=true", *LONG_STEPS)
    assert finish(process, directory) == 0, output(directory)
    return directory


def test_the_engine_generates_nothing_in_any_step_and_its_open_requests_go_on_after_it(run_dir):
    assert_books_balance(run_dir, steps=STEPS)
    turns = [turn for record in records(run_dir) if isinstance(record, TrajectoryAdded) for turn in decode_trajectory(record.data).turns]
    steps = [(record.started_s, record.ended_s) for record in records(run_dir) if isinstance(record, BatchTrained)]
    assert len(steps) == STEPS
    waited = 0
    for started, ended in steps:
        assert ended - started > 2 * LATE_S, "too short to tell"
        assert [turn.generated_s - started for turn in turns if started + LATE_S < turn.generated_s < ended] == []
        waited += sum(turn.started_s < started and turn.generated_s > ended for turn in turns)
    assert waited > 0


def test_sleep_is_told_by_step_and_covers_it(run_dir):
    told = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [metrics for metrics in told if "seconds/asleep" in metrics]
    assert len(steps) == STEPS
    assert all(metrics["seconds/asleep"] >= metrics["seconds/step"] for metrics in steps)


def test_requests_that_slept_have_the_exact_log_probs_of_the_versions_they_name(run_dir):
    trajectories = trained_trajectories(run_dir)
    crossing = [trajectory for trajectory in trajectories if trajectory.version_count >= 2]
    assert crossing
    found = gaps(run_dir, crossing)
    assert found.own <= 1e-4
    assert found.others > 1e-3  # the versions do differ: the check above could have failed
