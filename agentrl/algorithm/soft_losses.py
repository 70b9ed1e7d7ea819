"""Losses that weigh, damp or drop a token instead of clipping its surrogate. B trajectories, T tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.loss_inputs import LossInputs, TokenLosses

__all__ = ["cispo", "dppo_kl", "dppo_tv", "dro", "sapo"]

# verl's, so that a probability of 1 has a finite divergence from another one of 1.
LOG_EPS = 1e-8


def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 0.2) -> TokenLosses:
    """CISPO: -w sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi (MiniMax 2025, eq. 4-5): the weight is bounded, every token keeps a gradient.

    Args:
        clip_low: 1 and above is no lower bound, which is the paper's choice.
        clip_high: to be tuned, says the paper.
    """
    inputs = inputs.masked()
    ratio_BT = inputs.ratio_BT.detach()
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return TokenLosses(
        values_BT=-inputs.weights_BT * clipped_BT * inputs.advantages_BT * inputs.logp_BT,
        clipped_low_BT=ratio_BT < clipped_BT,
        clipped_high_BT=ratio_BT > clipped_BT,
        capped_BT=torch.zeros_like(clipped_BT, dtype=torch.bool),
    )


def sapo(inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLosses:
    """SAPO: -w A sigmoid(tau (r - 1)) 4 / tau (Gao et al. 2025, arXiv 2511.20347): a soft gate whose slope is 1 at r = 1 and fades as r leaves it.

    Args:
        tau_positive: how fast it fades where A > 0.
        tau_negative: where A <= 0; larger, because pushing tokens down spreads over the whole vocabulary.
    """
    if tau_positive <= 0 or tau_negative <= 0:
        raise ValueError(f"tau_positive and tau_negative must be positive, got {tau_positive:g} and {tau_negative:g}")
    inputs = inputs.masked()
    tau_BT = torch.full_like(inputs.advantages_BT, tau_negative).masked_fill(inputs.advantages_BT > 0, tau_positive)
    gate_BT = torch.sigmoid(tau_BT * (inputs.ratio_BT - 1)) * 4 / tau_BT
    return TokenLosses.free(-inputs.weights_BT * inputs.advantages_BT * gate_BT)


def dppo_tv(inputs: LossInputs, *, clip_low: float = 0.15, clip_high: float = 0.15, truncate: float = 20.0) -> TokenLosses:
    """DPPO with the binary total variation: a token is dropped once its PROBABILITY has moved too far (Qi et al. 2026, arXiv 2602.04879).

    -w sg[min(r, truncate)] A log pi, where A > 0 while pi - old <= clip_high, elsewhere while pi - old >= -clip_low. A ratio says little of rare
    tokens (1e-5 to 1e-3 is a hundredfold) and hides much of frequent ones (0.99 to 0.8).

    Args:
        clip_low, clip_high: of the probability; verl's example has 0.15.
        truncate: of the ratio. The paper wants it large (section 5.4).
    """
    inputs = inputs.masked()
    moved_BT = inputs.logp_BT.detach().exp() - inputs.old_BT.exp()
    return _kept_inside(inputs, beyond_low_BT=moved_BT < -clip_low, beyond_high_BT=moved_BT > clip_high, truncate=truncate)


def dppo_kl(inputs: LossInputs, *, clip_low: float = 0.05, clip_high: float = 0.05, truncate: float = 20.0) -> TokenLosses:
    """DPPO with the binary divergence KL(old || pi) of "this token or another" (Qi et al. 2026, arXiv 2602.04879); else as `dppo_tv`.

    A token is dropped where that divergence exceeds clip_high with A > 0 and pi above old, or clip_low with A <= 0 and pi below old. The defaults are
    those of verl's example.
    """
    inputs = inputs.masked()
    # Rounding may leave a log-prob a little above 0, and a probability above 1 has no divergence.
    now_BT, before_BT = (logp_BT.detach().clamp(max=0).exp() for logp_BT in (inputs.logp_BT, inputs.old_BT))
    others_BT = ((1 - before_BT + LOG_EPS) / (1 - now_BT + LOG_EPS)).log()
    divergence_BT = before_BT * (inputs.old_BT - inputs.logp_BT.detach()) + (1 - before_BT) * others_BT
    beyond_low_BT = (divergence_BT > clip_low) & (now_BT < before_BT)
    beyond_high_BT = (divergence_BT > clip_high) & (now_BT > before_BT)
    return _kept_inside(inputs, beyond_low_BT=beyond_low_BT, beyond_high_BT=beyond_high_BT, truncate=truncate)


def dro(inputs: LossInputs, *, beta: float = 0.05) -> TokenLosses:
    """DRO: -w (A log pi - beta / 2 (log r)^2) (Richemond et al. 2024; Kimi k1.5, 2025).

    The square pulls the policy back to the old one from any distance, so it needs neither a ratio nor a bound. The token form and beta are those of
    Tinker's `dro` and its example.
    """
    if beta <= 0:
        raise ValueError(f"beta must be positive, got {beta:g}")
    inputs = inputs.masked()
    objective_BT = inputs.advantages_BT * inputs.logp_BT - 0.5 * beta * inputs.log_ratio_BT.square()
    return TokenLosses.free(-inputs.weights_BT * objective_BT)


def _kept_inside(inputs: LossInputs, *, beyond_low_BT: Tensor, beyond_high_BT: Tensor, truncate: float) -> TokenLosses:
    """DPPO's loss where the policy has not moved beyond its bound in the advantage's direction."""
    if truncate <= 1:
        raise ValueError(f"truncate is a bound of the ratio above 1, got {truncate:g}")
    up_BT, ratio_BT = inputs.advantages_BT > 0, inputs.ratio_BT.detach()
    low_BT, high_BT = beyond_low_BT & ~up_BT, beyond_high_BT & up_BT
    kept_BT = ~(low_BT | high_BT)
    losses_BT = -inputs.weights_BT * ratio_BT.clamp(max=truncate) * inputs.advantages_BT * inputs.logp_BT
    return TokenLosses(
        values_BT=losses_BT * kept_BT,
        clipped_low_BT=low_BT,
        clipped_high_BT=high_BT,
        capped_BT=(ratio_BT > truncate) & kept_BT,
    )
