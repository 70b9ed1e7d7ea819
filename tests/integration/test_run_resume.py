"""A run that is stopped, or whose driver is killed, goes on with the same command: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import psutil
import pytest
from running import assert_books_balance, family, finish, gone, output, records, start, wait_for

from agentrl.buffer.records import BatchTrained, Checkpoint, Rollback
from agentrl.metrics.history import read_history
from agentrl.system.status import status

pytestmark = pytest.mark.slow

# Of Ray's own processes these two end by themselves only about a minute after the node they belong to; they hold nothing of the run.
RAYS_AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}


@pytest.fixture(scope="module")
def slow_to_go() -> Iterator[list[psutil.Process]]:
    """Processes that may take a minute to end: that they do is checked after the last test."""
    processes: list[psutil.Process] = []
    yield processes
    assert gone(processes, within_s=90.0)


@pytest.mark.parametrize("launcher", ["ray", pytest.param("local", marks=pytest.mark.soak)])
def test_a_killed_driver_leaves_no_process_and_the_same_command_goes_on_from_the_last_checkpoint(tmp_path, launcher, slow_to_go):
    run_dir = tmp_path / "killed"
    arguments = [f"run.launcher={launcher}", "run.steps=6"]
    first = start(run_dir, *arguments)
    wait_for(run_dir, Checkpoint, 3, first)  # checkpoint 0 and two steps
    processes = family(first)
    assert len(processes) >= 5
    slow_to_go += [process for process in processes if process.name() in RAYS_AGENTS]
    first.send_signal(signal.SIGKILL)
    first.wait()
    ours = [process for process in processes if process not in slow_to_go]
    assert gone(ours, within_s=30.0), [process.name() for process in ours if process.is_running()]
    trained_before = sum(isinstance(record, BatchTrained) for record in records(run_dir))

    second = start(run_dir, *arguments)
    assert finish(second, run_dir) == 0, output(run_dir)
    assert any(isinstance(record, Rollback) and record.step >= 2 for record in records(run_dir))
    assert trained_before >= 2
    assert_books_balance(run_dir, steps=6)


def test_ctrl_c_ends_the_run_with_a_checkpoint_the_same_command_goes_on_to_its_end_and_more_steps_beyond_it(tmp_path):
    run_dir = tmp_path / "stopped"
    first = start(run_dir, "run.steps=6", "checkpoint.every=100")
    wait_for(run_dir, BatchTrained, 2, first)
    processes = family(first)
    first.send_signal(signal.SIGINT)
    assert finish(first, run_dir) == 130, output(run_dir)
    assert gone(processes)
    assert "Go on: " in output(run_dir)
    stopped_at = status(run_dir)["step"]
    assert 2 <= stopped_at < 6

    second = start(run_dir, "run.steps=6", "checkpoint.every=100")
    assert finish(second, run_dir) == 0, output(run_dir)
    assert [record.step for record in records(run_dir) if isinstance(record, Rollback)] == [stopped_at]  # nothing had to be done again
    assert_books_balance(run_dir, steps=6)

    # finished: the same command has nothing to do, another recipe is refused, more steps are gone on to
    assert finish(start(run_dir, "run.steps=6", "checkpoint.every=100"), run_dir) == 0
    assert "has finished" in output(run_dir)
    assert finish(start(run_dir, "run.steps=6", "learner.learning_rate=5e-4"), run_dir) == 2
    assert "learner.learning_rate: 0.001 -> 0.0005" in output(run_dir)
    assert finish(start(run_dir, "run.steps=8"), run_dir) == 0, output(run_dir)
    assert_books_balance(run_dir, steps=8)
    assert list(read_history(run_dir).training) == list(range(1, 9))  # also the step that was going on at Ctrl-C
