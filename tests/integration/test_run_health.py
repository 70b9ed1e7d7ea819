"""Alarms of a real run: it goes back, pauses, tells somebody, and a collapse that is provoked is caught and recovered from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import assert_books_balance, family, finish, output, records, start, wait_for

from agentrl.buffer.records import BatchTaken, BatchTrained, Rollback, VersionPublished, VersionReserved
from agentrl.metrics.alarms import read_alarms
from agentrl.metrics.history import read_history
from agentrl.system.status import status

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"

# The learning rate is warmed up over 4 steps: 0.25, 0.5, 0.75e-3, ... An alarm above 0.6e-3 is raised in step 3 and, at a tenth, never again.
RISING = ("learner.schedule.warmup=4", "learner.learning_rate=1e-3")
TOO_FAST = ("metric=learner/learning_rate", "above=6e-4", "patience=1", "actions=[rollback]")


def alarm(name: str, *settings: str) -> list[str]:
    """Overrides that make an alarm."""
    return [f"health.alarms.{name}.{setting}" for setting in settings]


def lines(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_alarms(run_dir) if line["kind"] == kind]


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.kill()


def test_an_alarm_takes_the_run_back_another_pauses_it_and_the_same_command_goes_on_to_its_end(tmp_path):
    run_dir = tmp_path / "back"
    heard = tmp_path / "heard.json"
    later = alarm("later", "metric=learner/tokens", "above=0", "patience=1", "warmup_steps=4", "actions=[pause, command]")
    command = json.dumps(["sh", "-c", f"cat > {heard}"])
    arguments = ["run.steps=7", "rollout.max_staleness=1", *RISING, *alarm("fast", *TOO_FAST), *later, f"health.command={command}"]
    assert finish(start(run_dir, *arguments), run_dir) == 3, output(run_dir)

    (raised, pausing), (back,) = lines(run_dir, "alarm"), lines(run_dir, "rollback")
    assert (raised["alarm"], raised["step"], raised["value"]) == ("fast", 3, pytest.approx(7.5e-4))
    # Step 3 is bad; step 2 found the weights of step 1 good
    assert (back["to_step"], back["abandoned"], back["learning_rate_scale"]) == (1, [back["to"][:-1] + "2"], 0.1)
    assert (pausing["alarm"], json.loads(heard.read_text())["alarm"], pausing["step"]) == ("later", "later", 6)  # quiet until 3 + 1 + 1
    said = output(run_dir)
    assert "ALARM fast at step 3: learner/learning_rate is 0.00075, above 0.0006" in said
    assert "ROLLBACK 1 to step 1 because of fast: learning rate x 0.1 from here on" in said
    assert "stopped at step 6 by alarm later. Go on: " in said

    journal = list(records(run_dir))
    reserved = [record for record in journal if isinstance(record, VersionReserved)]
    assert [record.reason for record in reserved] == ["initial", "rollback-1"]
    published = [record.version for record in journal if isinstance(record, VersionPublished)]
    assert reserved[-1].version in published  # on the ordinary way
    assert reserved[-1].version - 1 not in published  # the weights that raised the alarm
    trained = next(i for i, record in enumerate(journal) if isinstance(record, BatchTrained) and record.step == 3)
    rolled_back = next(i for i, record in enumerate(journal) if isinstance(record, Rollback))
    assert not any(isinstance(record, BatchTaken) for record in journal[trained:rolled_back])

    assert finish(start(run_dir, *arguments), run_dir) == 0, output(run_dir)
    assert_books_balance(run_dir, steps=7)
    rates = [metrics["learner/learning_rate"] for metrics in read_history(run_dir).training.values()]
    assert rates == pytest.approx([2.5e-4, 5e-5, 7.5e-5, 1e-4, 1e-4, 1e-4, 1e-4])  # also after the resume
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (len(summary["alarms"]), len(summary["rollbacks"])) == (2, 1)


@pytest.mark.soak
@pytest.mark.parametrize("passage", ["rollback.begun", "rollback.journal"])
def test_a_crash_in_the_middle_of_a_rollback_is_finished_by_the_same_command(tmp_path, passage, monkeypatch):
    run_dir = tmp_path / "crash"
    arguments = ["run.steps=6", *RISING, *alarm("fast", *TOO_FAST)]
    monkeypatch.setenv("AGENTRL_FAULTS", f"{passage}=kill")
    assert finish(start(run_dir, *arguments), run_dir) == 1, output(run_dir)
    monkeypatch.delenv("AGENTRL_FAULTS")
    assert finish(start(run_dir, *arguments), run_dir) == 0, output(run_dir)
    assert_books_balance(run_dir, steps=6)
    assert len(lines(run_dir, "alarm")) == len(lines(run_dir, "restored")) == 1
    rates = [metrics["learner/learning_rate"] for metrics in read_history(run_dir).training.values()]
    assert rates == pytest.approx([2.5e-4, 5e-5, 7.5e-5, 1e-4, 1e-4, 1e-4])


@pytest.mark.soak
def test_when_rollbacks_are_used_up_the_run_ends_with_the_alarm_and_two_ranks_go_back_together(tmp_path):
    run_dir = tmp_path / "ranks"
    settings = ("metric=learner/tokens", "above=0", "patience=1", "warmup_steps=2", "actions=[rollback]")
    arguments = ["run.steps=9", "learner.ranks=2", *alarm("always", *settings), "health.max_rollbacks=2", "rollout.max_staleness=0"]
    assert finish(start(run_dir, *arguments), run_dir) == 1, output(run_dir)
    assert [(line["to_step"], line["learning_rate_scale"]) for line in lines(run_dir, "rollback")] == [(1, 0.1), (1, pytest.approx(0.01))]
    said = output(run_dir)
    assert "alarm always: learner/tokens is" in said
    assert "health.max_rollbacks is 2, and the learning rate is down to 0.01 times" in said
    assert "Traceback" not in said
    assert status(run_dir)["phase"] == "failed"


@pytest.mark.soak
def test_status_of_a_run_that_was_killed_says_interrupted(tmp_path):
    run_dir = tmp_path / "killed"
    process = start(run_dir, "run.steps=50")
    wait_for(run_dir, BatchTrained, 1, process)
    assert status(run_dir)["phase"] == "training"
    kill([psutil.Process(process.pid), *family(process)])
    process.wait()
    assert status(run_dir)["phase"] == "interrupted"


@pytest.mark.soak
def test_a_collapse_by_thirty_times_the_learning_rate_is_named_taken_back_and_recovered_from(tmp_path):
    run_dir = tmp_path / "collapse"
    too_much = ("learner.learning_rate=6e-2", "run.steps=45", "checkpoint.every=5", "eval.every=100", "run.launcher=local")
    process = start(run_dir, *too_much, "health.alarms.ess.actions=[rollback]", "health.rate_factor=0.0333", recipe=QUICKSTART)
    assert finish(process, run_dir, deadline_s=1800.0) == 0, output(run_dir)
    assert {line["alarm"] for line in lines(run_dir, "alarm")} >= {"ess"}
    assert 1 <= len(lines(run_dir, "restored")) <= 3
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["eval"]["final"]["em"] >= summary["eval"]["initial"]["em"] + 0.3
