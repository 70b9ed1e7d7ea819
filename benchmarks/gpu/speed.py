"""How fast learner and engine are with a model of a real size and random weights, against what the device could do."""

from __future__ import annotations

import gc
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from agentrl.engine.scheduler import Scheduler
from agentrl.learner.flops import peak_flops
from agentrl.learner.optimizer import apply_gradients, make_optimizer
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks
from gpu.engine import load_runner, run_all, sequence_of
from gpu.shapes import Shape

__all__ = ["measure"]

STEPS, WARM_UP = 5, 2
SEQUENCES, LENGTH = 8, 2048  # of a learner's step; a toy has fewer
READ_SHARE = 4  # every so many tokens one is trained on: what a search trajectory has
BATCHES = (1, 16, 64, 256)  # decoded at a time
PROMPT, NEW_TOKENS = 512, 256
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


def measure(shape: Shape, device: str) -> dict[str, Any]:
    """Nothing is passed or failed here but by running."""
    numbers: dict[str, Any] = {"shape": shape.name, "weights": shape.weights}
    with tempfile.TemporaryDirectory() as directory:
        model_dir = shape.write(Path(directory))
        numbers |= _decoding(model_dir, shape, device)
        _let_go(device)
        numbers |= _learning(model_dir, shape, device)
    return {"verdict": "passed", **numbers}


def _learning(model_dir: Path, shape: Shape, device: str) -> dict[str, Any]:
    """Updates in bfloat16 with float32 weights and moments, activations computed again in the backward pass."""
    sequences, length = (SEQUENCES, LENGTH) if device == "cuda" else (2, 128)
    ranks = Ranks.single("cuda" if device == "cuda" else "cpu")
    attention = "varlen" if device == "cuda" else "sdpa"
    policy = PolicyModel.load(model_dir, attention=attention, packed=device == "cuda", gradient_checkpointing=True)
    policy.shard(ranks, "bfloat16")
    optimizer = make_optimizer(policy, learning_rate=1e-5, betas=(0.9, 0.99), weight_decay=0.0)
    ids_BT = torch.randint(1, shape.vocabulary, (sequences, length), device=device)
    wanted_BT = (torch.arange(length, device=device) % READ_SHARE == READ_SHARE - 1).expand(sequences, length).clone()
    ones_B = torch.ones(sequences, device=device)

    def update() -> float:
        started = time.monotonic()
        policy.sync_gradients(True)
        logp_BT, _ = policy(ids_BT, wanted_BT, ones_B)
        loss = -logp_BT.sum() / wanted_BT.sum()
        loss.backward()
        apply_gradients(optimizer, loss=loss.item(), learning_rate=1e-5, max_grad_norm=1.0)
        _settle(device)
        return time.monotonic() - started

    times = [update() for _ in range(WARM_UP + STEPS)][WARM_UP:]
    seconds, tokens = statistics.median(times), sequences * (length - 1)
    flops = policy.shape.flops(tokens=tokens, read=int(wanted_BT.sum()), pairs=sequences * (length - 1) ** 2, backward=True)
    peak = peak_flops(torch.cuda.get_device_name(0), "bfloat16") if device == "cuda" else None
    return {
        "learner_attention": attention,
        "learner_tokens_per_s": tokens / seconds,
        "learner_tflops": flops / seconds / 1e12,
        "learner_mfu": None if peak is None else flops / seconds / peak,
        "learner_peak_gib": _peak_gib(device),
    }


def _decoding(model_dir: Path, shape: Shape, device: str) -> dict[str, Any]:
    """Tokens per second by batch size, against reading all weights and the cached keys and values once a step."""
    prompt, new = (PROMPT, NEW_TOKENS) if device == "cuda" else (16, 16)
    bandwidth = _bandwidth(device)
    told: dict[str, Any] = {"bandwidth_gb_per_s": bandwidth / 1e9, "decoding": {}}
    width = torch.finfo(torch.bfloat16).bits // 8
    for rows in BATCHES if device == "cuda" else BATCHES[:2]:
        runner = load_runner(model_dir, device=device, dtype="bfloat16", slots=rows, context=prompt + new + 16)
        scheduler = Scheduler(runner, None, version="0")
        rates = []
        for repeat in range(3):  # the first captures graphs
            sequences = [sequence_of(f"{repeat}-{row}", _ids(shape, prompt, row + repeat), tokens=new) for row in range(rows)]
            for sequence in sequences:
                scheduler.submit(sequence)
            scheduler.step()
            _settle(device)
            started, before = time.monotonic(), scheduler.counters.generated_tokens
            run_all(scheduler, [])
            _settle(device)
            rates.append((scheduler.counters.generated_tokens - before) / (time.monotonic() - started))
        keys = 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads) * (prompt + new / 2) * width
        limit = rows / ((shape.weights * width + rows * keys) / bandwidth)
        told["decoding"][str(rows)] = {"tokens_per_s": rates[-1], "bandwidth_limit": limit, "share": rates[-1] / limit}
        del scheduler, runner
        _let_go(device)
    best = max(told["decoding"].values(), key=lambda one: one["share"])
    return told | {"decode_share_of_limit": best["share"], "decode_peak_gib": _peak_gib(device)}


def _bandwidth(device: str) -> float:
    """Bytes per second that a copy within the device's memory reads and writes."""
    source = torch.empty(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        started = time.monotonic()
        target.copy_(source)
        _settle(device)
        times.append(time.monotonic() - started)
    return 2 * source.numel() / statistics.median(times)


def _ids(shape: Shape, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(1, shape.vocabulary, (length,), generator=generator).tolist()
    return ids


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _let_go(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak_gib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
