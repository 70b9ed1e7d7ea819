"""Advantages token by token, from the last to the first: GAE, V-trace, rewards to go. B trajectories, T tokens.

Time goes by generated tokens. Tokens outside the mask (prompt, observations, padding) take no time: nothing is discounted over them and their
values are not looked at. Their rewards are the generated token's before them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.advantage_inputs import Advantages
from agentrl.algorithm.importance import MAX_LOG_RATIO

__all__ = ["gae", "reward_to_go", "vtrace"]


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, *, gamma: float, lam: float) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): A_t = d_t + gamma lam A_t', d_t = r_t + gamma V_t' - V_t.

    t' is the next generated token of the trajectory; after the last one A and V are 0.

    Args:
        values_BT: the critic's value of the state that each token was generated from.
        mask_BT: generated tokens, 0/1 or bool.

    Returns:
        Advantages, not whitened, and the critic's targets A_t + V_t.
    """
    mask_BT = mask_BT.bool()
    deltas_BT = _deltas(rewards_BT, values_BT, mask_BT, gamma)
    advantages_BT = _sums_to_go(deltas_BT, torch.full_like(deltas_BT, gamma * lam), mask_BT)
    return Advantages(advantages_BT=advantages_BT, returns_BT=advantages_BT + values_BT).within(mask_BT)


def vtrace(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    logp_BT: Tensor,
    behaviour_BT: Tensor,
    *,
    gamma: float,
    lam: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Advantages:
    """V-trace targets of the learner's value from another policy's tokens (Espeholt et al. 2018, eq. 1 and remark 2).

        v_t = V_t + rho_t d_t + gamma c_t (v_t' - V_t')      d_t = r_t + gamma V_t' - V_t
        A_t = r_t + gamma v_t' - V_t                         rho_t = min(rho_bar, pi / mu), c_t = lam min(c_bar, pi / mu)

    t' is the next generated token. The rho_t that the policy gradient has before A_t (section 4.2) is left out: the policy loss has that weight, as
    its ratio or as its importance weight.

    Args:
        logp_BT: the learner's log-probs (pi) at the start of the step. `behaviour_BT` the engine's (mu).
        lam: 1 in the paper's experiments. With pi = mu, lam 1 and bounds >= 1 this is GAE with lam 1.

    Returns:
        The A_t, not whitened, and the critic's targets v_t.

    Raises:
        ValueError: rho_bar < c_bar, which the method's proof excludes, or c_bar <= 0.
    """
    if not rho_bar >= c_bar > 0:
        raise ValueError(f"vtrace needs rho_bar >= c_bar > 0, got rho_bar {rho_bar:g} and c_bar {c_bar:g}")
    mask_BT = mask_BT.bool()
    ratio_BT = (logp_BT - behaviour_BT).masked_fill(~mask_BT, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().to(rewards_BT.dtype)
    deltas_BT = _deltas(rewards_BT, values_BT, mask_BT, gamma)
    ahead_BT = _sums_to_go(ratio_BT.clamp(max=rho_bar) * deltas_BT, gamma * lam * ratio_BT.clamp(max=c_bar), mask_BT)
    advantages_BT = deltas_BT + gamma * _following(ahead_BT, mask_BT)
    return Advantages(advantages_BT=advantages_BT, returns_BT=ahead_BT + values_BT).within(mask_BT)


def reward_to_go(rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float = 1.0) -> Tensor:
    """R_t = r_t + gamma R_t', [B, T], with t' the next generated token; 0 outside the mask. With gamma 1 a trajectory's first is its total reward."""
    mask_BT = mask_BT.bool()
    settled_BT = _settled(rewards_BT, mask_BT)
    return _sums_to_go(settled_BT, torch.full_like(settled_BT, gamma), mask_BT)


def _settled(rewards_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The rewards, each on the generated token that earned it: its own, else the one before, else the first."""
    owner_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)  # how many generated tokens are before the owner
    earned_BT = torch.zeros_like(rewards_BT).scatter_add_(1, owner_BT, rewards_BT)
    return earned_BT.gather(1, owner_BT).masked_fill(~mask_BT, 0.0)


def _deltas(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """The temporal differences d_t; 0 outside the mask."""
    values_BT = values_BT.to(rewards_BT.dtype).masked_fill(~mask_BT, 0.0)
    return _settled(rewards_BT, mask_BT) + gamma * _following(values_BT, mask_BT) - values_BT


def _following(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """For each generated token the value of the next generated one, 0 where there is none; 0 outside the mask."""
    place_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    compact_BT = torch.zeros_like(values_BT).scatter_add_(1, place_BT, values_BT.masked_fill(~mask_BT, 0.0))
    shifted_BT = torch.cat([compact_BT[:, 1:], torch.zeros_like(compact_BT[:, :1])], dim=1)
    return shifted_BT.gather(1, place_BT).masked_fill(~mask_BT, 0.0)


def _sums_to_go(terms_BT: Tensor, factors_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """S_t = term_t + factor_t S_t' over generated tokens; 0 outside the mask.

    Outside the mask the term is 0 and the factor 1, so that the sum is handed on as it is.
    """
    terms_TB = terms_BT.masked_fill(~mask_BT, 0.0).t().contiguous()
    factors_TB = factors_BT.masked_fill(~mask_BT, 1.0).t().contiguous()
    for later in range(len(terms_TB) - 1, 0, -1):
        terms_TB[later - 1].addcmul_(factors_TB[later - 1], terms_TB[later])
    return terms_TB.t().masked_fill(~mask_BT, 0.0)
