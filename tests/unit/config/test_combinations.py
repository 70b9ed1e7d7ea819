import pytest
from pydantic import ValidationError

from agentrl.config.cautions import cautions
from agentrl.config.recipe import Recipe

BASE = {
    "name": "x",
    "run": {"steps": 1},
    "model": {"path": "m"},
    "tasks": {"train": [{"path": "t"}]},
    "env": {"factory": "a:B"},
}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"rollout": {"group_size": 1}}, "a group of one has no baseline"),
        ({"algorithm": {"advantage": {"estimator": "gae"}}}, "needs a critic"),
        ({"critic": {}}, "grpo does not use it"),
        ({"algorithm": {"gae_over_observations": True}}, "there is no critic"),
        ({"model": {"path": "m", "lora": {"publish": "adapters"}}}, "sends engines full weights only"),
        ({"model": {"path": "m", "lora": {}}, "algorithm": {"kl": {"where": "loss", "reference": "r"}}}, "without its adapters"),
        (
            {"algorithm": {"advantage": {"estimator": "gdpo", "options": {"parts": ["a"]}}, "kl": {"where": "reward"}}},
            "looks at its parts only: set it to loss",
        ),
        ({"learner": {"groups_per_batch": 2, "mini_batches": 20}}, "exceeds the 16 trajectories of a batch"),
        ({"buffer": {"replay": {"reuse": 2}}}, "lower fresh"),
        ({"buffer": {"replay": {"fresh": 0.5}}}, "raise reuse"),
        (
            {"buffer": {"filter": "mixed"}, "critic": {}, "algorithm": {"advantage": {"estimator": "gae"}}, "rollout": {"group_size": 1}},
            "would be dropped",
        ),
        ({"buffer": {"over_sample": 0.5}}, "there is no buffer.filter and no buffer.stops that drops"),
        ({"engine": {"urls": ["http://a:1", "http://a:1/"]}}, "every server once"),
        ({"engine": {"urls": ["http://a:1", "http://a:2"], "replicas": 4}}, "attaches to the 2 servers"),
        ({"engine": {"urls": ["http://a:1"], "python": "sglang/bin/python"}}, "no server is started"),
        ({"tasks": {"train": [{"path": "t", "weight": 1.0}], "curriculum": {"factory": "a:B"}}}, "weights do nothing beside tasks.curriculum"),
    ],
)
def test_sections_that_do_not_fit_each_other_are_refused_with_the_remedy(sections, told):
    with pytest.raises(ValidationError, match=told):
        Recipe.model_validate(BASE | sections)


def test_a_critic_allows_groups_of_one():
    sections = {"critic": {}, "algorithm": {"advantage": {"estimator": "gae"}}, "rollout": {"group_size": 1}}
    assert Recipe.model_validate(BASE | sections).critic is not None


def test_a_recipe_survives_being_sent_to_a_process():
    sections = {"algorithm": {"proximal": "recompute", "importance": {"truncate": None, "bounds": [0.5, 2.0]}}}
    recipe = Recipe.model_validate(BASE | sections)
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_ablations_come_with_a_caution():
    assert cautions(Recipe.model_validate(BASE)) == []
    [told] = cautions(Recipe.model_validate(BASE | {"algorithm": {"train_on_observations": True}}))
    assert "trained to write what the retriever says" in told
