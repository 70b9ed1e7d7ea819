"""Estimates of KL(behaviour || learner) from tokens the behaviour policy sampled (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from torch import Tensor

__all__ = ["k1", "k3"]

# verl's bounds: of the log-ratio before it is exponentiated, and of the estimate.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def k1(sampled_BT: Tensor, other_BT: Tensor) -> Tensor:
    """log sampled - log other: unbiased for KL(sampled || other), may be negative."""
    return sampled_BT - other_BT


def k3(sampled_BT: Tensor, other_BT: Tensor) -> Tensor:
    """r - 1 - log r with r = other / sampled: unbiased, never negative, of low variance."""
    log_ratio_BT = (other_BT - sampled_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio_BT.exp() - 1 - log_ratio_BT).clamp(-MAX_K3, MAX_K3)
