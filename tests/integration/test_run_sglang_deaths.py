"""Two real SGLang servers, one of them killed in mid-broadcast: `make test-sglang` sets SGLang up and runs this."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from engine_deaths import (
    GOES_ON_WITHIN_S,
    assert_fenced_until_current,
    assert_nothing_lost,
    longest_pause_s,
    published,
    returned,
    the_engine,
    wait_until,
)
from running import family, finish, gone, output, start, wait_for

from agentrl.buffer.records import BatchTrained, VersionPublished

PYTHON = os.environ.get("AGENTRL_SGLANG_PYTHON")

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(PYTHON is None, reason="AGENTRL_SGLANG_PYTHON names no Python that has sglang: make test-sglang sets one up"),
]

RUN_S = 600.0  # a server starts in a minute, on few cores in some
SGLANG = ("run.launcher=local", "engine.kind=sglang", f"engine.python={PYTHON}", "engine.replicas=2")


def frozen(role: str, process: psutil.Popen, run_dir: Path) -> psutil.Process | None:
    """The process of a role that has stopped itself at a fault point."""
    log = run_dir / "logs" / f"{role}-0.log"
    found = [one for one in family(process) if Path(f"/proc/{one.pid}/fd/1").resolve() == log and one.status() == psutil.STATUS_STOPPED]
    return found[0] if found else None


def test_training_goes_on_with_the_other_and_the_killed_one_returns_fenced_until_it_is_current(tmp_path, monkeypatch):
    run_dir = tmp_path / "two"
    (tmp_path / "done").mkdir()
    # The learner stops where it would send the bucket of the third version, so that engines wait for it.
    monkeypatch.setenv("AGENTRL_FAULTS", "learner.broadcast=stop@5")
    monkeypatch.setenv("AGENTRL_FAULTS_ONCE", str(tmp_path / "done"))
    process = start(run_dir, *SGLANG, "run.steps=1000", "rollout.max_staleness=1")
    wait_for(run_dir, VersionPublished, 3, process, within_s=RUN_S)
    wait_until(lambda: frozen("learner", process, run_dir) is not None, process, run_dir)
    role = the_engine(1, family(process), run_dir)
    for one in [role, *role.children(recursive=True)]:  # the server, its scheduler, its guardian: all at once
        one.kill()
    learner = frozen("learner", process, run_dir)
    assert learner is not None
    learner.send_signal(signal.SIGCONT)

    wait_until(lambda: returned(run_dir), process, run_dir, within_s=RUN_S)
    wait_for(run_dir, BatchTrained, len(published(run_dir)) + 2, process, within_s=RUN_S)
    processes = family(process)
    process.send_signal(signal.SIGINT)
    finish(process, run_dir)
    assert gone(processes), output(run_dir)
    assert_nothing_lost(run_dir)
    assert published(run_dir)[:3] == [(0, 1)] * 3
    assert set(published(run_dir)) == {(0, 1), (0,)}
    print("longest pause between two steps", round(longest_pause_s(run_dir), 1), "s")
    assert longest_pause_s(run_dir) < GOES_ON_WITHIN_S
    assert_fenced_until_current(run_dir, dead=1)
