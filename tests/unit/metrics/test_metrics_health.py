"""Alarms over the metrics of steps, and which weights are known to be good."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agentrl.config.health import DEFAULT_ALARMS, HealthRecipe
from agentrl.metrics.catalogue import unknown
from agentrl.metrics.health import Alarm, HealthMonitor

OFF: dict[str, Any] = {name: {"actions": []} for name in DEFAULT_ALARMS}


def monitor(*, max_staleness: int = 2, baseline_steps: int = 3, **alarms: Any) -> HealthMonitor:
    """A monitor of these alarms alone; of entropy, where no metric is named."""
    named = {name: {"metric": "learner/entropy"} | told for name, told in alarms.items()}
    return HealthMonitor(HealthRecipe.model_validate({"alarms": OFF | named, "baseline_steps": baseline_steps}), max_staleness=max_staleness)


def fed(watching: HealthMonitor, values: list[float | None], *, first: int = 1, metric: str = "learner/entropy") -> list[Alarm]:
    """What steps of these values raise; None is a step without the metric."""
    return [alarm for step, value in enumerate(values, start=first) for alarm in watching.observe(step, {} if value is None else {metric: value})]


def test_an_alarm_is_raised_after_patience_bad_steps_in_a_row_and_once_per_streak():
    raised = fed(monitor(low={"below": 0.5, "patience": 2}), [1.0, 0.4, 0.6, 0.4, 0.3, 0.2, 0.6, 0.4, 0.4])
    assert [(alarm.name, alarm.step, alarm.since, alarm.value) for alarm in raised] == [("low", 5, 4, 0.3), ("low", 9, 8, 0.4)]
    assert str(raised[0]) == "alarm low: learner/entropy is 0.3, below 0.5, since step 4"


def test_a_bound_is_not_broken_by_its_own_value_and_either_of_two_bounds_counts():
    watching = monitor(band={"above": 2.0, "below": 0.5, "patience": 1})
    assert [alarm.step for alarm in fed(watching, [0.5, 2.0, 2.1, 1.0, 0.4])] == [3, 5]


def test_a_factor_multiplies_the_median_of_the_first_healthy_steps():
    # baseline of 3 steps: 9 is above the absolute bound of the other alarm and does not count, so 1, 2, 3: median 2, bound 10
    watching = monitor(jump={"above_factor": 5.0, "patience": 1}, absolute={"above": 8.0, "patience": 99})
    assert fed(watching, [1.0, 9.0, 2.0, 3.0, 10.0]) == []
    (alarm,) = fed(watching, [10.5], first=6)
    assert alarm.bound == "above 10 (the first healthy steps had 2)"


def test_before_the_baseline_is_complete_and_where_it_is_not_positive_a_factor_bounds_nothing():
    assert fed(monitor(jump={"above_factor": 2.0, "patience": 1}), [1.0, 50.0]) == []
    assert fed(monitor(jump={"above_factor": 2.0, "patience": 1}), [0.0, 0.0, 0.0, 50.0]) == []


def test_steps_of_the_warm_up_are_not_looked_at_nor_in_the_baseline():
    watching = monitor(jump={"above_factor": 2.0, "patience": 1, "warmup_steps": 2}, low={"below": 0.5, "patience": 1, "warmup_steps": 2})
    # the median of 1, 1, 1 without the warm-up's 0.1 and 40
    assert [alarm.step for alarm in fed(watching, [0.1, 40.0, 1.0, 1.0, 1.0, 2.5])] == [6]


def test_a_step_without_the_metric_neither_ends_a_streak_nor_makes_it_longer():
    assert [alarm.step for alarm in fed(monitor(low={"below": 0.5, "patience": 2}), [0.4, None, None, 0.4])] == [4]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_bad_and_is_told_as_text(value):
    (alarm,) = fed(monitor(low={"below": 0.5, "patience": 1}), [value])
    assert alarm.bound == "not a finite number"
    assert alarm.to_plain()["value"] == str(value)


def test_an_alarm_without_actions_is_off():
    assert fed(monitor(low={"below": 0.5, "patience": 1, "actions": []}), [0.1]) == []


def test_good_are_weights_that_a_later_step_measured_and_found_good():
    # step s measures the weights of s-1. After step 3 those of 0..2 are seen to be good; bad from 4 on: those of 3 may be the first bad ones
    watching = monitor(low={"below": 0.5, "patience": 3, "actions": ["rollback"]})
    assert watching.good_until == -1
    fed(watching, [1.0, 1.0, 1.0])
    assert watching.good_until == 2
    fed(watching, [0.1, 0.1], first=4)
    assert watching.good_until == 2
    fed(watching, [1.0], first=6)
    assert watching.good_until == 5


def test_a_metric_of_episodes_may_be_the_doing_of_weights_k_steps_older():
    alarm = {"metric": "batch/valid_action_share", "below": 0.5, "actions": ["rollback"]}
    watching = monitor(low=alarm, max_staleness=2)
    fed(watching, [1.0] * 9 + [0.1], metric="batch/valid_action_share")
    assert watching.good_until == 10 - 2 - 2


def test_without_an_alarm_that_rolls_back_nothing_is_kept_for_it():
    assert monitor(low={"below": 0.5}).good_until is None


def test_after_a_rollback_alarms_are_quiet_until_the_abandoned_episodes_are_through_and_nothing_seen_after_it_counts():
    watching = monitor(low={"below": 0.5, "patience": 2, "actions": ["rollback"]}, max_staleness=1)
    assert [alarm.step for alarm in fed(watching, [1.0, 1.0, 1.0, 0.1, 0.1])] == [5]
    watching.roll_back(2, seen=5)
    # quiet up to step 5 + 1 + 1: the streak of 3, 4, ... is told in 8, and the checkpoint it leads to is again that of step 1
    assert [(alarm.step, alarm.since) for alarm in fed(watching, [0.1] * 6, first=3)] == [(8, 3)]
    assert watching.good_until == 1


def test_a_healthy_run_goes_on_after_a_rollback_and_its_newer_weights_become_good():
    watching = monitor(low={"below": 0.5, "patience": 2, "actions": ["rollback"]}, max_staleness=1)
    fed(watching, [1.0, 1.0, 0.1, 0.1])
    watching.roll_back(1, seen=4)
    assert fed(watching, [1.0, 1.0, 1.0], first=2) == []
    assert watching.good_until == 3


def test_a_resumed_monitor_that_is_shown_the_same_steps_stands_where_the_first_did():
    alarms = {"jump": {"above_factor": 5.0, "patience": 2}}
    first = monitor(**alarms)
    fed(first, [1.0, 2.0, 3.0, 4.0, 11.0, 11.0])
    first.roll_back(4, seen=6)  # quiet up to 6 + 2 + 1
    assert fed(first, [11.0] * 4, first=5) == []
    second = monitor(**alarms)
    second.roll_back(4, seen=6)
    fed(second, [1.0, 2.0, 3.0, 4.0, 11.0, 11.0, 11.0, 11.0])
    assert fed(first, [11.0], first=9) == fed(second, [11.0], first=9) == []
    (alarm,) = fed(first, [11.0], first=10)
    assert fed(second, [11.0], first=10) == [alarm]
    assert (alarm.step, alarm.since) == (10, 5)
    assert fed(first, [11.0], first=11) == fed(second, [11.0], first=11) == []


def test_an_alarm_that_was_raised_before_a_resume_is_not_raised_again_in_the_same_streak():
    second = monitor(low={"below": 0.5, "patience": 2})
    assert len(fed(second, [1.0, 0.1, 0.1])) == 1  # shown once more
    assert fed(second, [0.1, 0.1], first=4) == []


def test_the_alarms_of_the_defaults_watch_metrics_that_there_are_and_only_warn():
    assert {tuple(alarm.actions) for alarm in HealthRecipe().alarms.values()} == {("warn",)}
    assert unknown(alarm.metric for alarm in HealthRecipe().alarms.values()) == []
