"""The recipe's alarms: laid over the defaults by name, and refused where they could not do what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config.health import DEFAULT_ALARMS, HealthRecipe
from agentrl.config.recipe import Recipe

BASE: dict[str, Any] = {
    "name": "r",
    "run": {"steps": 1},
    "model": {"path": "m"},
    "tasks": {"train": [{"path": "t.jsonl"}]},
    "env": {"factory": "envs.search:SearchEnv"},
}


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


def test_an_alarm_on_what_the_recipe_never_measures_is_refused_unless_it_is_a_default_nobody_touched() -> None:
    Recipe.model_validate(BASE)
    with pytest.raises(ValueError, match=r"health\.alarms\.kl_reference watches learner/kl_reference_k3, which is never measured"):
        Recipe.model_validate(BASE | {"health": {"alarms": {"kl_reference": {"actions": ["pause"]}}}})
    with pytest.raises(ValueError, match=r"health\.alarms\.mine watches critic/loss, which is never measured: there is no critic"):
        Recipe.model_validate(BASE | {"health": {"alarms": {"mine": {"metric": "critic/loss", "above": 1.0}}}})
    Recipe.model_validate(BASE | {"health": {"alarms": {"kl_reference": {"actions": []}}}})


def test_the_document_lists_the_defaults() -> None:
    rows = [line for line in (Path(__file__).parents[3] / "docs" / "health.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    told = []
    for name, alarm in HealthRecipe().alarms.items():
        bounds = {"above": alarm.above, "below": alarm.below, "above_factor": alarm.above_factor, "below_factor": alarm.below_factor}
        ((kind, value),) = [(kind, value) for kind, value in bounds.items() if value is not None]
        bad = f"{kind.removesuffix('_factor')} {value:g}" + (" times its first steps" if kind.endswith("_factor") else "")
        told.append(f"| `{name}` | `{alarm.metric}` | {bad} | {alarm.patience} |")
    assert rows == told
