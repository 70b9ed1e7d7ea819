"""The shapes decode steps come in, and a step that leaves no trace."""

import pytest
import torch
from engine_loop import load_runner
from tiny_qwen2 import write_tiny_qwen2

from agentrl.engine.decoder import Decoder, bucket
from agentrl.engine.lanes import Lanes
from agentrl.engine.runner import Chunk


def test_buckets_by_hand():
    assert sorted({bucket(value, 2) for value in range(1, 129)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert sorted({bucket(value, 4) for value in range(128, 513)}) == [128, 160, 192, 224, 256, 320, 384, 448, 512]


@pytest.mark.parametrize("per_octave", [2, 4])
def test_a_bucket_holds_its_value_and_little_more(per_octave):
    for value in range(1, 5000):
        held = bucket(value, per_octave)
        assert value <= held <= value * (1 + 1 / per_octave) + 1
        assert bucket(held, per_octave) == held


def test_a_rehearsed_step_changes_nothing_that_a_running_sequence_sees(tmp_path):
    # how a graph is captured on a GPU: a step is rehearsed first, whose tokens must go nowhere
    runner = load_runner(write_tiny_qwen2(tmp_path))
    lanes = Lanes(runner.slots, runner.idle_position, runner.device)
    lanes.tokens[1], lanes.positions[1], lanes._steps[1] = 7, 3, 1
    runner.prefill([Chunk(slot=1, tokens=[5, 6, 9])])
    decoder = Decoder(runner, lanes, fixed=False)
    with lanes.untouched():
        decoder._compute(4, 16, torch.zeros(4, dtype=torch.float64))
    assert (lanes.tokens[1].item(), lanes.positions[1].item()) == (7, 3)
    tokens, _ = decoder.step(2, 4)
    assert (lanes.tokens[1].item(), lanes.positions[1].item()) == (tokens[1], 4)
    whole = load_runner(tmp_path)
    expected = whole.logits(whole.prefill([Chunk(slot=0, tokens=[5, 6, 9, 7, 8])]))
    decoded = runner.decode(torch.tensor([0, 8]), torch.tensor([runner.idle_position, 4]), attend=16)
    assert torch.allclose(decoded[1], expected[0], atol=2e-5, rtol=0)
