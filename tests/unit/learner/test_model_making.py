import pytest
import torch
from learner_scene import TINY, VOCABULARY, tiny_tokenizer
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.config.recipe import Architecture
from agentrl.learner.build_model import make_model

MIMETIC = TINY.model_copy(update={"kv_heads": 4, "initialisation": "mimetic"})


def weights(directory):
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def test_a_seed_gives_the_same_weights_and_another_seed_others(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    one, same, other = (weights(make_model(TINY, tokenizer, tmp_path / str(place), seed)) for place, seed in enumerate((1, 1, 2)))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_model_fits_its_tokenizer_which_lies_beside_it(tmp_path):
    out = make_model(TINY, tiny_tokenizer(tmp_path / "tokenizer"), tmp_path / "model", 0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size == VOCABULARY == len(tokenizer)
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 0)


def test_making_a_model_leaves_torchs_random_state_alone(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    state = torch.get_rng_state()
    make_model(TINY, tokenizer, tmp_path / "model", 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_mimetic_values_are_orthogonal_and_outputs_their_transpose(tmp_path):
    made = weights(make_model(MIMETIC, tiny_tokenizer(tmp_path / "tokenizer"), tmp_path / "model", 0))
    value, output = (made[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "vo")
    torch.testing.assert_close(value @ value.T, torch.eye(32), atol=1e-5, rtol=0)
    torch.testing.assert_close(output, 0.6 * value.T)


def test_mimetic_heads_look_one_and_two_tokens_back(tmp_path):
    out = make_model(MIMETIC, tiny_tokenizer(tmp_path / "tokenizer"), tmp_path / "model", 0)
    model = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    with torch.no_grad():
        attention = model(torch.randint(3, VOCABULARY, (1, 12)), output_attentions=True).attentions[0][0]
    for head, back in ((0, 1), (1, 2)):
        assert all(attention[head, place].argmax().item() == place - back for place in range(4, 12))


def test_a_recipe_names_the_family():
    assert [Architecture(family=family).family for family in ("qwen2", "qwen3", "llama")] == ["qwen2", "qwen3", "llama"]
    with pytest.raises(
        ValidationError, match="initialisation mimetic needs family qwen2, whose first heads look back by their biases; llama has none"
    ):
        Architecture(family="llama", initialisation="mimetic")
