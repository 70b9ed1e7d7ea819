"""The recipe's alarms: laid over the defaults by name, and refused where they could not do what they say."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config.health import DEFAULT_ALARMS, HealthRecipe


def test_an_alarm_of_the_defaults_is_changed_by_one_key_and_the_others_stay() -> None:
    health = HealthRecipe.model_validate({"alarms": {"ess": {"actions": ["rollback"]}}})
    assert (health.alarms["ess"].below, health.alarms["ess"].actions) == (0.2, ["rollback"])
    assert health.alarms.keys() == DEFAULT_ALARMS.keys()
    assert health.rolls_back
    assert not HealthRecipe().rolls_back


def test_a_recipe_survives_being_written_and_read_also_with_an_alarm_turned_off() -> None:
    health = HealthRecipe.model_validate({"alarms": {"ess": {"actions": []}, "mine": {"metric": "batch/turns", "below": 1.0}}})
    assert HealthRecipe.model_validate(health.model_dump(mode="json")) == health


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"alarms": {"mine": {"metric": "eval/heldout/em", "below": 0.1}}}, "starts with batch/, learner/, critic/, not eval/heldout/em"),
        ({"alarms": {"mine": {"metric": "batch/turns"}}}, "needs above, below, above_factor or below_factor"),
        ({"alarms": {"my alarm": {"metric": "batch/turns", "below": 1}}}, "made of a-z, 0-9 and _: my alarm is not"),
        ({"alarms": {"ess": {"actions": ["url"]}}}, "health.url is not set"),
        ({"command": ["notify-send"]}, "health.command is set, but no alarm has the action command"),
        ({"alarms": {"ess": {"actions": ["command"]}}, "command": []}, "at least 1 item"),
    ],
)
def test_what_could_not_do_what_it_says_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        HealthRecipe.model_validate(given)
