"""Which tokens drive the entropy down: those whose log-prob and advantage vary together (Cui et al. 2025, arXiv 2505.22617).

The covariance term of a token is (log pi - mean) (A - mean), means over all generated tokens of the update. The choice is made once per update over
all of it, in one order of the trajectories, so it depends neither on ranks nor on micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clip_cov_selection", "covariance_terms", "kl_cov_selection"]


def clip_cov_selection(
    old_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    seed: int,
    share: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> Tensor:
    """Clip-Cov's tokens: some at random of those whose covariance term lies between the two bounds.

    Args:
        old_BT: log-probs of the old policy, for all trajectories of the update, on all ranks the same.
        seed: of this update.
        share: of the generated tokens; at least one token is chosen where there is a candidate.

    Returns:
        [B, T], bool.
    """
    _check_share(share)
    terms_N = covariance_terms(old_BT, advantages_BT, mask_BT).flatten()
    candidates_N = ((terms_N > covariance_low) & (terms_N < covariance_high) & (mask_BT.flatten() > 0)).nonzero().flatten()
    order_N = _shuffled(len(candidates_N), seed).to(candidates_N.device)
    return _chosen(candidates_N[order_N][: _count(mask_BT, share)], mask_BT)


def kl_cov_selection(old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, seed: int, share: float = 2e-4) -> Tensor:
    """KL-Cov's tokens: those with the largest covariance terms. `seed` decides between equal ones. Else as `clip_cov_selection`."""
    _check_share(share)
    generated_N = (mask_BT.flatten() > 0).nonzero().flatten()
    generated_N = generated_N[_shuffled(len(generated_N), seed).to(generated_N.device)]
    terms_N = covariance_terms(old_BT, advantages_BT, mask_BT).flatten()[generated_N]
    largest_first_N = generated_N[terms_N.argsort(descending=True, stable=True)]
    return _chosen(largest_first_N[: _count(mask_BT, share)], mask_BT)


def covariance_terms(logp_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(log pi - mean) (A - mean) of each generated token, float64; 0 elsewhere."""
    outside_BT = mask_BT == 0
    logp_BT, advantages_BT = (values.detach().double().masked_fill(outside_BT, 0.0) for values in (logp_BT, advantages_BT))
    tokens = (~outside_BT).sum().clamp(min=1)
    terms_BT = (logp_BT - logp_BT.sum() / tokens) * (advantages_BT - advantages_BT.sum() / tokens)
    return terms_BT.masked_fill(outside_BT, 0.0)


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"share is of the generated tokens, above 0 and at most 1, got {share:g}")


def _count(mask_BT: Tensor, share: float) -> int:
    """A share of so few tokens as a test or a small batch has still means one, as in verl."""
    return max(int(share * int((mask_BT > 0).sum())), 1)


def _shuffled(count: int, seed: int) -> Tensor:
    """0..count - 1 in random order, drawn on the CPU: the same on every device."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _chosen(places_N: Tensor, mask_BT: Tensor) -> Tensor:
    chosen_N = torch.zeros(mask_BT.numel(), dtype=torch.bool, device=mask_BT.device)
    chosen_N[places_N] = True
    return chosen_N.view(mask_BT.shape)
