import pytest
import torch
from learner_models_scene import full_recipe
from learner_scene import TINY, tiny_model
from torch import tensor
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from agentrl.errors import ConfigError
from agentrl.learner.critic import CriticModel
from agentrl.learner.learner import Learner
from agentrl.learner.ranks import Ranks

IDS = tensor([[1, 7, 9, 11, 30, 4], [1, 8, 8, 0, 0, 0]])
WANTED = tensor([[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]]) == 1


def states(model, ids):
    """Of a plain model, the last hidden state before each token; there is none before the first."""
    hidden = model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)


@pytest.mark.slow  # the first here to load a model
@torch.no_grad()
def test_a_value_is_the_head_on_the_state_the_token_was_generated_from(model_dir):
    critic, plain = CriticModel.load(model_dir), AutoModel.from_pretrained(model_dir, dtype=torch.float32)
    critic.score.weight.copy_(torch.randn(critic.score.weight.shape, generator=torch.Generator().manual_seed(0)))
    expected = (states(plain, IDS) @ critic.score.weight.T)[..., 0] * WANTED
    assert_close(critic(IDS, WANTED), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_new_head_values_every_state_at_zero(model_dir):
    values = CriticModel.load(model_dir)(IDS, WANTED)
    assert values.shape == IDS.shape
    assert values.abs().sum().item() == 0.0


def test_the_head_learns_what_is_asked_of_it(model_dir):
    critic = CriticModel.load(model_dir)
    (critic(IDS, WANTED) - 1).mul(WANTED).sum().backward()
    critic._backbone.will_read(IDS.shape, torch.arange(IDS.numel()))
    before = states(critic.model, IDS)
    assert_close(critic.score.weight.grad, before[WANTED].sum(0, keepdim=True), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
@torch.no_grad()
def test_a_reward_models_head_becomes_the_value_head(model_dir, tmp_path, kind):
    torch.manual_seed(1)
    reward_model = kind.from_pretrained(model_dir, num_labels=1, dtype=torch.float32)
    reward_model.save_pretrained(tmp_path)
    critic = CriticModel.load(tmp_path)
    assert critic.score.weight.equal(reward_model.score.weight)
    assert critic.score.weight.abs().sum() > 0
    expected = reward_model.score(states(reward_model.model.eval(), IDS))[..., 0] * WANTED
    assert_close(critic(IDS, WANTED), expected, atol=1e-5, rtol=0)


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_labels=2, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="8 to 2"):
        CriticModel.load(tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no model in"):
        CriticModel.load(tmp_path)


def test_a_model_of_another_kind_is_refused(model_dir, tmp_path):
    AutoModel.from_pretrained(model_dir).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is a Qwen2Model; expected ForCausalLM, or a reward model"):
        CriticModel.load(tmp_path)


def test_no_wanted_tokens_have_zero_gradients(model_dir):
    critic = CriticModel.load(model_dir)
    critic(IDS, torch.zeros_like(WANTED)).sum().backward()
    assert critic.score.weight.grad.abs().sum().item() == 0.0


@pytest.mark.slow
def test_a_recipes_critic_has_its_own_optimizer_and_may_be_larger_than_the_policy(model_dir, tmp_path):
    larger = tiny_model(tmp_path / "larger", TINY.model_copy(update={"hidden_size": 64, "layers": 3}))
    recipe = full_recipe(critic={"path": str(larger), "learning_rate": 3e-4, "betas": [0.8, 0.9], "weight_decay": 0.1})
    state = Learner.build(recipe, model_dir, Ranks.single(), tmp_path).state
    group = state.critic_optimizer.param_groups[0]
    assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (3e-4, (0.8, 0.9), 0.1)
    assert state.critic.score.weight.shape == (1, 64)
    assert {id(weight) for weight in group["params"]} == {id(weight) for _, weight in state.critic.named_weights()}


@pytest.mark.slow
def test_in_bfloat16_values_are_still_computed_in_float32(model_dir, tmp_path):
    state = Learner.build(full_recipe(model__dtype="bfloat16"), model_dir, Ranks.single(), tmp_path).state
    with torch.no_grad():
        state.critic.score.weight.to_local().normal_()
        values = state.critic(IDS, WANTED)[WANTED]
    assert values.dtype == torch.float32
    assert not values.equal(values.bfloat16().float())
    assert {weight.dtype for _, weight in state.critic.named_weights()} == {torch.float32}


@pytest.mark.slow
def test_a_critic_of_another_tokenizer_is_refused(model_dir, tmp_path):
    other = tiny_model(tmp_path / "other")
    told = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(told.replace('"w7": 7', '"v7": 7'))
    with pytest.raises(ConfigError, match=r"critic\.path: .* token 7 is 'v7' there and 'w7' here"):
        Learner.build(full_recipe(critic={"path": str(other)}), model_dir, Ranks.single(), tmp_path)


@pytest.mark.slow
def test_a_critic_with_fewer_embeddings_than_the_policy_has_tokens_is_refused(model_dir, tmp_path):
    small = tiny_model(tmp_path / "small")
    model = AutoModelForCausalLM.from_pretrained(small)
    model.resize_token_embeddings(40)
    model.save_pretrained(small)
    with pytest.raises(ConfigError, match=r"embeddings of 40 tokens; the policy's tokenizer has ids up to 47"):
        Learner.build(full_recipe(critic={"path": str(small)}), model_dir, Ranks.single(), tmp_path)
