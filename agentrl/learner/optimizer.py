"""AdamW over the sharded parameters, and the one place where gradients become a change of weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.config.recipe import LearnerRecipe
from agentrl.record import record

__all__ = ["apply_gradients", "make_optimizer"]


def make_optimizer(policy: nn.Module, recipe: LearnerRecipe) -> torch.optim.AdamW:
    """AdamW with its moments made at once, so that a checkpoint before the first update has the same entries as any later one.

    Weight decay is of all parameters alike, norms and biases included.
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True)
    for parameter in policy.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def apply_gradients(optimizer: torch.optim.AdamW, *, loss: float, learning_rate: float, max_grad_norm: float) -> bool:
    """Clip, check, update, clear. All ranks see the same loss and norm, so they decide alike.

    Returns:
        Whether the update was done; False where the loss or the gradient norm is not finite: no parameter has changed then.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = _global(nn.utils.clip_grad_norm_(parameters, max_grad_norm)).item()
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        record("learner/grad_norm", norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return finite


def _global(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
