"""Estimates of the divergence of two policies from tokens that one of them sampled (Schulman, "Approximating KL divergence", 2020).

What estimates the value well need not estimate the gradient well. Of tokens sampled by the policy itself, the gradient of the divergence is
that of k2; the gradient of k1 is 0 on average, and that of k3 belongs to the divergence the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

__all__ = ["ESTIMATES", "absolute", "k1", "k2", "k3", "k3_straight_through", "kl_estimate"]

# verl's bounds: of the log-ratio before it is exponentiated, and of the estimate.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl_estimate(name: str, logp_BT: Tensor, other_BT: Tensor) -> Tensor:
    """KL(policy || other) of each token that the policy sampled, with the gradient of the named estimate.

    Args:
        name: one of `ESTIMATES`. In a reward any will do, `k1` is unbiased and adds up to the log-ratio of the trajectory. In a loss take
            `k3_straight_through` or `k2`, whose gradient is the divergence's; `k3` is what GRPO has (Shao et al. 2024, eq. 4).
        logp_BT: log-probs of the policy (any shape).
        other_BT: log-probs of the reference, of the same shape.

    Raises:
        ValueError: an unknown name.
    """
    if name not in ESTIMATES:
        raise ValueError(f"unknown KL estimate {name!r}: expected one of {', '.join(ESTIMATES)}")
    return ESTIMATES[name](logp_BT, other_BT)


def k1(sampled_BT: Tensor, other_BT: Tensor) -> Tensor:
    """log sampled - log other: unbiased for KL(sampled || other), may be negative."""
    return sampled_BT - other_BT


def absolute(sampled_BT: Tensor, other_BT: Tensor) -> Tensor:
    """|log sampled - log other|: how far apart, either way. No estimate of KL, but never negative and never large by one token."""
    return (sampled_BT - other_BT).abs()


def k2(sampled_BT: Tensor, other_BT: Tensor) -> Tensor:
    """(log sampled - log other)^2 / 2: biased, of low variance; its gradient is an unbiased estimate of the gradient of KL."""
    return 0.5 * (sampled_BT - other_BT).square()


def k3(sampled_BT: Tensor, other_BT: Tensor) -> Tensor:
    """r - 1 - log r with r = other / sampled: unbiased, never negative, of low variance."""
    log_ratio_BT = (other_BT - sampled_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio_BT.exp() - 1 - log_ratio_BT).clamp(-MAX_K3, MAX_K3)


def k3_straight_through(sampled_BT: Tensor, other_BT: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2: each where it is right. verl documents it as `k3+`."""
    gradient_BT = k2(sampled_BT, other_BT)
    return k3(sampled_BT, other_BT).detach() + (gradient_BT - gradient_BT.detach())


ESTIMATES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"k1": k1, "abs": absolute, "k2": k2, "k3": k3, "k3_straight_through": k3_straight_through}
)
