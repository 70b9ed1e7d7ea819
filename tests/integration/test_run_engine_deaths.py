"""Engines that die in a run: the others go on, the dead one comes back and is fenced until it has the newest weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_deaths import (
    GOES_ON_WITHIN_S,
    assert_fenced_until_current,
    assert_nothing_lost,
    free_port,
    longest_pause_s,
    published,
    returned,
    the_engine,
    urls_of_engines,
    wait_until,
)
from running import SHORT_WARM_START, assert_books_balance, family, finish, gone, output, start, wait_for

from agentrl.buffer.records import BatchTrained, VersionPublished
from agentrl.metrics.history import read_history
from agentrl.system.status import status

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


@pytest.fixture
def one_dies(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Arm a fault that one of a run's processes meets, once."""

    def arm(fault: str) -> None:
        (tmp_path / "done").mkdir()
        monkeypatch.setenv("AGENTRL_FAULTS", fault)
        monkeypatch.setenv("AGENTRL_FAULTS_ONCE", str(tmp_path / "done"))

    return arm


def test_one_of_two_engines_is_killed_in_mid_broadcast_the_run_goes_on_and_it_comes_back(tmp_path, one_dies):
    run_dir = tmp_path / "broadcast"
    one_dies("engine.receive=kill@3")  # at the third version that is sent, before its bytes have come
    process = start(run_dir, "run.steps=1000", "engine.replicas=2", "rollout.max_staleness=1")
    wait_for(run_dir, VersionPublished, 4, process)
    wait_until(lambda: returned(run_dir), process, run_dir)
    steps = status(run_dir)["step"]
    wait_for(run_dir, BatchTrained, steps + 2, process)
    processes = family(process)
    process.send_signal(signal.SIGINT)
    finish(process, run_dir)
    assert gone(processes)

    assert_nothing_lost(run_dir)
    reached = published(run_dir)
    assert reached[:3] == [(0, 1)] * 3
    dead = next(index for index, urls in urls_of_engines(run_dir).items() if len(urls) == 2)
    assert set(reached) == {(0, 1), (1 - dead,)}
    assert longest_pause_s(run_dir) < GOES_ON_WITHIN_S
    assert_fenced_until_current(run_dir, dead=dead)
    metrics = read_history(run_dir).training
    assert [metrics[step]["engine/deaths"] for step in (1, max(metrics))] == [0, 1]
    assert {metrics[step]["engine/current"] for step in metrics} == {1, 2}
    assert f"engine-{dead} died (killed by signal 9): its turns go on at the others" in output(run_dir)


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_the_only_engine_is_killed_turns_wait_for_it_and_nothing_is_lost(tmp_path, launcher):
    run_dir = tmp_path / "alone"
    process = start(run_dir, "run.steps=20", f"run.launcher={launcher}", "rollout.max_staleness=1")
    wait_for(run_dir, BatchTrained, 3, process)
    the_engine(0, family(process), run_dir).send_signal(signal.SIGKILL)
    assert finish(process, run_dir) == 0, output(run_dir)
    assert_books_balance(run_dir, steps=20)
    assert len(urls_of_engines(run_dir)[0]) == 2
    assert longest_pause_s(run_dir) < GOES_ON_WITHIN_S
    assert status(run_dir)["ledger"]["dropped_by_cause"] == {}


@pytest.mark.soak
def test_an_engine_that_freezes_in_mid_broadcast_holds_nobody_up_is_killed_and_comes_back(tmp_path, one_dies):
    run_dir = tmp_path / "frozen"
    one_dies("engine.receive=stop@3")
    process = start(run_dir, "run.steps=1000", "engine.replicas=2", "rollout.max_staleness=1", "weights.deadline_s=5")
    wait_for(run_dir, VersionPublished, 4, process)
    wait_until(lambda: returned(run_dir), process, run_dir)  # the learner gives it up, or it has not answered for a minute
    process.send_signal(signal.SIGINT)
    finish(process, run_dir)
    assert longest_pause_s(run_dir) < GOES_ON_WITHIN_S
    assert "died (killed by signal 9, because " in output(run_dir)
    assert_nothing_lost(run_dir)


@contextmanager
def server(model_dir: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """`agentrl engine serve` at a port of its own."""
    command = [sys.executable, "-c", "from agentrl.cli import main; main()", "engine", "serve", str(model_dir)]
    with subprocess.Popen([*command, "--port", str(port), "--slots", "16", "--context-tokens", "224"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"ready")
            yield process
        finally:
            process.kill()


@pytest.mark.soak
def test_engines_that_are_only_attached_are_left_and_taken_back_and_not_stopped(tmp_path):
    made = tmp_path / "made"
    assert finish(start(made, "run.steps=1"), made) == 0, output(made)
    model_dir = next(path.parent for path in sorted((tmp_path / ".cache").resolve().glob("*/**/model.safetensors")))
    ports = [free_port(), free_port()]
    run_dir = tmp_path / "attached"
    urls = json.dumps([f"http://127.0.0.1:{port}" for port in ports])
    with server(model_dir, ports[0]) as first:
        with server(model_dir, ports[1]):
            process = start(run_dir, "run.steps=1000", "rollout.max_staleness=1", f"engine.urls={urls}")
            wait_for(run_dir, VersionPublished, 3, process)
        wait_until(lambda: published(run_dir)[-1] == (0,), process, run_dir)
        steps = status(run_dir)["step"]
        wait_for(run_dir, BatchTrained, steps + 3, process)
        with server(model_dir, ports[1]) as second:
            wait_until(lambda: returned(run_dir), process, run_dir)
            process.send_signal(signal.SIGINT)
            finish(process, run_dir)
            assert (first.poll(), second.poll()) == (None, None)
    assert longest_pause_s(run_dir) < GOES_ON_WITHIN_S
    assert_nothing_lost(run_dir)


@pytest.mark.soak
def test_a_url_at_which_nothing_answers_is_a_wrong_argument(tmp_path):
    run_dir = tmp_path / "nobody"
    url = f"http://127.0.0.1:{free_port()}"
    assert finish(start(run_dir, f'engine.urls=["{url}"]'), run_dir) == 2
    assert f"engine.urls: {url}: " in output(run_dir)
    assert "Traceback" not in output(run_dir)


@pytest.mark.soak
def test_a_policy_learns_on_while_engines_are_killed_again_and_again(tmp_path):
    run_dir = tmp_path / "learning"
    process = start(run_dir, *SHORT_WARM_START, "run.launcher=local", "run.steps=30", "engine.replicas=2", "eval.every=null", recipe=QUICKSTART)
    for steps, index in ((5, 0), (12, 1), (19, 0)):
        wait_for(run_dir, BatchTrained, steps, process, within_s=400.0)
        the_engine(index, family(process), run_dir).send_signal(signal.SIGKILL)
    assert finish(process, run_dir, deadline_s=400.0) == 0, output(run_dir)
    assert longest_pause_s(run_dir) < GOES_ON_WITHIN_S
    assert [len(urls) for _, urls in sorted(urls_of_engines(run_dir).items())] == [3, 2]
    assert published(run_dir)[-1] == (0, 1)
    first, *_, last = read_history(run_dir).evaluations["heldout"]
    assert last["em"] > first["em"]
