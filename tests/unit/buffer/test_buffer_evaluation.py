"""Evaluations: when they open, on which version, and what their hook is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from buffer_play import LEARNER, Clock, Player, Tasks, open_buffer, settings

from agentrl.buffer.buffer import BufferSettings, Caller, EvalSettings, ReplayBuffer
from agentrl.buffer_api import EvaluationResult
from agentrl.errors import ConfigError
from agentrl.types import CloseCause, Task, Trajectory

SETS = {"heldout": EvalSettings(n=2, temperature=0.6), "other": EvalSettings()}
TASKS = {name: [Task(id=f"{name}{i}", prompt="?") for i in range(2)] for name in SETS}


class Reports(list[EvaluationResult]):
    """A hook that keeps what it is told."""

    def __call__(self, result: EvaluationResult) -> dict[str, Any]:
        self.append(result)
        return {"number": len(self)}


def begun(directory: Path, **changes: Any) -> tuple[Player, Reports]:
    reports = Reports()
    options = {"eval_sets": SETS} | changes
    player = Player(open_buffer(directory, settings=settings(**options), eval_tasks=TASKS, on_evaluation=reports))
    player.start()
    return player, reports


def test_sets_are_evaluated_one_after_the_other_with_their_own_n_and_temperature(tmp_path: Path) -> None:
    player, reports = begun(tmp_path)
    assert [(grant.ticket.name, grant.temperature, grant.task.id) for grant in player.take()] == [
        (f"eval:heldout@0/{ordinal}/{k}/0", 0.6, f"heldout{ordinal}") for ordinal in range(2) for k in range(2)
    ]
    for grant in list(player.open):
        player.finish(grant)
    player.report()
    assert [(grant.ticket.evaluation, grant.temperature) for grant in player.take()] == [("other@0", 0.0)] * 2
    player.finish_all()
    first = reports[0]
    assert (first.evaluation, first.set, first.step, first.stage, first.versions) == ("heldout@0", "heldout", 0, "initial", (0, 0))
    assert [task.id for task, _ in first.rows] == ["heldout0", "heldout0", "heldout1", "heldout1"]
    assert [outcome.ticket.sample for _, outcome in first.rows if isinstance(outcome, Trajectory)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    events = [event for event in player.buffer.events(0) if event["kind"] == "evaluation"]
    assert [(event["set"], event["stage"], event["payload"]) for event in events] == [
        ("heldout", "initial", {"number": 1}),
        ("other", "initial", {"number": 2}),
    ]


def test_an_episode_that_exhausts_its_attempts_is_a_row_with_its_cause(tmp_path: Path) -> None:
    player, reports = begun(tmp_path, eval_sets={"other": EvalSettings()}, max_attempts=2)
    for _ in range(2):
        bad = next(grant for grant in player.take() + player.open if grant.ticket.ordinal == 0)
        player.fail(bad, CloseCause.DEADLINE)
    player.finish_all()
    outcomes = [outcome for _, outcome in reports[0].rows]
    assert outcomes[0] is CloseCause.DEADLINE
    assert isinstance(outcomes[1], Trajectory)
    assert player.buffer.status()["eval_ledger"] == {"wanted": 2, "not_issued": 0, "in_flight": 0, "played": 1, "dropped/deadline": 1}


def test_a_periodic_evaluation_waits_for_its_steps_version_and_goes_before_training(tmp_path: Path) -> None:
    player, reports = begun(tmp_path, eval_sets={"other": EvalSettings()}, eval_every=1, eval_initial=False)
    player.finish_all()
    version = player.train(player.take_batch(), publish=False)
    assert version == 1
    assert player.buffer.state.evaluations.running is None
    player.publish(version)
    assert [grant.ticket.evaluation for grant in player.take(3)] == ["other@1", "other@1", ""]
    assert player.buffer.state.phase == "training"
    player.finish_all()
    assert (reports[0].stage, reports[0].step, reports[0].versions) == ("periodic", 1, (1, 1))


def test_a_periodic_evaluation_is_of_its_step_and_played_once_where_its_version_comes_out_after_the_next_step(tmp_path: Path) -> None:
    # it was filed under the learner's step of that moment, stayed wanted, and was played again and again
    settings = {"eval_sets": {"other": EvalSettings()}, "eval_every": 2, "eval_initial": False, "eval_final": False}
    player, reports = begun(tmp_path, **settings, total_steps=5)
    player.step()
    player.finish_all()
    second = player.train(player.take_batch(), publish=False)
    third = player.train(player.take_batch(), publish=False)
    assert second is not None
    assert third is not None
    player.publish(second)
    player.finish_all()
    player.publish(third)
    player.finish_all()
    assert [(report.evaluation, report.step, report.stage) for report in reports] == [("other@2", 2, "periodic")]


def test_a_slow_periodic_evaluation_does_not_pile_others_up_behind_it(tmp_path: Path) -> None:
    player, reports = begun(tmp_path, eval_sets={"other": EvalSettings()}, eval_every=1, eval_initial=False, eval_final=False, total_steps=5)
    player.step()
    slow = player.take(2)
    for _ in range(3):
        while grants := [grant for grant in player.take() + player.open if grant not in slow]:
            for grant in grants:
                if grant in player.open:
                    player.finish(grant)
        player.train(player.take_batch())
    for number, grant in enumerate(slow):
        player.finish(grant, version=1 + number)
    player.finish_all()
    assert [(report.evaluation, report.versions) for report in reports] == [("other@1", (1, 2)), ("other@4", (4, 4))]


def test_a_first_evaluation_that_meets_a_new_version_begins_anew(tmp_path: Path) -> None:
    player, reports = begun(tmp_path, eval_sets={"other": EvalSettings()})
    first = player.take(2)
    player.finish(first[0])
    player.buffer.rollback(Caller(role="learner", index=0, incarnation=2), None)
    player.publish(player.buffer.reserve_version(Caller(role="learner", index=0, incarnation=2), reason="restored"))
    assert not player.finish(first[1])
    player.finish_all()
    assert [(report.evaluation, report.versions) for report in reports] == [("other@0#2", (1, 1))]
    assert player.buffer.status()["eval_ledger"]["dropped/cancelled"] == 2


def test_a_final_evaluation_is_done_again_when_its_step_was_rolled_back(tmp_path: Path) -> None:
    player, reports = begun(tmp_path, eval_sets={"other": EvalSettings()}, eval_initial=False, total_steps=1)
    mark = player.buffer.mark()
    player.step()
    player.finish_all()
    assert player.buffer.state.phase == "finished"
    player.learner, player.batches = Caller(role="learner", index=0, incarnation=2), 0
    player.buffer.rollback(player.learner, {"id": "zero", "step": mark.step, "consumed": mark.consumed})
    player.start("restored")
    player.step()
    player.finish_all()
    assert [(report.evaluation, report.versions) for report in reports] == [("other@1", (1, 1)), ("other@1#2", (3, 3))]


def test_an_evaluation_goes_on_after_a_restart_of_the_buffer_and_is_reported_from_the_journal(tmp_path: Path) -> None:
    player, _ = begun(tmp_path, eval_sets={"other": EvalSettings()})
    grants = player.take(2)
    player.finish(grants[0], reward=0.25)
    player.buffer.commit()
    player.buffer.journal.abandon()
    reports = Reports()
    player.buffer = open_buffer(
        tmp_path, incarnation=2, settings=settings(eval_sets={"other": EvalSettings()}), eval_tasks=TASKS, on_evaluation=reports
    )
    player.finish(grants[1], reward=0.5)
    player.report()
    assert [outcome.reward.total for _, outcome in reports[0].rows if isinstance(outcome, Trajectory)] == [0.25, 0.5]


def test_a_buffer_that_only_evaluates_needs_no_tasks_and_ends_after_its_sets(tmp_path: Path) -> None:
    reports = Reports()
    only = BufferSettings(group_size=1, groups_per_batch=1, eval_sets=SETS, evaluate_only=True, debug=True)
    buffer = ReplayBuffer(tmp_path, only, tasks=None, eval_tasks=TASKS, incarnation=1, run=1, on_evaluation=reports, clock=Clock())
    buffer.rollback(LEARNER, {"id": "step 40", "step": 40, "consumed": [[0, 39]]})
    player = Player(buffer)
    player.start("restored")
    assert buffer.state.phase == "final_eval"
    player.finish_all()
    assert buffer.state.phase == "finished"
    assert [(report.evaluation, report.stage) for report in reports] == [("heldout@40", "final"), ("other@40", "final")]


def test_a_set_without_tasks_in_the_settings_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tasks were given for eval sets \['other'\]"):
        ReplayBuffer(tmp_path, settings(eval_sets=SETS), tasks=Tasks(), eval_tasks={"heldout": []}, incarnation=1, run=1)
