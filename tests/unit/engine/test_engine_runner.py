"""The two forwards agree with each other however the work is cut."""

import pytest
import torch
from engine_loop import load_runner
from tiny_qwen2 import write_tiny_qwen2

from agentrl.engine.architecture import ModelConfig
from agentrl.engine.runner import Chunk, ModelRunner
from agentrl.engine.weights import Weights
from agentrl.errors import EngineError

IDS = [5, 17, 80, 41, 3, 66, 29, 90, 12, 54, 7, 31]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_dir(request, tmp_path_factory):
    return write_tiny_qwen2(tmp_path_factory.mktemp("model"), tied=request.param)


@pytest.fixture
def whole(model_dir):
    """Logits of every position of IDS, by one forward."""
    runner = load_runner(model_dir)
    return runner.logits(runner.prefill([Chunk(slot=0, tokens=IDS)], every_token=True))


def test_a_prompt_cut_into_chunks_gives_the_logits_of_the_whole(model_dir, whole):
    runner = load_runner(model_dir)
    parts = [runner.prefill([Chunk(slot=3, tokens=IDS[start:end], start=start)], every_token=True) for start, end in ((0, 5), (5, 6), (6, 12))]
    assert torch.allclose(runner.logits(torch.cat(parts)), whole, atol=2e-5, rtol=0)


def test_chunks_of_different_lengths_and_starts_share_a_forward(model_dir, whole):
    runner = load_runner(model_dir)
    runner.prefill([Chunk(slot=4, tokens=IDS[:7]), Chunk(slot=1, tokens=IDS[:2])])
    hidden = runner.prefill([Chunk(slot=1, tokens=IDS[2:9], start=2), Chunk(slot=4, tokens=IDS[7:8], start=7), Chunk(slot=0, tokens=IDS[:3])])
    assert torch.allclose(runner.logits(hidden), whole[[8, 7, 2]], atol=2e-5, rtol=0)


@pytest.mark.parametrize("fused", [False, True], ids=["products", "fused"])
def test_decoding_gives_the_logits_of_the_whole_beside_idle_rows(model_dir, whole, fused):
    runner = load_runner(model_dir)
    runner._fused = fused  # what GPUs and bfloat16 take
    runner.prefill([Chunk(slot=2, tokens=IDS[:4])])
    for position in range(4, len(IDS)):
        tokens, positions = torch.zeros(5, dtype=torch.long), torch.full((5,), runner.idle_position)
        tokens[2], positions[2] = IDS[position], position
        logits = runner.decode(tokens, positions, attend=16)
        assert torch.allclose(logits[2], whole[position], atol=2e-5, rtol=0)


def test_bfloat16_decodes_to_two_digits_of_float32(model_dir, whole):
    # measured 1.4 % of the logits' size; transformers' own bfloat16 is at 1.9 %
    runner = ModelRunner(Weights.load(model_dir, ModelConfig.load(model_dir), dtype=torch.bfloat16), slots=6, context_tokens=64)
    runner.prefill([Chunk(slot=1, tokens=IDS[:4])])
    steps = [
        runner.decode(torch.tensor([0, IDS[position]]), torch.tensor([runner.idle_position, position]), attend=16)[1]
        for position in range(4, len(IDS))
    ]
    assert steps[0].dtype == torch.float32
    assert (torch.stack(steps) - whole[4:]).abs().mean() < 0.03 * whole[4:].abs().mean()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(model_dir):
    with pytest.raises(EngineError, match=r"device is 'cuda', but torch .* sees no GPU here"):
        Weights(ModelConfig.load(model_dir), device="cuda")


def test_swapped_slots_go_on_where_they_were(model_dir, whole):
    runner = load_runner(model_dir)
    runner.prefill([Chunk(slot=5, tokens=IDS[:8]), Chunk(slot=0, tokens=IDS[:3])])
    runner.swap(5, 0, tokens=8)
    hidden = runner.prefill([Chunk(slot=0, tokens=IDS[8:10], start=8), Chunk(slot=5, tokens=IDS[3:5], start=3)])
    assert torch.allclose(runner.logits(hidden), whole[[9, 4]], atol=2e-5, rtol=0)


def test_a_named_parameter_is_what_is_computed_with(model_dir, whole):
    runner = load_runner(model_dir)
    name = "model.layers.1.self_attn.k_proj.bias"
    changed = runner.weights.named[name] + torch.arange(16.0)
    runner.weights.replace({name: changed})
    moved = runner.logits(runner.prefill([Chunk(slot=0, tokens=IDS)], every_token=True))
    assert (moved - whole).abs().max() > 0.01
    assert torch.equal(runner.weights.named[name], changed)


def test_parameters_that_do_not_fit_are_named(model_dir):
    weights = Weights(ModelConfig.load(model_dir))
    with pytest.raises(EngineError, match=r"'model.norm.weight' must have shape \[32\], got \[31\]"):
        weights.checked({"model.norm.weight": torch.zeros(31)}, complete=False)
    with pytest.raises(EngineError, match=r"'model.nom.weight' is not one of this model's"):
        weights.checked({"model.nom.weight": torch.zeros(32)}, complete=False)
    with pytest.raises(EngineError, match="missing"):
        weights.checked({"model.norm.weight": torch.zeros(32)}, complete=True)


def test_a_tied_head_is_accepted_and_not_stored(tmp_path):
    weights = Weights(ModelConfig.load(write_tiny_qwen2(tmp_path / "tied", tied=True)))
    assert weights.checked({"lm_head.weight": torch.zeros(96, 32)}, complete=False) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('"model_type": "qwen2"|"model_type": "mistral"', "runs qwen2, qwen3, llama models, this is .mistral."),
        ('"hidden_act": "silu"|"hidden_act": "gelu"', "activation 'gelu'"),
        ('"rope_theta": 10000.0|"rope_scaling": {"rope_type": "yarn"}', "rope type 'yarn'"),
        ('"rms_norm_eps"|"use_sliding_window": true, "rms_norm_eps"', "sliding-window"),
    ],
)
def test_a_model_with_features_that_are_not_computed_is_refused(tmp_path, change, message):
    directory = write_tiny_qwen2(tmp_path / "model")
    old, new = change.split("|")
    config = directory / "config.json"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(EngineError, match=message):
        ModelConfig.load(directory)


def test_rope_parameters_of_newer_configurations_are_read(tmp_path):
    directory = write_tiny_qwen2(tmp_path / "model")
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}'))
    assert ModelConfig.load(directory).rope.theta == 500000.0
