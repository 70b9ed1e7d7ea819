import pytest
import torch
from learner_rank import differences
from torch import tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, Qwen3Config

from agentrl.errors import ConfigError
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks


@pytest.fixture(scope="module")
def policy(model_dir):
    return PolicyModel.load(model_dir)


def test_wanted_tokens_have_the_models_own_logprobs_and_others_zero(policy, model_dir):
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = tensor([[1, 7, 9, 11, 30, 4], [1, 8, 8, 0, 0, 0]])
    wanted = tensor([[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]]) == 1
    with torch.no_grad():
        logp, entropy = policy(ids, wanted, tensor([1.0, 0.5]))
        logits = reference(input_ids=ids, use_cache=False).logits / tensor([1.0, 0.5])[:, None, None]
    everything = logits[:, :-1].log_softmax(-1)
    chosen = everything.gather(-1, ids[:, 1:, None])[..., 0] * wanted[:, 1:]
    assert_close(logp[:, 1:], chosen, atol=1e-5, rtol=0)
    assert_close(entropy[:, 1:], -(everything.exp() * everything).sum(-1) * wanted[:, 1:], atol=1e-5, rtol=0)
    assert logp[~wanted].abs().sum().item() == 0.0


def test_the_sum_of_squared_probabilities_is_a_third_answer(policy, model_dir):
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids, wanted = tensor([[1, 7, 9, 11]]), tensor([[False, False, True, True]])
    logp, entropy, squared = policy(ids, wanted, tensor([0.7]), sum_pi_squared=True)
    with torch.no_grad():
        expected = (reference(input_ids=ids, use_cache=False).logits / 0.7).softmax(-1).square().sum(-1)
    assert_close(squared[:, 1:], expected[:, :-1] * wanted[:, 1:], atol=1e-6, rtol=0)
    plain = policy(ids, wanted, tensor([0.7]))
    assert len(plain) == 2
    assert plain[0].equal(logp)
    assert plain[1].equal(entropy)


def test_padding_changes_nothing(policy):
    ids, wanted = tensor([[1, 7, 9]]), tensor([[False, True, True]])
    padded, wanted_too = tensor([[1, 7, 9, 0, 0]]), tensor([[False, True, True, False, False]])
    with torch.no_grad():
        assert_close(policy(ids, wanted, torch.ones(1))[0], policy(padded, wanted_too, torch.ones(1))[0][:, :3], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pass_without_gradient_leaves_the_trained_parameters_in_place(model_dir, dtype):
    # FSDP keeps the root gathered after such a pass: asked for its weights the model named the copies, and computed with them ever after.
    policy = PolicyModel.load(model_dir)
    policy.shard(Ranks.single(), dtype)
    ids, wanted = tensor([[1, 7, 9]]), tensor([[False, True, True]])
    before = [parameter for _, parameter in policy.named_weights()]
    with torch.no_grad():
        first = policy(ids, wanted, torch.ones(1))[0]
        assert all(one is other for one, (_, other) in zip(before, policy.named_weights(), strict=True))
        dict(policy.named_weights())["model.embed_tokens.weight"].to_local().mul_(2)
        assert not policy(ids, wanted, torch.ones(1))[0].equal(first)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["alone", "fsdp"])
@pytest.mark.parametrize("tied", [False, True], ids=["own output layer", "tied"])
def test_gradients_are_those_of_materialised_logits(tmp_path, tied, sharded):
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=tied)).save_pretrained(tmp_path)
    policy, plain = PolicyModel.load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if sharded:
        policy.shard(Ranks.single(), "float32")
    assert differences(policy, plain) == pytest.approx([0, 0, 0], abs=1e-5)


def test_weights_have_their_hugging_face_names_tied_ones_once(policy):
    names = [name for name, _ in policy.named_weights()]
    assert names[0] == "model.embed_tokens.weight"
    assert "model.layers.1.mlp.down_proj.weight" in names
    assert "lm_head.weight" not in names


SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)], ids=["llama", "qwen3"])
def test_other_families_agree_with_their_own_logits(tmp_path, config):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    PolicyModel.load(tmp_path)  # compares


def test_a_family_that_scales_its_logits_is_refused(tmp_path):
    AutoModelForCausalLM.from_config(GraniteConfig(**SMALL, logits_scaling=8.0)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="changes its logits"):
        PolicyModel.load(tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        PolicyModel.load(tmp_path)
