"""Losses whose ratio is a trajectory's: the geometric mean over its tokens. B trajectories, T tokens.

Both are means over trajectories by definition, so they are aggregated by seq_mean_token_mean. Means are over the train mask: a token masked by
age or rejection is not part of its trajectory's ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.importance import MAX_LOG_RATIO
from agentrl.algorithm.loss_inputs import LossInputs, TokenLosses

__all__ = ["gmpo", "gspo"]

# verl's bound of GSPO's log-ratio: e^10 = 22,026 is far outside of any clip range.
MAX_LOG_SEQUENCE_RATIO = 10.0
# verl's, so that a weight of 0 has a logarithm: it leaves a trajectory of n tokens e^(-23 / n) of its weight.
LOG_EPS = 1e-10


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLosses:
    """GSPO: PPO's clipped surrogate with the trajectory's ratio s = exp(mean_t log r_t) in place of the token's (Zheng et al. 2025, eq. 5 and 7).

    In the token form (eq. 13-14) each token carries sg[s] * pi / sg[pi]: its value is s, its gradient that of its own log-prob, so advantages may
    differ from token to token. The defaults are the paper's (section 5.1).
    """
    inputs = inputs.masked()
    advantages_BT = inputs.advantages_BT
    log_s_B1 = _row_mean(inputs.log_ratio_BT.detach(), inputs.mask_BT)[:, None]
    ratio_BT = (inputs.logp_BT - inputs.logp_BT.detach() + log_s_B1).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    surrogate_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    return TokenLosses(
        values_BT=-inputs.weights_BT * surrogate_BT,
        clipped_low_BT=(ratio_BT < clipped_BT) & (advantages_BT < 0),
        clipped_high_BT=(ratio_BT > clipped_BT) & (advantages_BT > 0),
        capped_BT=torch.zeros_like(clipped_BT, dtype=torch.bool),
    )


def gmpo(inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLosses:
    """GMPO: the geometric mean of clipped token ratios, times the trajectory's advantage (Zhao et al. 2025, arXiv 2507.20673).

    Each token carries the trajectory's loss -w A exp(mean_t log r_t), of which seq_mean_token_mean makes the mean over trajectories. A is the mean of
    the tokens' advantages, w the geometric mean of their weights.

    Args:
        clip_low: bound of the LOG-ratio where A < 0: with 0.4 the ratio stays above e^-0.4, as in the paper.
        clip_high: the same where A > 0.
    """
    inputs = inputs.masked()
    mask_BT, advantages_BT = inputs.mask_BT, inputs.advantages_BT
    log_ratio_BT = inputs.log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    up_BT, down_BT = advantages_BT > 0, advantages_BT < 0
    bounded_BT = torch.where(up_BT, log_ratio_BT.clamp(max=clip_high), log_ratio_BT.clamp(min=-clip_low)) * (up_BT | down_BT)
    weight_B = _row_mean((inputs.weights_BT + LOG_EPS).log(), mask_BT).exp()
    losses_B = -weight_B * _row_mean(advantages_BT, mask_BT) * _row_mean(bounded_BT, mask_BT).exp()
    return TokenLosses(
        values_BT=losses_B[:, None] * mask_BT,
        clipped_low_BT=(log_ratio_BT < -clip_low) & down_BT,
        clipped_high_BT=(log_ratio_BT > clip_high) & up_BT,
        capped_BT=torch.zeros_like(up_BT),
    )


def _row_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return (values_BT * mask_BT).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)
