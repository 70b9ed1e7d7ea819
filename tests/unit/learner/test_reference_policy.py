import pytest
import torch
from learner_models_scene import full_recipe, play, rows
from learner_scene import tiny_model
from torch.testing import assert_close

from agentrl.learner.learner import Learner
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks

pytestmark = pytest.mark.slow

IDS, WANTED = rows(0)
TEMPERATURE = torch.tensor([1.0, 0.5, 2.0, 1.0])


@pytest.fixture(params=["adapters", "copy"])
def learner(request, model_dir, tmp_path):
    without = {} if request.param == "adapters" else {"model__lora": None}
    return Learner.build(full_recipe(**without), model_dir, Ranks.single(), tmp_path)


@torch.no_grad()
def logprobs(policy):
    return policy(IDS, WANTED, TEMPERATURE)[0]


def test_the_reference_is_the_policy_at_the_start_and_stays_when_the_policy_moves(learner, model_dir):
    initial = logprobs(PolicyModel.load(model_dir))
    state = learner.state
    reference = state.reference.logprobs(IDS, WANTED, TEMPERATURE)
    assert not reference.requires_grad
    assert reference.equal(logprobs(state.policy))
    assert_close(reference, initial, atol=1e-6, rtol=0)
    play(learner, range(3))
    assert state.reference.logprobs(IDS, WANTED, TEMPERATURE).equal(reference)
    assert (logprobs(state.policy) - reference).abs().max() > 0.1


def test_the_reference_is_in_no_optimizer_and_asks_for_no_gradient(learner):
    play(learner, range(1))
    trained = {id(parameter) for group in learner.state.optimizer.param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in learner.state.policy.parameters() if parameter.requires_grad}


def test_adapters_are_back_after_the_reference_was_asked(learner):
    play(learner, range(2))
    before = logprobs(learner.state.policy)
    learner.state.reference.logprobs(IDS, WANTED, TEMPERATURE)
    assert logprobs(learner.state.policy).equal(before)


def test_a_recipe_names_another_model_as_the_reference(model_dir, tmp_path):
    other = tiny_model(tmp_path / "other", seed=5)
    recipe = full_recipe(model__lora=None, algorithm__kl={"where": "loss", "reference": str(other)})
    learner = Learner.build(recipe, model_dir, Ranks.single(), tmp_path)
    assert_close(learner.state.reference.logprobs(IDS, WANTED, TEMPERATURE), logprobs(PolicyModel.load(other)), atol=1e-6, rtol=0)


def test_without_kl_there_is_no_reference(model_dir, tmp_path):
    assert Learner.build(full_recipe(algorithm__kl={"where": "none"}), model_dir, Ranks.single(), tmp_path).state.reference is None
