"""The critic's loss, and how much of the returns it explains. B trajectories, T tokens."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["EXPLAINED_SUMS", "explained_sums", "explained_variance", "value_losses"]

# What `explained_sums` adds up, in order.
EXPLAINED_SUMS = ("tokens", "returns", "returns_squared", "errors", "errors_squared")
# A variance below this share of the mean square is the rounding error of a sum in float64 (1e-16 and a margin): the returns are all equal.
NO_VARIANCE = 1e-12


def value_losses(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, *, clip: float | None) -> tuple[Tensor, Tensor]:
    """max((v - R)^2, (v_clipped - R)^2) / 2 of each token, v_clipped within `clip` of the old value: PPO's clipped value loss.

    As in OpenAI's baselines (Schulman et al. 2017's code; Huang et al. 2022, detail 9), and in verl with `cliprange_value`.

    Args:
        values_BT: the critic's values now, with gradient.
        old_values_BT: its values at the start of the step.
        returns_BT: what they should be.
        clip: how far a value may move in a step before it is no longer pulled; None: the plain squared error.

    Returns:
        The losses [B, T], and where the clipped one was the larger [B, T], bool: there the gradient is 0.
    """
    plain_BT = (values_BT - returns_BT).square()
    if clip is None:
        return 0.5 * plain_BT, torch.zeros_like(plain_BT, dtype=torch.bool)
    near_BT = values_BT.clamp(old_values_BT - clip, old_values_BT + clip)
    clipped_BT = (near_BT - returns_BT).square()
    return 0.5 * torch.maximum(plain_BT, clipped_BT), clipped_BT > plain_BT


def explained_sums(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`EXPLAINED_SUMS` over the mask, [5] float64 without gradient: they add over micro-batches and ranks."""
    inside_BT = mask_BT.bool()
    returns_N = returns_BT.detach()[inside_BT].double()
    errors_N = returns_N - values_BT.detach()[inside_BT].double()
    tokens = inside_BT.sum().double()
    return torch.stack([tokens, returns_N.sum(), returns_N.square().sum(), errors_N.sum(), errors_N.square().sum()])


def explained_variance(sums: Tensor) -> float:
    """1 - variance(returns - values) / variance(returns), from the total of `explained_sums`.

    1: the values are the returns but for a constant; 0: no better than a constant; negative: worse. 0 where there is nothing to explain:
    returns that are all equal, or none.
    """
    tokens, returns, returns_squared, errors, errors_squared = sums.tolist()
    if tokens == 0:
        return 0.0
    spread = returns_squared - returns**2 / tokens
    if spread <= NO_VARIANCE * returns_squared:
        return 0.0
    return float(1.0 - (errors_squared - errors**2 / tokens) / spread)
