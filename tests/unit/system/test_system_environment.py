"""What is looked at of a recipe's environment before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError
from agentrl.system.build import environment_file, find_recipe_code, refuse_unsupported

BASE = {"name": "r", "run": {"steps": 1}, "model": {"path": "m"}, "tasks": {"train": [{"path": "t.jsonl"}]}}


def looked_at(factory: str, **options: object) -> str:
    return environment_file(Recipe.model_validate(BASE | {"env": {"factory": factory, "options": options}}))


def test_the_file_of_the_environment_is_told():
    assert Path(looked_at("envs.search:SearchEnv", max_turns=2, search=False)).name == "search.py"


def test_values_that_its_options_do_not_take_are_told_before_the_run_starts():
    with pytest.raises(ConfigError, match=r"env\.options: envs\.search:SearchEnv failed: ValueError: SearchEnv searches: give it a retriever_url"):
        looked_at("envs.search:SearchEnv", max_turns=2)


def test_an_environment_that_is_not_there_is_told_with_its_key():
    with pytest.raises(ConfigError, match=r"env\.factory: expected module:Class, got 'nothing'"):
        looked_at("nothing")


def test_options_it_does_not_take_are_told_before_the_run_starts():
    with pytest.raises(ConfigError, match=r"env\.options do not fit envs\.search:SearchEnv: got an unexpected keyword argument 'max_turn'"):
        looked_at("envs.search:SearchEnv", max_turn=2)


def test_an_alarm_on_a_metric_that_is_none_is_told_before_the_run_starts():
    health = {"alarms": {"mine": {"metric": "learner/entropie", "below": 0.1}}}
    with pytest.raises(ConfigError, match=r"health\.alarms\.mine\.metric: there is no metric learner/entropie"):
        refuse_unsupported(Recipe.model_validate(BASE | {"env": {"factory": "envs.search:SearchEnv"}, "health": health}))


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"buffer": {"filter": "envs.search:keep"}}, r"buffer\.filter: envs\.search:keep: .* has no keep"),
        (
            {"buffer": {"replay": {"reuse": 2, "fresh": 0.5, "select": "envs.search:best"}}},
            r"buffer\.replay\.select: envs\.search:best: .* has no best",
        ),
        ({"tasks": {"train": [{"path": "t.jsonl"}], "curriculum": {"factory": "envs.search:Easy"}}}, r"tasks\.curriculum: envs\.search:Easy: "),
    ],
)
def test_code_that_the_buffer_would_not_find_is_told_before_the_run_starts(sections: dict[str, object], told: str):
    with pytest.raises(ConfigError, match=told):
        find_recipe_code(Recipe.model_validate(BASE | {"env": {"factory": "envs.search:SearchEnv"}} | sections))
