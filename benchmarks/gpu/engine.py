"""The embedded engine on this device against transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from agentrl.engine.architecture import ModelConfig
from agentrl.engine.request import GenerateRequest, SamplingParams
from agentrl.engine.runner import ModelRunner
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sequence import Sequence
from agentrl.engine.weights import Weights
from gpu.shapes import Shape, verdict

__all__ = ["check", "load_runner", "run_all", "sequence_of"]

PROMPTS = (64, 17, 40, 5, 64, 33, 21, 50)  # tokens
NEW_TOKENS = 48
CONTEXT = 256
TEMPERATURE = 0.7
SAME_LOGPROB = {"float32": 1e-4, "bfloat16": 0.15}  # nats, largest; in bfloat16 each side rounds in its own order


def check(shape: Shape, device: str) -> dict[str, Any]:
    """Log-probs of sampled tokens, in float32 and bfloat16; and that a second turn computes its new tokens only."""
    torch.set_float32_matmul_precision("highest")
    numbers: dict[str, Any] = {}
    bounds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        model_dir = shape.write(Path(directory))
        for dtype in ("float32", "bfloat16"):
            runner = load_runner(model_dir, device=device, dtype=dtype, slots=len(PROMPTS), context=CONTEXT)
            sequences, again = _play(runner, shape)
            name = f"logprobs_{dtype}"
            numbers[name], bounds[name] = _largest_gap(model_dir, sequences, device, dtype), SAME_LOGPROB[dtype]
            numbers[f"second_turn_computed_{dtype}"], bounds[f"second_turn_computed_{dtype}"] = again, float(2 * len(PROMPTS))
            del runner
    return verdict(numbers, bounds)


def load_runner(model_dir: Path, *, device: str, dtype: str, slots: int, context: int) -> ModelRunner:
    """A model in the embedded engine."""
    weights = Weights.load(model_dir, ModelConfig.load(model_dir), dtype=getattr(torch, dtype), device=device)
    return ModelRunner(weights, slots=slots, context_tokens=context)


def sequence_of(name: str, prompt: list[int], *, tokens: int, temperature: float = TEMPERATURE) -> Sequence:
    """A request for so many tokens, with log-probs."""
    params = SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=len(name))
    return Sequence.of(GenerateRequest(rid=name, input_ids=prompt, params=params, return_logprob=True, extra_key="\0"), None)


def run_all(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    """To the end of all of them."""
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()


def _play(runner: ModelRunner, shape: Shape) -> tuple[list[Sequence], int]:
    """A first turn of every prompt; then a second one: how many tokens of it the engine had to compute before it could go on."""
    generator = torch.Generator().manual_seed(3)
    scheduler = Scheduler(runner, None, version="0")
    prompts = [torch.randint(1, shape.vocabulary, (length,), generator=generator).tolist() for length in PROMPTS]
    first = [sequence_of(f"first-{index}", prompt, tokens=NEW_TOKENS) for index, prompt in enumerate(prompts)]
    run_all(scheduler, first)
    before = scheduler.counters.prefill_tokens
    run_all(scheduler, [sequence_of(f"second-{index}", [*one.tokens, 7], tokens=4) for index, one in enumerate(first)])
    return first, scheduler.counters.prefill_tokens - before


@torch.no_grad()
def _largest_gap(model_dir: Path, sequences: list[Sequence], device: str, dtype: str) -> float:
    """Between the engine's log-probs and those of a transformers forward over the whole sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).to(device).eval()
    largest = 0.0
    for sequence in sequences:
        ids = torch.tensor([sequence.tokens], device=device)
        start = len(sequence.request.input_ids)
        logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].float() / TEMPERATURE
        theirs = logits.log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0].cpu()
        largest = max(largest, (theirs - torch.tensor(sequence.logprobs)).abs().max().item())
    return largest
