"""Engines that die in a run: the others go on, the dead one comes back and is fenced until it has the newest weights."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from running import SHORT_WARM_START, assert_books_balance, family, finish, gone, output, records, start, wait_for

from agentrl.buffer.records import BatchTrained, IncarnationBegun, TrajectoryAdded, VersionPublished
from agentrl.metrics.history import read_history
from agentrl.system.status import status
from agentrl.types import Turn
from agentrl.wire import decode_trajectory

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
GOES_ON_WITHIN_S = 30.0
COMES_BACK_WITHIN_S = 120.0


@pytest.fixture
def one_dies(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Arm a fault that one of a run's processes meets, once."""

    def arm(fault: str) -> None:
        (tmp_path / "done").mkdir()
        monkeypatch.setenv("AGENTRL_FAULTS", fault)
        monkeypatch.setenv("AGENTRL_FAULTS_ONCE", str(tmp_path / "done"))

    return arm


def urls_of_engines(run_dir: Path) -> dict[int, list[str]]:
    """By engine, oldest incarnation first."""
    found: dict[int, list[str]] = {}
    for record in records(run_dir):
        if isinstance(record, IncarnationBegun) and record.role == "engine" and record.url:
            found.setdefault(record.index, []).append(record.url)
    return found


def published(run_dir: Path) -> list[tuple[int, ...]]:
    """The engines that each version reached, oldest first."""
    return [record.engines for record in records(run_dir) if isinstance(record, VersionPublished)]


def turns(run_dir: Path) -> list[tuple[Turn, Sequence[int]]]:
    """All turns, with the versions of their tokens."""
    found = []
    for record in records(run_dir):
        if isinstance(record, TrajectoryAdded):
            trajectory = decode_trajectory(record.data)
            found += [(turn, trajectory.versions[slice(*turn.completion)].tolist()) for turn in trajectory.turns]
    return found


def longest_pause_s(run_dir: Path) -> float:
    """Between two steps."""
    ended = [record.t for record in records(run_dir) if isinstance(record, BatchTrained)]
    return max(later - earlier for earlier, later in pairwise(ended))


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str], run_dir: Path) -> None:
    """Until something is true of a run that goes on."""
    deadline = time.monotonic() + COMES_BACK_WITHIN_S
    while not true():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()  # its children end with it
            raise AssertionError(f"not within {COMES_BACK_WITHIN_S} s, or the run ended early:\n{output(run_dir)}")
        time.sleep(0.1)


def returned(run_dir: Path) -> bool:
    """Whether an engine was missing in a version and the newest one reached both."""
    reached = published(run_dir)
    return reached[-1:] == [(0, 1)] and any(engines != (0, 1) for engines in reached)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def the_engine(index: int, processes: Sequence[psutil.Process], run_dir: Path) -> psutil.Process:
    """The process that writes `logs/engine-<index>.log`."""
    log = run_dir / "logs" / f"engine-{index}.log"
    return next(p for p in processes if p.is_running() and Path(f"/proc/{p.pid}/fd/1").resolve() == log)


def assert_fenced_until_current(run_dir: Path, *, dead: int) -> None:
    """The restarted engine has served, and nothing older than what was out when it came back: its own model is that of version 0."""
    first, again = urls_of_engines(run_dir)[dead]
    missed = published(run_dir).index((1 - dead,))
    served = [versions for turn, versions in turns(run_dir) if turn.engine == again]
    assert served
    assert min(min(versions) for versions in served) >= missed
    assert any(turn.engine == first for turn, _ in turns(run_dir))


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

    told = status(run_dir)
    assert told["phase"] == "stopping"
    ledger = told["ledger"]
    accounts = sum(ledger[name] for name in ("not_issued", "in_flight", "buffered", "training", "trained")) + sum(ledger["dropped_by_cause"].values())
    assert ledger["wanted"] == accounts
    assert ledger["dropped_by_cause"] == {}  # turns of the dead engine went on at the other
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
    assert status(run_dir)["ledger"]["dropped_by_cause"] == {}


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
    assert status(run_dir)["ledger"]["dropped_by_cause"] == {}


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
