"""Which tokens and trajectories are too far off-policy to be trained on. B trajectories, T tokens.

A statistic is named by what it is of (`token`, or a trajectory's `seq_sum`, `seq_mean`, `seq_max`) and by what it measures of
r = compared / behaviour (Schulman, "Approximating KL divergence", 2020):

    k1    the ratio itself: of a token r, of a sum the product of the r, of a mean their geometric mean
    k2    (log r)^2 / 2
    k3    r - 1 - log r

There is no seq_max_k1: the largest ratio alone would say nothing of the small ones.
"""

from __future__ import annotations

import math

from torch import Tensor

from agentrl.algorithm.importance import MAX_LOG_RATIO

__all__ = ["STATISTICS", "kept"]

STATISTICS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)


def kept(compared_BT: Tensor, behaviour_BT: Tensor, mask_BT: Tensor, *, statistic: str, low: float | None, high: float | None) -> Tensor:
    """Where the statistic is within [low, high]: what a train mask is multiplied with.

    `seq_mean_k1` is rejection by the geometric mean of the ratios, `seq_sum_k1` by the ratio of the whole trajectory. Statistics as
    documented by verl 0.9.1 (`rollout_rs`), except that bounds of k1 are bounds of compared / behaviour: verl's are of its reciprocal.

    Args:
        compared_BT: log-probs of the policy that is trained.
        behaviour_BT: log-probs of the policy that sampled.
        mask_BT: the generated tokens, 0/1 or bool. Values elsewhere are never looked at; a trajectory's statistic is that of all its
            generated tokens.
        statistic: one of `STATISTICS`.
        low: smallest value that is kept; None: no bound. Of k2 and k3, which are never negative, it is None in any sensible use.
        high: largest value that is kept; None: no bound.

    Returns:
        [B, T] bool, False outside the mask. A statistic that is not a number is kept: the update that would use it must be seen to fail.

    Raises:
        ValueError: an unknown statistic.
    """
    if statistic not in STATISTICS:
        raise ValueError(f"unknown rejection statistic {statistic!r}: expected one of {', '.join(STATISTICS)}")
    over, _, kind = statistic.rpartition("_")
    inside_BT = mask_BT.bool()
    values_BT = _of_tokens((compared_BT - behaviour_BT).detach(), kind).masked_fill(~inside_BT, 0.0)
    values = values_BT if over == "token" else _of_rows(values_BT, inside_BT, over)
    low, high = (_log(low), _log(high)) if kind == "k1" else (low, high)
    keep_BT = inside_BT
    if low is not None:
        keep_BT = keep_BT & ~(values < low)
    if high is not None:
        keep_BT = keep_BT & ~(values > high)
    return keep_BT


def _of_tokens(log_ratio_BT: Tensor, kind: str) -> Tensor:
    """k1 stays a logarithm, so that a trajectory's product can neither overflow nor vanish."""
    log_ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return log_ratio_BT
    if kind == "k2":
        return 0.5 * log_ratio_BT.square()
    return log_ratio_BT.exp() - 1 - log_ratio_BT


def _of_rows(values_BT: Tensor, inside_BT: Tensor, over: str) -> Tensor:
    """[B, 1]. Values outside the mask are 0, which no maximum of k2 or k3 is below."""
    if over == "seq_max":
        return values_BT.amax(-1, keepdim=True)
    sums = values_BT.sum(-1, keepdim=True)
    return sums if over == "seq_sum" else sums / inside_BT.sum(-1, keepdim=True).clamp(min=1)


def _log(bound: float | None) -> float | None:
    """The logarithm of a bound of the ratio; no ratio is below 0."""
    if bound is None:
        return None
    return math.log(bound) if bound > 0 else -math.inf
