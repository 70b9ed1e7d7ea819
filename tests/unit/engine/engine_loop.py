"""A scheduler driven by hand, and the plain loop its results are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agentrl.engine.architecture import ModelConfig
from agentrl.engine.request import GenerateRequest, SamplingParams
from agentrl.engine.runner import Chunk, ModelRunner
from agentrl.engine.sampling import sample
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sequence import Sequence
from agentrl.engine.stops import TokenText
from agentrl.engine.weights import Weights
from agentrl.seeds import counter_uniform


def load_runner(model_dir: Path, *, slots: int = 6, context_tokens: int = 64) -> ModelRunner:
    """A runner of its own weights: tests change them."""
    return ModelRunner(Weights.load(model_dir, ModelConfig.load(model_dir)), slots=slots, context_tokens=context_tokens)


def load_scheduler(model_dir: Path, *, slots: int = 6, context_tokens: int = 64, deterministic: bool = False) -> Scheduler:
    """A scheduler at version "0"."""
    runner = load_runner(model_dir, slots=slots, context_tokens=context_tokens)
    return Scheduler(runner, TokenText.load(model_dir, runner.config.vocabulary), version="0", deterministic=deterministic)


def submit(
    scheduler: Scheduler, rid: str, input_ids: list[int], *, new: int = 8, extra_key: str = "", logprob_start: int = -1, **params: Any
) -> Sequence:
    """Queue a request; the sequence shows how it goes."""
    sampling = SamplingParams(max_new_tokens=new, **params)
    request = GenerateRequest(rid=rid, input_ids=input_ids, params=sampling, return_logprob=True, extra_key=extra_key, logprob_start=logprob_start)
    sequence = Sequence.of(request, scheduler._text)
    scheduler.submit(sequence)
    return sequence


def finish(scheduler: Scheduler) -> None:
    """Step until nothing is left to do."""
    while scheduler.busy:
        scheduler.step()


def plain_completion(
    runner: ModelRunner, input_ids: list[int], *, new: int, seed: int, temperature: float = 1.0, position: int = 0
) -> tuple[list[int], list[float]]:
    """Tokens and log-probs by a plain loop that computes the whole prefix for every token."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for draw in range(position, position + new):
        logits = runner.logits(runner.prefill([Chunk(slot=0, tokens=input_ids + tokens)]))
        uniform = torch.tensor([counter_uniform(seed, draw)], dtype=torch.float64)
        token, logprob = sample(logits, torch.tensor([temperature]), uniform)
        tokens += token.tolist()
        logprobs += logprob.tolist()
    return tokens, logprobs


def rescored(runner: ModelRunner, sequence: Sequence) -> list[float]:
    """The log-prob of every output token given everything before it, in one forward under the runner's weights."""
    hidden = runner.prefill([Chunk(slot=0, tokens=sequence.tokens)], every_token=True)
    temperature = sequence.request.params.temperature or 1.0
    logprobs = (runner.logits(hidden) / temperature).log_softmax(-1)
    first = len(sequence.request.input_ids)
    return [logprobs[first + index - 1, token].item() for index, token in enumerate(sequence.output)]
