import pytest
import torch
from torch import tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from agentrl.learner.policy import PolicyModel


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


def test_padding_changes_nothing(policy):
    ids, wanted = tensor([[1, 7, 9]]), tensor([[False, True, True]])
    padded, wanted_too = tensor([[1, 7, 9, 0, 0]]), tensor([[False, True, True, False, False]])
    with torch.no_grad():
        assert_close(policy(ids, wanted, torch.ones(1))[0], policy(padded, wanted_too, torch.ones(1))[0][:, :3], atol=1e-6, rtol=0)


def test_weights_have_their_hugging_face_names_tied_ones_once(policy):
    names = [name for name, _ in policy.named_weights()]
    assert names[0] == "model.embed_tokens.weight"
    assert "model.layers.1.mlp.down_proj.weight" in names
    assert "lm_head.weight" not in names
