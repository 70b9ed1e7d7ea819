"""What a policy loss is given and what it gives back. B trajectories, T tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.importance import MAX_LOG_RATIO

__all__ = ["LossInputs", "TokenLosses"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossInputs:
    """The tokens of a micro-batch, right-padded. Outside the mask anything may stand, NaN included."""

    logp_BT: Tensor  # log-probs of the current policy, with gradient
    old_BT: Tensor  # of the policy whose ratio to the current one is bounded: the proximal one, or in the two-policy form the behaviour
    advantages_BT: Tensor
    mask_BT: Tensor  # 0/1, the train mask
    weights_BT: Tensor  # importance weights without gradient; ones where there are none
    selected_BT: Tensor | None = None  # bool: the tokens clip_cov and kl_cov treat apart (see covariance.py)

    def masked(self) -> LossInputs:
        """The same with zeros outside the mask, so that nothing which stands there reaches a value or a gradient."""
        outside_BT = self.mask_BT == 0
        return LossInputs(
            logp_BT=self.logp_BT.masked_fill(outside_BT, 0.0),
            old_BT=self.old_BT.detach().masked_fill(outside_BT, 0.0),
            advantages_BT=self.advantages_BT.detach().masked_fill(outside_BT, 0.0),
            mask_BT=(~outside_BT).to(self.logp_BT.dtype),
            weights_BT=self.weights_BT.detach().masked_fill(outside_BT, 0.0),
            selected_BT=None if self.selected_BT is None else self.selected_BT.bool() & ~outside_BT,
        )

    @property
    def log_ratio_BT(self) -> Tensor:
        """log current - log old, as it is. Its mean over the mask, negated, is the usual `ppo_kl`."""
        return self.logp_BT - self.old_BT

    @property
    def ratio_BT(self) -> Tensor:
        """current / old, within exp(+-20): finite, and without a gradient where it was cut."""
        return self.log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLosses:
    """The loss of each token, to be aggregated, and what the loss's bounds did to it. All [B, T]; False and 0 outside the mask."""

    values_BT: Tensor  # with gradient; the importance weight is in it
    clipped_low_BT: Tensor  # bool: a lower bound took the token's gradient (cispo: set its weight)
    clipped_high_BT: Tensor  # bool: an upper bound did
    capped_BT: Tensor  # bool: the loss's further bound acted: the dual clip of ppo, the truncation of dppo, the selection of clip_cov and kl_cov

    @classmethod
    def free(cls, values_BT: Tensor) -> TokenLosses:
        """Losses without any bound."""
        none_BT = torch.zeros_like(values_BT, dtype=torch.bool)
        return cls(values_BT=values_BT, clipped_low_BT=none_BT, clipped_high_BT=none_BT, capped_BT=none_BT)
