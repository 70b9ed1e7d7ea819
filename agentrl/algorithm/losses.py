"""Importance-weighted PPO in two forms. B trajectories, T tokens.

All masks are 0/1 of the log-probs' dtype. Statistics are sums over tokens, so that micro-batches and ranks can be added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.aggregation import token_mean
from agentrl.algorithm.importance import MAX_LOG_RATIO, truncated_weights

__all__ = ["LossStats", "clipped_policy_loss", "decoupled_policy_loss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossStats:
    """What a policy loss did to its tokens: 0-d sums over the train mask."""

    tokens: Tensor
    clipped_low: Tensor  # ratio below 1 - clip_low with a negative advantage: the bound took the gradient
    clipped_high: Tensor  # ratio above 1 + clip_high with a positive advantage
    importance: Tensor  # sum of the proximal/behaviour weights, truncated; the token count in the two-policy form
    truncated: Tensor  # tokens whose weight was cut

    @classmethod
    def of(cls, ratio_BT: Tensor, clipped_BT: Tensor, advantages_BT: Tensor, train_mask_BT: Tensor, weights_BT: Tensor, cut_BT: Tensor) -> LossStats:
        """Count, without a gradient."""
        with torch.no_grad():
            low_BT = (clipped_BT > ratio_BT) & (advantages_BT < 0)
            high_BT = (clipped_BT < ratio_BT) & (advantages_BT > 0)
            return cls(
                tokens=train_mask_BT.sum(),
                clipped_low=(low_BT * train_mask_BT).sum(),
                clipped_high=(high_BT * train_mask_BT).sum(),
                importance=(weights_BT * train_mask_BT).sum(),
                truncated=(cut_BT * train_mask_BT).sum(),
            )


def clipped_policy_loss(
    logp_BT: Tensor, behaviour_BT: Tensor, advantages_BT: Tensor, train_mask_BT: Tensor, *, clip_low: float, clip_high: float, denominator: Tensor
) -> tuple[Tensor, LossStats]:
    """PPO's clipped surrogate with the sampling policy as the old one (Schulman et al. 2017, eq. 7): the two-policy form.

    Args:
        denominator: number of generated tokens in the whole update, over all ranks and micro-batches and before any masking by age
            or rejection, so that the loss does not depend on how the batch was cut.
    """
    ratio_BT = (logp_BT - behaviour_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    ones_BT = torch.ones_like(ratio_BT)
    stats = LossStats.of(ratio_BT, clipped_BT, advantages_BT, train_mask_BT, ones_BT, ones_BT < 0)
    return token_mean(loss_BT, train_mask_BT, denominator=denominator), stats


def decoupled_policy_loss(
    logp_BT: Tensor,
    proximal_BT: Tensor,
    behaviour_BT: Tensor,
    advantages_BT: Tensor,
    train_mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    truncate: float,
    denominator: Tensor,
) -> tuple[Tensor, LossStats]:
    """Decoupled PPO (Hilton et al. 2022, eq. 4): current/proximal is clipped, proximal/behaviour is a constant weight, cut at `truncate`.

    With one update per batch the proximal policy is the current one: the ratio is 1 and nothing bounds the step.

    Args:
        proximal_BT: log-probs of the learner at the start of the step, without gradient.
        denominator: as in `clipped_policy_loss`.
    """
    weights_BT, cut_BT = truncated_weights(proximal_BT, behaviour_BT, truncate=truncate)
    ratio_BT = (logp_BT - proximal_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -weights_BT * torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    stats = LossStats.of(ratio_BT, clipped_BT, advantages_BT, train_mask_BT, weights_BT, cut_BT)
    return token_mean(loss_BT, train_mask_BT, denominator=denominator), stats
