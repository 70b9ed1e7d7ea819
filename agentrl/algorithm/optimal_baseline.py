"""The optimal token baseline: what a group's trajectories had still to earn at the same place. B trajectories, G groups, T tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.advantage_inputs import AdvantageInputs, Advantages
from agentrl.algorithm.gae import reward_to_go
from agentrl.algorithm.importance import importance_weights

__all__ = ["optimal_token_baseline"]

# Added to the sum of weights, as verl does.
WEIGHT_EPS = 1e-8


def optimal_token_baseline(inputs: AdvantageInputs, *, truncate: float | None = None) -> Advantages:
    """Reward to go - the group's weighted mean of it at the same generated token (Li et al. 2026, arXiv 2602.07078, in the form of verl 0.9.1).

        A_t = R_t - sum_G(W_t R_t) / (sum_G(W_t) + 1e-8)        W_t = sum of w_j over generated tokens j <= t
        w_j = rho_j^2 (1 - 2 pi_j + sum over the vocabulary of pi^2)      the squared length of the logits' gradient

    The weights make it the baseline of least gradient variance. The t-th generated token of a trajectory is compared with the t-th of the others,
    whatever observations are between. Where no other trajectory of the group is that long, the baseline is 0.

    Args:
        truncate: None: rho is 1. Else rho_j = min(learner / behaviour, truncate), for tokens of another policy.

    Raises:
        ValueError: log-probs or sums of squares are missing; `truncate` is not above 0.
    """
    mask_BT, logp_BT, squares_BT = inputs.mask_BT.bool(), inputs.logp_BT, inputs.sum_pi_squared_BT
    if logp_BT is None or squares_BT is None:
        raise ValueError("optimal_token_baseline needs the learner's log-probs and sums of squared probabilities")
    steps_BT = _gradient_squares(logp_BT, squares_BT, mask_BT)
    if truncate is not None:
        steps_BT = steps_BT * _ratios(inputs, logp_BT, truncate).square()
    to_go_BT = reward_to_go(inputs.rewards_BT, mask_BT)
    weights_BT = steps_BT.to(to_go_BT.dtype).cumsum(1)
    baseline_BT = _means_at_the_same_place(to_go_BT, weights_BT, mask_BT, inputs.groups_B)
    return Advantages(advantages_BT=to_go_BT - baseline_BT).within(mask_BT)


def _gradient_squares(logp_BT: Tensor, squares_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """1 - 2 pi + sum pi^2 >= (1 - pi)^2; rounding must not make it negative, for a sum of weights of -1e-8 would divide by 0."""
    return (1 - 2 * logp_BT.exp() + squares_BT).masked_fill(~mask_BT, 0.0).clamp(min=0)


def _ratios(inputs: AdvantageInputs, logp_BT: Tensor, truncate: float) -> Tensor:
    if truncate <= 0:
        raise ValueError(f"truncate is the largest importance weight, above 0, got {truncate:g}")
    if inputs.behaviour_BT is None:
        raise ValueError("optimal_token_baseline with truncate needs the behaviour's log-probs")
    ratios_BT, _ = importance_weights(logp_BT, inputs.behaviour_BT, inputs.mask_BT, level="token", truncate=truncate, bounds=None)
    return ratios_BT


def _means_at_the_same_place(values_BT: Tensor, weights_BT: Tensor, mask_BT: Tensor, groups_B: Tensor) -> Tensor:
    """For each generated token the weighted mean over its group's tokens at the same place, 0 where it is the only one. Junk outside the mask."""
    groups = int(groups_B.max()) + 1 if len(groups_B) else 0
    cell_BT = groups_B[:, None] * mask_BT.shape[1] + (mask_BT.cumsum(1) - 1).clamp(min=0)  # (group, place), flat

    def sums(values_BT: Tensor) -> Tensor:
        empty = values_BT.new_zeros(groups * mask_BT.shape[1])
        return empty.index_add_(0, cell_BT.flatten(), values_BT.masked_fill(~mask_BT, 0.0).flatten())

    mean = sums(weights_BT * values_BT) / (sums(weights_BT) + WEIGHT_EPS)
    several = sums(torch.ones_like(values_BT)) > 1
    return mean.masked_fill(~several, 0.0)[cell_BT]
