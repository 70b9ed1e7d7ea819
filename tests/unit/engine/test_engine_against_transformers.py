"""The engine's numbers are those of transformers' own Qwen2."""

import pytest
import torch
from engine_loop import finish, load_scheduler, submit
from tiny_qwen2 import write_tiny_qwen2

from agentrl.engine.weights import read_tensors

pytestmark = pytest.mark.slow

PROMPTS = [[5, 17, 80], [41], [3, 66, 29, 90, 12, 54, 7, 31], [9, 9, 10, 11]]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_a_full_forward_of_transformers_across_an_update(tmp_path, tied, temperature):
    old, new = (write_tiny_qwen2(tmp_path / str(seed), tied=tied, seed=seed) for seed in (0, 1))
    scheduler = load_scheduler(old, slots=4)
    sequences = [submit(scheduler, str(n), prompt, new=24, seed=n, temperature=temperature) for n, prompt in enumerate(PROMPTS)]
    for _ in range(10):
        scheduler.step()
    scheduler.commit(read_tensors(new), "1")
    turns = [submit(scheduler, "turn", [*PROMPTS[0], 8, 9], new=10, seed=9, temperature=temperature)]
    finish(scheduler)
    turns.append(submit(scheduler, "next", [*turns[0].tokens, 30, 31], new=10, seed=10, temperature=temperature))
    finish(scheduler)
    assert turns[1].cached_tokens == 14
    for sequence in sequences:
        expected = reference(old, sequence, temperature)[:11] + reference(new, sequence, temperature)[11:]
        assert sequence.logprobs == pytest.approx(expected, abs=1e-5)
    for sequence in turns:
        assert sequence.logprobs == pytest.approx(reference(new, sequence, temperature), abs=1e-5)


def reference(model_dir, sequence, temperature):
    """Log-probs of the output tokens by one forward of the Hugging Face model over prompt and output."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logprobs = (model(torch.tensor([sequence.tokens])).logits[0] / temperature).log_softmax(-1)
    first = len(sequence.request.input_ids)
    return [logprobs[first + index - 1, token].item() for index, token in enumerate(sequence.output)]
