from itertools import pairwise

import pytest
import torch
from learner_scene import tiny_recipe
from torch import tensor
from torch.testing import assert_close
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.utils import is_flash_attn_2_available

from agentrl.errors import ConfigError
from agentrl.learner.attention import varlen_attention
from agentrl.learner.critic import CriticModel
from agentrl.learner.layout import Layout
from agentrl.learner.learner import Learner
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks

# a0 a1 a2 a3 / b0 b1 / c0 c1 c2; wanted: a1 a3, c2
IDS = tensor([[10, 11, 12, 13], [20, 21, 0, 0], [30, 31, 32, 0]])
TARGETS = tensor([1, 3, 10])


def test_side_by_side_up_to_the_last_state_that_is_read():
    layout = Layout.padded(IDS, TARGETS)
    assert layout.token_ids_RW.tolist() == [[10, 11, 12], [20, 21, 0], [30, 31, 32]]
    assert layout.token_ids_RW.flatten()[layout.read_N].tolist() == [10, 12, 31]
    assert layout.arguments == {}


def test_end_to_end_positions_begin_anew_with_each_sequence():
    layout = Layout.packed(IDS, TARGETS, boundaries=True)
    assert layout.token_ids_RW.tolist() == [[10, 11, 12, 30, 31]]
    assert layout.token_ids_RW.flatten()[layout.read_N].tolist() == [10, 12, 31]
    assert layout.arguments["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert layout.arguments["cu_seq_lens_q"].tolist() == layout.arguments["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert layout.arguments["cu_seq_lens_q"].dtype == torch.int32
    assert layout.arguments["max_length_q"] == layout.arguments["max_length_k"] == 3
    assert "attention_mask" not in layout.arguments


def test_where_the_attention_finds_boundaries_by_positions_it_is_told_none():
    assert list(Layout.packed(IDS, TARGETS, boundaries=False).arguments) == ["position_ids"]


@pytest.mark.parametrize("layout", [Layout.padded(IDS, TARGETS[:0]), Layout.packed(IDS, TARGETS[:0], boundaries=True)], ids=["padded", "packed"])
def test_a_dummy_passes_a_token_and_reads_nothing(layout):
    assert layout.token_ids_RW.shape[1] == 1
    assert len(layout.read_N) == 0


SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
FAMILIES = {"llama": LlamaConfig(**SMALL), "qwen3": Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)}


@pytest.mark.parametrize("family", ["qwen2", *FAMILIES])
@pytest.mark.slow
def test_packed_log_probs_and_gradients_are_the_padded_ones(model_dir, tmp_path, family):
    if family in FAMILIES:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path)
        model_dir = tmp_path
    ids = torch.randint(3, 40, (5, 17), generator=torch.Generator().manual_seed(1))
    wanted = (torch.arange(17) < tensor([17, 3, 9, 12, 2])[:, None]) & (torch.arange(17) % 3 > 0)
    wanted[1] = False
    answers = []
    for packed in (False, True):
        policy = PolicyModel.load(model_dir, packed=packed)
        logp, entropy = policy(ids, wanted, tensor([1.0, 1.0, 0.7, 1.0, 1.3]))
        (logp.sum() + 0.3 * entropy.sum()).backward()
        answers.append([logp, entropy, *(parameter.grad for parameter in policy.parameters())])
    for padded, packed in zip(*answers, strict=True):
        assert_close(packed, padded, atol=1e-5, rtol=1e-5)


def test_packed_values_are_the_padded_ones(model_dir):
    critics = [CriticModel.load(model_dir, packed=packed) for packed in (False, True)]
    for critic in critics:
        torch.nn.init.ones_(critic.score.weight)
    wanted = IDS.new_tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0]]) == 1
    with torch.no_grad():
        assert_close(critics[1](IDS, wanted), critics[0](IDS, wanted), atol=1e-5, rtol=0)


def by_sequences(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None, **_):
    """What varlen is to compute, one sequence after the other."""
    assert attention_mask is None
    assert max_length_q == cu_seq_lens_q.diff().max()
    pieces = [
        torch.nn.functional.scaled_dot_product_attention(
            *(states[:, :, start:end] for states in (query, key, value)), scale=scaling, is_causal=True, enable_gqa=True
        )
        for start, end in pairwise(cu_seq_lens_q.tolist())
    ]
    return torch.cat(pieces, 2).transpose(1, 2), None


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["activations kept", "computed again"])
def test_an_attention_for_packed_sequences_is_told_where_they_begin(model_dir, again):
    ids, wanted = IDS, IDS.new_tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0]]) == 1
    gradients = []
    for attention in ("sdpa", "varlen"):
        policy = PolicyModel.load(model_dir, attention=attention, packed=attention == "varlen", gradient_checkpointing=again)
        AttentionInterface.register("varlen", by_sequences)  # in the place of torch's, which runs on a GPU only
        policy(ids, wanted, torch.ones(3))[0].sum().backward()
        gradients.append([parameter.grad for parameter in policy.parameters()])
    for sdpa, varlen in zip(*gradients, strict=True):
        assert_close(varlen, sdpa, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("limits", [{}, {"cu_seq_lens_q": tensor([0, 3, 8], dtype=torch.int32), "max_length_q": 5}], ids=["rows", "boundaries"])
def test_torchs_varlen_attention_takes_what_it_is_given(limits):
    # on the meta device: its shapes are checked, nothing is computed
    states = [torch.empty(2, heads, 4, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    attended, weights = varlen_attention(None, *states, None, scaling=0.25, sliding_window=3, **limits)
    assert attended.shape == (2, 4, 4, 16)
    assert weights is None


def test_flash_attention_is_asked_for_before_a_model_is_loaded(model_dir):
    if is_flash_attn_2_available():
        pytest.skip("flash-attn is installed here")
    with pytest.raises(ConfigError, match="flash_attention_2 needs flash-attn"):
        PolicyModel.load(model_dir, attention="flash_attention_2")


@pytest.mark.slow
def test_a_model_that_lets_packed_sequences_see_one_another_is_refused(model_dir):
    policy = PolicyModel.load(model_dir, packed=True)
    transformer = policy.causal.base_model
    forward = transformer.forward
    transformer.forward = lambda **arguments: forward(**(arguments | {"position_ids": None}))  # a family that counts through
    with pytest.raises(ConfigError, match=r"does not keep them apart\. Set learner\.packing=padded"):
        policy.shard(Ranks.single(), "float32")
    transformer.forward = forward


@pytest.mark.slow
def test_the_recipe_decides(model_dir, tmp_path):
    assert not Learner.build(tiny_recipe(), model_dir, Ranks.single(), tmp_path).state.policy.packed
    assert Learner.build(tiny_recipe(learner__packing="packed"), model_dir, Ranks.single(), tmp_path).state.policy.packed
