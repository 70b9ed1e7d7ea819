"""Where a run goes back to when an alarm is raised, and what of that survives a crash in the middle."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.buffer_api import JournalMark
from agentrl.config.health import HealthRecipe
from agentrl.config.recipe import Recipe
from agentrl.errors import HealthError
from agentrl.learner import checkpoint
from agentrl.learner.checkpoint import Manifest, Pending
from agentrl.metrics.alarms import AlarmLog, RolledBack
from agentrl.metrics.health import Alarm
from agentrl.metrics.sinks import JsonLines
from agentrl.system.guard import Guard

pytestmark = pytest.mark.slow  # files are brought to the disk

GOOD, BAD = {"learner/ess": 1.0, "batch/groups": 6.0}, {"learner/ess": 0.1, "batch/groups": 6.0}


def guard(run_dir: Path, **health: Any) -> Guard:
    """A guard with one alarm: ESS below 0.2 in two steps."""
    recipe = HealthRecipe.model_validate({"alarms": {"ess": {"patience": 2, "actions": ["rollback"]}}} | health)
    return Guard(cast(Recipe, SimpleNamespace(health=recipe, rollout=SimpleNamespace(max_staleness=2))), run_dir)


def save(run_dir: Path, *steps: int, incarnation: int = 1001) -> None:
    """Checkpoints of these steps."""
    root = run_dir / "checkpoints"
    for step in steps:
        name = checkpoint.identifier(incarnation, step)
        pending = Pending(temporary=root / f".tmp-{name}", path=root / name, step=step, learner_incarnation=incarnation, dtype="float32")
        for part in ("state", "model"):
            (pending.temporary / part).mkdir(parents=True)
        (pending.temporary / "state" / "weights").write_bytes(bytes([step]))
        checkpoint.commit(pending, JournalMark(offset=0, consumed=(), frontier=0, step=step))


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def raised(watching: Guard, good: int, bad: int = 2) -> Alarm:
    """The alarm of `good` good steps and `bad` bad ones."""
    found = [alarm for step in range(1, good + bad + 1) for alarm in watching.observe(step, GOOD if step <= good else BAD)]
    return found[-1]


def test_it_goes_back_to_the_newest_checkpoint_whose_weights_a_later_step_found_good_and_removes_the_newer(tmp_path):
    save(tmp_path, 0, 2, 4, 5, 6)
    watching = guard(tmp_path)
    alarm = raised(watching, good=5)  # 6 and 7 are bad: the weights of 5 may be the first bad ones, those of 4 were measured in 5
    manifest = next(watching.candidates(alarm))
    assert manifest.step == 4
    watching.begin(alarm, manifest)
    assert names(tmp_path) == ["i1001-s00000000", "i1001-s00000002", "i1001-s00000004"]
    assert watching.learning_rate_scale == 0.1
    assert watching.version_reason == "rollback-1"


def test_an_altered_checkpoint_is_passed_over(tmp_path):
    save(tmp_path, 0, 2, 4)
    (tmp_path / "checkpoints" / "i1001-s00000004" / "state" / "weights").write_bytes(b"?")
    watching = guard(tmp_path)
    found = watching.candidates(raised(watching, good=5))
    assert (next(found).step, next(found).step) == (2, 0)


def test_a_run_that_was_bad_from_its_first_measured_weights_goes_back_to_its_beginning(tmp_path):
    save(tmp_path, 0, 1)
    watching = guard(tmp_path)
    assert next(watching.candidates(raised(watching, good=0))).step == 0


def test_where_no_checkpoint_is_from_before_the_run_ends_with_the_alarm(tmp_path):
    save(tmp_path, 6)
    watching = guard(tmp_path)
    alarm = raised(watching, good=5)
    with pytest.raises(HealthError, match=r"alarm ess: learner/ess is 0\.1, below 0\.2, since step 6; there is no checkpoint"):
        list(watching.candidates(alarm))


def test_pruning_keeps_the_newest_good_checkpoint_beside_the_newest(tmp_path):
    save(tmp_path, 0, 2, 4, 6, 7)
    root = tmp_path / "checkpoints"
    checkpoint.prune(root, 2, good_until=5)
    assert names(tmp_path) == ["i1001-s00000004", "i1001-s00000006", "i1001-s00000007"]
    checkpoint.prune(root, 1, good_until=-1)  # none is known to be good: the oldest
    assert names(tmp_path) == ["i1001-s00000004", "i1001-s00000007"]
    checkpoint.prune(root, 1)
    assert names(tmp_path) == ["i1001-s00000007"]


def test_a_tenth_start_of_a_run_is_newer_than_a_ninth(tmp_path):
    save(tmp_path, 8, incarnation=9005)
    save(tmp_path, 4, incarnation=10005)
    assert [manifest.step for manifest in checkpoint.manifests(tmp_path / "checkpoints")] == [4, 8]


def back(watching: Guard, alarm: Alarm) -> Manifest:
    manifest = next(watching.candidates(alarm))
    watching.begin(alarm, manifest)
    return manifest


def test_a_crash_in_the_middle_is_finished_by_the_next_start_and_a_later_checkpoint_of_the_same_name_is_left_alone(tmp_path):
    save(tmp_path, 0, 3, 4)
    AlarmLog(tmp_path).rollback(  # the first thing `begin` does, and here the last
        RolledBack(
            number=1,
            alarm="ess",
            step=6,
            to="i1001-s00000003",
            to_step=3,
            good_until=3,
            abandoned=("i1001-s00000004",),
            learning_rate_scale=0.1,
        )
    )
    again = guard(tmp_path)
    assert names(tmp_path) == ["i1001-s00000000", "i1001-s00000003"]
    assert (again.learning_rate_scale, again.bad_after) == (0.1, 3)
    again.resume(3, version=7)
    assert again.bad_after is None
    save(tmp_path, 4)
    guard(tmp_path)
    assert names(tmp_path)[-1] == "i1001-s00000004"


def test_rollbacks_are_counted_over_starts_of_the_run_and_end_with_an_error(tmp_path):
    save(tmp_path, 0)
    first = guard(tmp_path, max_rollbacks=2)
    back(first, raised(first, good=1))
    first.done(4)
    second = guard(tmp_path, max_rollbacks=2)
    second.resume(0, version=5)
    back(second, raised(second, good=1, bad=8))
    assert second.learning_rate_scale == pytest.approx(0.01)
    assert second.version_reason == "rollback-2"
    second.done(9)
    third = guard(tmp_path, max_rollbacks=2)
    third.resume(0, version=12)
    with pytest.raises(HealthError, match=r"health\.max_rollbacks is 2, and the learning rate is down to 0\.01 times"):
        back(third, raised(third, good=1, bad=20))


def test_a_resumed_guard_knows_what_the_run_has_shown(tmp_path):
    save(tmp_path, 0)
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        lines.step(step, GOOD if step < 3 else BAD)
    lines.close()
    watching = guard(tmp_path)
    watching.resume(3, version=4)
    assert watching.good_until == 1
    assert [alarm.since for alarm in watching.observe(4, BAD)] == [3]
