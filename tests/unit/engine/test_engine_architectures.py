"""Every architecture the engine says it runs gives the logits of transformers' own model, prefilled and decoded."""

import json

import pytest
import torch
from engine_loop import load_runner

from agentrl.engine.architecture import ModelConfig
from agentrl.engine.rope import Rope, Stretch
from agentrl.engine.runner import Chunk
from agentrl.errors import EngineError

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": [1, 2],
}
# stretched from 16 positions on, so that the test's 24 reach every branch
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "qwen2 grouped": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen2 tied": ("Qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3 grouped, wide heads": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3 tied, biased": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama tied, biased, stretched": (
        "Llama",
        {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
}
IDS = [5, 17, 80, 41, 3, 66, 29, 90, 12, 54, 7, 31, 9, 9, 10, 11, 70, 33, 2, 1, 44, 60, 8, 95]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_logits_are_those_of_transformers(tmp_path, model):
    expected = write_model(tmp_path, *model)
    runner = load_runner(tmp_path)
    whole = runner.logits(runner.prefill([Chunk(slot=3, tokens=IDS)], every_token=True))
    assert torch.allclose(whole, expected, atol=1e-4, rtol=0)
    runner.prefill([Chunk(slot=0, tokens=IDS[:9]), Chunk(slot=1, tokens=IDS[:4])])
    for place in range(9, len(IDS)):
        positions = torch.tensor([place, runner.idle_position])
        decoded = runner.decode(torch.tensor([IDS[place], 0]), positions, attend=32)
        assert torch.allclose(decoded[0], expected[place], atol=1e-4, rtol=0)


def write_model(directory, family, more):
    """Save a random model of transformers, every parameter of it away from its neutral value, and return its logits for IDS."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES | more)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + (1.0 if name.endswith("norm.weight") else 0.0))
        logits = model(torch.tensor([IDS])).logits[0]
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    config = ModelConfig.load(directory)
    assert (config.family, config.eos_ids) == (family.lower(), {1, 2, 7})
    assert config.parameters().keys() == {name for name, _ in model.named_parameters()}
    return logits


def written(directory, **fields):
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", **{key: SIZES[key] for key in SIZES if key != "eos_token_id"}, **fields})
    )
    return directory


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen3_moe"}, "runs qwen2, qwen3, llama models, this is 'qwen3_moe'; serve it by SGLang instead"),
        ({"mlp_bias": True}, "does not compute a bias in the MLP"),
        ({"quantization_config": {"quant_method": "fp8"}}, "does not compute quantized weights"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "does not compute sliding-window attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "rope type 'llama3' needs 'low_freq_factor'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "of a part of each head"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, fields, message):
    with pytest.raises(EngineError, match=message):
        ModelConfig.load(written(tmp_path, **fields))


def test_what_a_configuration_leaves_out_has_transformers_default(tmp_path):
    llama = ModelConfig.load(written(tmp_path))
    assert (llama.kv_heads, llama.head_size, llama.rope, llama.qkv_bias, llama.out_bias) == (4, 8, Rope(theta=10000.0), False, False)
    qwen3 = ModelConfig.load(written(tmp_path, model_type="qwen3"))
    assert (qwen3.head_size, qwen3.qk_norm, qwen3.qkv_bias, qwen3.eos_ids) == (128, True, False, frozenset())


def test_stretched_waves_are_slowed_by_their_length():
    # of 16 original positions, waves longer than 16 are slowed by 8, shorter than 4 not at all; 2 pi / theta^(i/4) for i = 0..3
    rope = Rope(theta=256.0, stretch=Stretch(factor=8.0, low=1.0, high=4.0, original_tokens=16.0))
    # lengths 6.28, 25.1, 100.5, 402.1: the first is kept to the share (16 / 6.283 - 1) / 3 = .5155
    expected = [0.5155 + 0.4845 / 8, 0.25 / 8, 0.0625 / 8, 0.015625 / 8]
    assert rope.frequencies(8).tolist() == pytest.approx(expected, abs=1e-4)
