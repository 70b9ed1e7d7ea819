"""The policy losses by name, and the plain ones. B trajectories, T tokens.

A loss turns `LossInputs` into `TokenLosses`: one number per token, multiplied by the token's importance weight, to be aggregated by
`agentrl.algorithm.aggregation`. Masking, padding and what stands outside the mask change nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithm.covariance import clip_cov_selection, kl_cov_selection
from agentrl.algorithm.loss_inputs import LossInputs, TokenLosses
from agentrl.algorithm.sequence_losses import gmpo, gspo
from agentrl.algorithm.soft_losses import cispo, dppo_kl, dppo_tv, dro, sapo
from agentrl.errors import ConfigError
from agentrl.resolve import resolve

__all__ = [
    "POLICY_LOSSES",
    "BoundLoss",
    "LossInputs",
    "PolicyLoss",
    "TokenLosses",
    "clip_cov",
    "find_loss",
    "kl_cov",
    "ppo",
    "reinforce",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A loss and what must be known to use it."""

    function: Callable[..., TokenLosses]
    ratio: bool = True  # it accounts for old_BT itself: in the two-policy form its weights are ones
    aggregation: str | None = None  # the only one it is defined with
    selection: Callable[..., Tensor] | None = None  # chooses `selected_BT`, once per update, from all its tokens: (old, advantages, mask, *, seed)

    def bind(self, arguments: Mapping[str, Any]) -> BoundLoss:
        """The loss with its keyword arguments, those of the selection among them.

        Raises:
            ConfigError: one is not known, missing or out of range.
        """
        parameters = inspect.signature(self.selection).parameters.values() if self.selection else ()
        chosen = {parameter.name for parameter in parameters if parameter.default is not parameter.empty}
        of_selection = {name: value for name, value in arguments.items() if name in chosen}
        losses = functools.partial(self.function, **{name: value for name, value in arguments.items() if name not in chosen})
        select = functools.partial(self.selection, **of_selection) if self.selection else None
        bound = BoundLoss(losses=losses, select=select)
        try:
            bound.rehearse()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"algorithm.loss: {error}") from error
        return bound


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundLoss:
    """A loss whose arguments are set."""

    losses: Callable[[LossInputs], TokenLosses]
    select: Callable[..., Tensor] | None

    def rehearse(self) -> None:
        """Compute the loss of one token, so that wrong arguments are found before there is anything to train on."""
        one_BT = torch.ones(1, 1)
        selected_BT = self.select(-one_BT, one_BT, one_BT, seed=0) if self.select else None
        given = {"logp_BT": -one_BT, "old_BT": -one_BT, "advantages_BT": one_BT, "mask_BT": one_BT, "weights_BT": one_BT}
        self.losses(LossInputs(**given, selected_BT=selected_BT))


def find_loss(name: str) -> PolicyLoss:
    """The loss of this name, or what `module:name` names.

    That is a `PolicyLoss`, or a function of `LossInputs` (zeros outside the mask) and keyword options that returns the losses of tokens, [B, T], or
    `TokenLosses`. A function multiplies by `weights_BT` itself; as its ratio is taken to correct for old_BT, in the two-policy form these are ones.

    Raises:
        ConfigError: there is none.
    """
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    if ":" not in name:
        raise ConfigError(f"unknown loss {name!r}: expected one of {', '.join(POLICY_LOSSES)}, or module:function")
    found = resolve(name)
    return found if isinstance(found, PolicyLoss) else PolicyLoss(function=_from_outside(name, found))


def ppo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> TokenLosses:
    """PPO's clipped surrogate: -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017, eq. 7).

    Args:
        clip_high: above `clip_low` it is DAPO's clip-higher (Yu et al. 2025).
        dual_clip: where A < 0, no token's loss exceeds dual_clip * |A| (Ye et al. 2020, arXiv 1912.09729); verl's default is 3.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip is a bound of the ratio above 1, got {dual_clip:g}")
    inputs = inputs.masked()
    ratio_BT, advantages_BT = inputs.ratio_BT, inputs.advantages_BT
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    surrogate_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    capped_BT = (advantages_BT < 0) & (ratio_BT > (float("inf") if dual_clip is None else dual_clip))
    if dual_clip is not None:
        surrogate_BT = torch.where(capped_BT, dual_clip * advantages_BT, surrogate_BT)
    return TokenLosses(
        values_BT=-inputs.weights_BT * surrogate_BT,
        clipped_low_BT=(ratio_BT < clipped_BT) & (advantages_BT < 0),
        clipped_high_BT=(ratio_BT > clipped_BT) & (advantages_BT > 0),
        capped_BT=capped_BT,
    )


def reinforce(inputs: LossInputs) -> TokenLosses:
    """-w A log pi (Williams 1992): no ratio and no bound, so off-policy it needs its importance weights w = current / behaviour.

    With the advantages of the estimator `gpg` it is GPG (Chu et al. 2025).
    """
    inputs = inputs.masked()
    return TokenLosses.free(-inputs.weights_BT * inputs.advantages_BT * inputs.logp_BT)


def clip_cov(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLosses:
    """Clip-Cov: `ppo` without the tokens that `clip_cov_selection` chose (Cui et al. 2025, arXiv 2505.22617)."""
    selected_BT = _selected(inputs)
    losses = ppo(inputs, clip_low=clip_low, clip_high=clip_high)
    return replace(losses, values_BT=losses.values_BT.masked_fill(selected_BT, 0.0), capped_BT=selected_BT)


def kl_cov(inputs: LossInputs, *, kl_coefficient: float = 0.1) -> TokenLosses:
    """KL-Cov: -w (r A - kl_coefficient |log r|), the penalty on the tokens that `kl_cov_selection` chose only (Cui et al. 2025).

    There is no clipping. The coefficient is verl's; the paper has 1.
    """
    if kl_coefficient <= 0:
        raise ValueError(f"kl_coefficient must be positive, got {kl_coefficient:g}")
    selected_BT = _selected(inputs)
    inputs = inputs.masked()
    penalty_BT = kl_coefficient * inputs.log_ratio_BT.abs() * selected_BT
    values_BT = -inputs.weights_BT * (inputs.ratio_BT * inputs.advantages_BT - penalty_BT)
    return replace(TokenLosses.free(values_BT), capped_BT=selected_BT)


def _selected(inputs: LossInputs) -> Tensor:
    if inputs.selected_BT is None:
        raise ValueError("this loss needs selected_BT: choose the tokens with the loss's selection, once per update")
    return inputs.selected_BT.bool() & (inputs.mask_BT != 0)


def _from_outside(name: str, function: Callable[..., Tensor | TokenLosses]) -> Callable[..., TokenLosses]:
    @functools.wraps(function)
    def losses(inputs: LossInputs, **options: Any) -> TokenLosses:
        found = function(inputs.masked(), **options)
        values_BT = found.values_BT if isinstance(found, TokenLosses) else found
        if not isinstance(values_BT, Tensor) or values_BT.shape != inputs.mask_BT.shape:
            came = tuple(values_BT.shape) if isinstance(values_BT, Tensor) else type(values_BT).__name__
            raise ConfigError(f"{name} must return a loss per token, {tuple(inputs.mask_BT.shape)}, got {came}")
        return found if isinstance(found, TokenLosses) else TokenLosses.free(values_BT)

    return losses


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "ppo": PolicyLoss(function=ppo),
        "gspo": PolicyLoss(function=gspo, aggregation="seq_mean_token_mean"),
        "cispo": PolicyLoss(function=cispo),
        "gmpo": PolicyLoss(function=gmpo, aggregation="seq_mean_token_mean"),
        "sapo": PolicyLoss(function=sapo, aggregation="seq_mean_token_mean"),
        "dppo_tv": PolicyLoss(function=dppo_tv),
        "dppo_kl": PolicyLoss(function=dppo_kl),
        "dro": PolicyLoss(function=dro),
        "clip_cov": PolicyLoss(function=clip_cov, selection=clip_cov_selection),
        "kl_cov": PolicyLoss(function=kl_cov, selection=kl_cov_selection),
        "reinforce": PolicyLoss(function=reinforce, ratio=False),
        "gpg": PolicyLoss(function=reinforce, ratio=False),
    }
)
