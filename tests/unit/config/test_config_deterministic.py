"""What a deterministic run refuses, because its bits would depend on it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentrl.config.recipe import Recipe

FIT = {
    "name": "r",
    "run": {"steps": 1, "deterministic": True},
    "model": {"path": "m"},
    "tasks": {"train": [{"path": "t.jsonl"}]},
    "env": {"factory": "my:Env"},
    "rollout": {"max_staleness": 0},
}


def test_one_engine_one_worker_and_one_thread_without_staleness_are_accepted():
    assert Recipe.model_validate(FIT).run.deterministic


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"engine": {"replicas": 2}}, "engine.replicas 1 (is 2)"),
        ({"engine": {"threads": 2}}, "engine.threads 1 (is 2)"),
        ({"engine": {"slots": 3}}, "engine.slots >= 4"),
        ({"engine": {"device": "cuda"}}, "engine.device cpu (is cuda)"),
        ({"rollout": {"workers": 2, "max_staleness": 0}}, "rollout.workers 1 (is 2)"),
        ({"rollout": {"max_staleness": 1}}, "rollout.max_staleness 0 (is 1)"),
        ({"weights": {"publish_every": 2}}, "weights.publish_every 1 (is 2)"),
        ({"learner": {"threads": 2}}, "learner.threads 1 (is 2)"),
        ({"learner": {"device": "cuda"}}, "learner.device cpu (is cuda)"),
        ({"model": {"path": "m", "dtype": "bfloat16"}}, "model.dtype float32 (is bfloat16)"),
        ({"buffer": {"filter": "mixed", "over_sample": 0.5}}, "buffer.over_sample 0.0 (is 0.5)"),
        ({"buffer": {"replay": {"reuse": 2, "fresh": 0.5}}}, "buffer.replay.fresh 1"),
        ({"tasks": {"train": [{"path": "t.jsonl"}], "curriculum": {"factory": "my:Class"}}}, "no tasks.curriculum"),
        ({"resources": {"colocate": True}}, "resources.colocate False (is True)"),
        ({"run": {"hours": 1.0, "deterministic": True}}, "no run.hours"),
        ({"eval": {"sets": {"held": {"tasks": [{"path": "h.jsonl"}]}}}}, "no eval.sets"),
    ],
)
def test_what_bits_would_depend_on_is_refused(section, told):
    with pytest.raises(ValidationError) as caught:
        Recipe.model_validate(FIT | section)
    assert f"run.deterministic needs {told}" in str(caught.value)


def test_all_that_does_not_fit_is_told_at_once():
    with pytest.raises(ValidationError, match=r"run\.deterministic needs learner\.threads 1 \(is 2\), no eval\.sets"):
        Recipe.model_validate(FIT | {"learner": {"threads": 2}, "eval": {"sets": {"held": {"tasks": [{"path": "h.jsonl"}]}}}})
