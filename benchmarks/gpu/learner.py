"""The learner's arithmetic on this device: sharded against plain, packed against padded, the log-prob function against the naive one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.learner.logprob import token_logprobs
from agentrl.learner.optimizer import apply_gradients, make_optimizer
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks
from gpu.shapes import Shape, verdict

__all__ = ["check"]

UPDATES = 3
LENGTHS = (200, 37, 120, 80)  # of the sequences in a batch, right-padded
SAME_LOSS = {"float32": 1e-5, "bfloat16": 1e-3}
NAIVE = {"float32": 1e-4, "bfloat16": 5e-2}  # log-probs and gradients relative to the largest; bf16 rounds the logits themselves


def check(shape: Shape, device: str) -> dict[str, Any]:
    """Losses of a few updates, in float32 and (mixed) bfloat16."""
    torch.set_float32_matmul_precision("highest")
    numbers: dict[str, Any] = {}
    bounds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        model_dir = shape.write(Path(directory))
        plain = _plain_losses(model_dir, shape, device)
        for dtype in ("float32", "bfloat16"):
            sharded = _sharded_losses(model_dir, shape, device, dtype, "sdpa")
            if dtype == "float32":
                numbers["fsdp_against_plain"], bounds["fsdp_against_plain"] = _apart(sharded, plain), SAME_LOSS[dtype]
            for attention in _packed_attentions(device, dtype):
                name = f"packed_{attention}_against_padded_{dtype}"
                packed = _sharded_losses(model_dir, shape, device, dtype, attention, packed=True)
                numbers[name], bounds[name] = _apart(packed[:1], sharded[:1]), SAME_LOSS[dtype]
            for what, apart in _against_naive(shape, device, dtype).items():
                numbers[f"{what}_against_naive_{dtype}"], bounds[f"{what}_against_naive_{dtype}"] = apart, NAIVE[dtype]
    return verdict(numbers | {"losses": plain}, bounds)


def _packed_attentions(device: str, dtype: str) -> tuple[str, ...]:
    """torch's own attention, and on a GPU in half precision those made for packed sequences that are there."""
    from transformers.utils import is_flash_attn_2_available

    half = device == "cuda" and dtype == "bfloat16"
    return ("sdpa", *(("varlen",) if half else ()), *(("flash_attention_2",) if half and is_flash_attn_2_available() else ()))


def _batch(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    """Token ids and which of them are trained on: all but the first of each sequence. [B, T] each"""
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(1, shape.vocabulary, (len(LENGTHS), max(LENGTHS)), generator=generator)
    inside_BT = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    wanted_BT = inside_BT & (torch.arange(max(LENGTHS)) > 0)
    return (ids_BT * inside_BT).to(device), wanted_BT.to(device)


def _sharded_losses(model_dir: Path, shape: Shape, device: str, dtype: str, attention: str, *, packed: bool = False) -> list[float]:
    """Mean negative log-prob before each of some updates, by the learner's own model under FSDP at one rank."""
    ranks = Ranks.single("cuda" if device == "cuda" else "cpu")
    policy = PolicyModel.load(model_dir, attention=attention, packed=packed)
    policy.shard(ranks, dtype)
    optimizer = make_optimizer(policy, learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    ids_BT, wanted_BT = _batch(shape, device)
    losses = []
    for _ in range(UPDATES):
        policy.sync_gradients(True)
        logp_BT, _entropy = policy(ids_BT, wanted_BT, torch.ones(len(ids_BT), device=device))
        loss = -logp_BT.sum() / wanted_BT.sum()
        loss.backward()
        apply_gradients(optimizer, loss=loss.item(), learning_rate=1e-3, max_grad_norm=1.0)
        losses.append(loss.item())
    return losses


def _plain_losses(model_dir: Path, shape: Shape, device: str) -> list[float]:
    """The same by transformers and torch alone, in float32, sequence by sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    ids_BT, wanted_BT = _batch(shape, device)
    losses = []
    for _ in range(UPDATES):
        total = torch.zeros((), device=device)
        for row, length in enumerate(LENGTHS):
            ids = ids_BT[row : row + 1, :length]
            logits = model(input_ids=ids, use_cache=False).logits.float()
            total = total - logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).sum()
        loss = total / wanted_BT.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def _against_naive(shape: Shape, device: str, dtype: str) -> dict[str, float]:
    """Values and gradients of `token_logprobs` against those of materialised float32 logits, relative to the largest."""
    tokens = 256
    generator = torch.Generator().manual_seed(2)
    hidden_NH = torch.randn(tokens, shape.hidden, generator=generator).to(device, getattr(torch, dtype))
    weight_VH = (torch.randn(shape.vocabulary, shape.hidden, generator=generator) / shape.hidden**0.5).to(device, getattr(torch, dtype))
    targets_N = torch.randint(shape.vocabulary, (tokens,), generator=generator).to(device)
    ones_N = torch.ones(tokens, device=device)

    def of(function: Any) -> tuple[Tensor, ...]:
        hidden, weight = hidden_NH.clone().requires_grad_(), weight_VH.clone().requires_grad_()
        logp_N, entropy_N = function(hidden, weight)
        (logp_N.sum() + 0.1 * entropy_N.sum()).backward()
        return logp_N.detach(), entropy_N.detach(), hidden.grad, weight.grad

    def naive(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logp_NV = (hidden.float() @ weight.float().T).log_softmax(-1)
        return logp_NV.gather(-1, targets_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)

    ours, theirs = of(lambda hidden, weight: token_logprobs(hidden, weight, targets_N, ones_N)), of(naive)
    names = ("logprobs", "entropies", "hidden_gradients", "weight_gradients")
    return {
        name: ((one.float() - other.float()).abs().max() / other.float().abs().max()).item()
        for name, one, other in zip(names, ours, theirs, strict=True)
    }


def _relative(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _apart(some: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(some, others, strict=True))
