"""Weights on their way from a learner into an engine on the same device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from agentrl.collective import flatten_bucket, split_bucket, tensor_checksum
from agentrl.engine.scheduler import Scheduler
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks
from gpu.engine import load_runner, run_all, sequence_of
from gpu.shapes import Shape, verdict

__all__ = ["check"]

SAME_LOGPROB = 1e-4
BUCKET_BYTES = 64 * 2**20


def check(shape: Shape, device: str) -> dict[str, Any]:
    """The engine begins with other weights; after the hand-over its checksums and its log-probs are the learner's."""
    torch.set_float32_matmul_precision("highest")
    ranks = Ranks.single("cuda" if device == "cuda" else "cpu")
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = shape.write(Path(directory) / "learner", seed=1), shape.write(Path(directory) / "engine", seed=2)
        policy = PolicyModel.load(ours)
        policy.shard(ranks, "float32")
        runner = load_runner(theirs, device=device, dtype="float32", slots=4, context=256)
        scheduler = Scheduler(runner, None, version="0")
        sent: dict[str, str] = {}
        nbytes = 0
        for bucket in _buckets(policy):
            sent |= {name: tensor_checksum(tensor) for name, tensor in bucket}
            flat = flatten_bucket(tensor for _, tensor in bucket)
            nbytes += flat.numel()
            names, dtypes, shapes = zip(*((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket), strict=True)
            received = split_bucket(flat, names, dtypes, shapes)
            scheduler.commit(runner.weights.checked(received, complete=False), "1")
        held = runner.weights.checksums()
        differing = sum(held[name] != checksum for name, checksum in sent.items()) + len(held.keys() - sent.keys())
        gap = _gap(policy, scheduler, shape, device)
    return verdict({"tensors_that_differ": differing, "logprobs": gap, "bytes": nbytes}, {"tensors_that_differ": 0.0, "logprobs": SAME_LOGPROB})


def _buckets(policy: PolicyModel) -> list[list[tuple[str, torch.Tensor]]]:
    buckets: list[list[tuple[str, torch.Tensor]]] = [[]]
    for name, tensor in policy.full_weights():
        if buckets[-1] and sum(one.numel() * one.element_size() for _, one in buckets[-1]) >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append((name, tensor))
    return buckets


@torch.no_grad()
def _gap(policy: PolicyModel, scheduler: Scheduler, shape: Shape, device: str) -> float:
    """Of sampled tokens, between the engine and the learner."""
    sequences = [sequence_of(f"after-{index}", list(range(1 + index, 30 + index)), tokens=24) for index in range(4)]
    run_all(scheduler, sequences)
    largest = 0.0
    for sequence in sequences:
        ids = torch.tensor([sequence.tokens], device=device) % shape.vocabulary
        wanted = torch.zeros_like(ids, dtype=torch.bool)
        wanted[0, len(sequence.request.input_ids) :] = True
        logp, _ = policy(ids, wanted, torch.tensor([sequence.request.params.temperature], device=device))
        largest = max(largest, (logp[wanted].cpu() - torch.tensor(sequence.logprobs)).abs().max().item())
    return largest
