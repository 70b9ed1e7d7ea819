"""AdamW over the sharded parameters, and the one place where gradients become a change of weights."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.record import record, span

__all__ = ["apply_gradients", "make_optimizer"]


def make_optimizer(model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """AdamW over what the model trains, with its moments made at once: a checkpoint before the first update has the entries of any later one.

    One fused kernel for all parameters, which torch has for CPUs and for CUDA; where parameters are offloaded the update is the CPU's.
    Weight decay is of all parameters alike, norms and biases included.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True)
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def apply_gradients(
    optimizer: torch.optim.AdamW, *, loss: float, learning_rate: float, max_grad_norm: float, prefix: Literal["learner", "critic"] = "learner"
) -> bool:
    """Clip, check, update, clear. All ranks see the same loss and norm, so they decide alike.

    Args:
        learning_rate: of this update, with the schedule's factor and `Controllers.learning_rate_scale` in it.
        prefix: of the metric `grad_norm`: before clipping, recorded where the update is done.

    Returns:
        Whether the update was done; False where the loss or the gradient norm is not finite: no parameter has changed then.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = _global(nn.utils.clip_grad_norm_(parameters, max_grad_norm)).item()
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        record(f"{prefix}/grad_norm", norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        with span("optimizer"):
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return finite


def _global(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
