"""Importance weights between two policies, and how many samples they leave. B trajectories, T tokens.

All but `effective_sample_share` and `batch_normaliser` look at one row at a time, so they give the same numbers in any micro-batch.
What needs the whole batch takes sums, which are added over micro-batches and ranks first.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "MAX_LOG_RATIO",
    "batch_normaliser",
    "effective_sample_share",
    "importance_weights",
    "interpolated_proximal",
    "weight_sums",
]

# exp(20) = 5e8: beyond it a ratio says nothing but that something is wrong, and sums in float32 would overflow.
MAX_LOG_RATIO = 20.0
# Below it a mean weight divides nothing: all weights are cut to 0, and there is no scale to restore. verl has the same bound.
MIN_MEAN_WEIGHT = 1e-8


def importance_weights(
    compared_BT: Tensor,
    behaviour_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: Literal["token", "sequence"],
    truncate: float | None,
    bounds: tuple[float, float] | None,
) -> tuple[Tensor, Tensor]:
    """compared / behaviour, without gradient, made harmless.

    `truncate` is truncated importance sampling (Ionides 2008): min(weight, truncate). `bounds` is IcePop (Ling team 2025): a weight outside
    [low, high] is 0. With neither, the weights stay as they are. Formulas as documented by verl 0.9.1 (`rollout_is`).

    Args:
        compared_BT: log-probs of the policy that is trained: the proximal one, or the current one where a loss has no ratio of its own.
        behaviour_BT: log-probs of the policy that sampled.
        mask_BT: the generated tokens, 0/1 or bool. Values elsewhere are never looked at. For `sequence` give the loss mask: the ratio of a
            trajectory is that of all its tokens, also of those that are not trained on.
        level: `token`: each token's own ratio; low variance, biased. `sequence`: the product over the row, on each of its tokens; unbiased,
            of a variance that grows with the length.
        truncate: the largest weight.
        bounds: smallest and largest weight that is kept.

    Returns:
        The weights [B, T], 0 outside the mask; and where truncation or bounds changed them [B, T], bool.

    Raises:
        ValueError: both `truncate` and `bounds`.
    """
    if truncate is not None and bounds is not None:
        raise ValueError("importance weights are truncated, or zero outside of bounds, not both")
    inside_BT = mask_BT.bool()
    log_ratio_BT = (compared_BT.detach() - behaviour_BT.detach()).masked_fill(~inside_BT, 0.0)
    if level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
    weights_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().masked_fill(~inside_BT, 0.0)
    if bounds is not None:
        cut_BT = ((weights_BT < bounds[0]) | (weights_BT > bounds[1])) & inside_BT
        return weights_BT.masked_fill(cut_BT, 0.0), cut_BT
    if truncate is not None:
        return weights_BT.clamp(max=truncate), weights_BT > truncate
    return weights_BT, torch.zeros_like(inside_BT)


def weight_sums(weights_BT: Tensor, mask_BT: Tensor, *, level: Literal["token", "sequence"]) -> Tensor:
    """Sum and count of the weights, [2] float64: of the tokens, or with `sequence` of the rows that have a token (each has one weight).

    They add over micro-batches and ranks; `batch_normaliser` takes the total.
    """
    weights_BT, inside_BT = weights_BT.double(), mask_BT.bool()
    weights_BT = weights_BT.masked_fill(~inside_BT, 0.0)
    if level == "token":
        return torch.stack([weights_BT.sum(), inside_BT.sum().double()])
    tokens_B = inside_BT.sum(-1)
    return torch.stack([(weights_BT.sum(-1) / tokens_B.clamp(min=1)).sum(), (tokens_B > 0).sum().double()])


def batch_normaliser(weight_sum: Tensor, count: Tensor) -> Tensor:
    """What weights are divided by to have mean 1 over the batch: their mean (self-normalised importance sampling), 0-d.

    1 where there are no weights, or where all were cut to 0.
    """
    mean = weight_sum / count.clamp(min=1)
    return torch.where(mean > MIN_MEAN_WEIGHT, mean, torch.ones_like(mean))


def interpolated_proximal(logp_BT: Tensor, behaviour_BT: Tensor, ages_BT: Tensor) -> Tensor:
    """The proximal policy's log-probs without a forward pass, and without gradient: on the line between behaviour and current.

    log proximal = log behaviour + a (log current - log behaviour) with a = age / (age + 1): after `age` of the age + 1 updates that lie
    between the policy that sampled and the one that this update makes. AReaL's documented `loglinear` method: a = (v_proximal - v_behaviour)
    / (v_current - v_behaviour) with v_current = v_proximal + 1.

    Args:
        logp_BT: the learner's log-probs now.
        ages_BT: staleness of each token in steps; what is below 0 (tokens that were not generated) counts as 0.

    Returns:
        Log-probs [B, T]: the behaviour policy's for fresh tokens, almost the current ones for old tokens.
    """
    ages_BT = ages_BT.clamp(min=0).to(logp_BT.dtype)
    return behaviour_BT + ages_BT / (ages_BT + 1) * (logp_BT.detach() - behaviour_BT)


def effective_sample_share(weight_sum: Tensor, weight_square_sum: Tensor, tokens: Tensor) -> Tensor:
    """Kish's effective sample size over the number of samples: (sum w)^2 / (n sum w^2), in 0..1.

    Takes sums, so that they can be added over micro-batches and ranks first. 1 where all weights are equal; 0 where there are no tokens.
    """
    return weight_sum.square() / (tokens * weight_square_sum).clamp(min=1e-30)
