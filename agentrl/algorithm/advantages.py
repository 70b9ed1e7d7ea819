"""The advantage estimators by name, and how one is applied. B trajectories, T tokens, G groups, K parts of the reward.

An estimator turns `AdvantageInputs` into `Advantages`. Tokens outside the mask change nothing: wherever observations stand and however long they are,
every generated token has the same advantage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithm.advantage_inputs import AdvantageInputs, Advantages
from agentrl.algorithm.gae import gae, reward_to_go, vtrace
from agentrl.algorithm.group_advantages import dr_grpo, gdpo, gpg, grpo, grpo_passk, opo, reinforce_plus_plus_baseline, remax, rloo
from agentrl.algorithm.optimal_baseline import optimal_token_baseline
from agentrl.algorithm.whitening import whiten as whitened
from agentrl.errors import ConfigError
from agentrl.resolve import resolve

__all__ = ["ESTIMATORS", "AdvantageInputs", "Advantages", "Estimator", "estimate", "find_estimator"]

# What an estimator may need -> the inputs that hold it.
NEEDS = MappingProxyType(
    {
        "values": ("values_BT",),
        "baselines": ("baselines_B",),
        "parts": ("parts_BK",),
        "logp": ("logp_BT", "behaviour_BT"),
        "sum_pi_squared": ("sum_pi_squared_BT",),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """An estimator and what must be known to use it."""

    function: Callable[..., Any]  # (inputs, *, options, and gamma and lam where it discounts) -> [B], [B, T] or Advantages
    needs: frozenset[str] = frozenset()  # of "values", "baselines", "parts", "logp", "sum_pi_squared"
    whitens: bool = False  # whether its source whitens what it returns


def find_estimator(name: str) -> Estimator:
    """The estimator of this name, or what `module:name` names.

    That is an `Estimator`, or a function of `AdvantageInputs` and keyword options. A function is given the learner's log-probs and sums of squared
    probabilities, a critic's values where the recipe has a critic, and `gamma` and `lam` where it takes them. An `Estimator` says what it needs.

    Raises:
        ConfigError: there is none.
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if ":" not in name:
        raise ConfigError(f"unknown estimator {name!r}: expected one of {', '.join(ESTIMATORS)}, or module:function")
    found = resolve(name)
    return found if isinstance(found, Estimator) else Estimator(function=found, needs=frozenset({"logp", "sum_pi_squared"}))


@torch.no_grad()
def estimate(name: str, inputs: AdvantageInputs, *, gamma: float, lam: float, whiten: bool | None, options: Mapping[str, Any]) -> Advantages:
    """The advantages of a batch, 0 outside the mask.

    Args:
        name: as for `find_estimator`.
        gamma: discount per generated token. `lam`: GAE's lambda. Only gae, vtrace and reinforce_plus_plus (gamma) discount.
        whiten: whether advantages are whitened over the mask; None: as the estimator's source does. The critic's targets never are.
        options: the estimator's further keyword arguments.

    Raises:
        ConfigError: an input that the estimator needs is missing; an option is unknown, missing or out of range; it returned another shape.
    """
    estimator = find_estimator(name)
    missing = [field for need in sorted(estimator.needs) for field in NEEDS[need] if getattr(inputs, field) is None]
    if missing:
        raise ConfigError(f"estimator {name} needs {', '.join(missing)} of its inputs, and they are not there")
    signature = inspect.signature(estimator.function)
    arguments = {key: value for key, value in (("gamma", gamma), ("lam", lam)) if key in signature.parameters} | dict(options)
    try:
        signature.bind(inputs, **arguments)
    except TypeError as error:
        raise ConfigError(f"estimator {name}: {error}") from error
    try:
        advantages = Advantages.of(estimator.function(inputs, **arguments), inputs)
    except ValueError as error:
        raise ConfigError(f"estimator {name}: {error}") from error
    if estimator.whitens if whiten is None else whiten:
        return replace(advantages, advantages_BT=whitened(advantages.advantages_BT, inputs.mask_BT))
    return advantages


def _gae(inputs: AdvantageInputs, *, gamma: float, lam: float) -> Advantages:
    return gae(inputs.rewards_BT, _given(inputs.values_BT), inputs.mask_BT, gamma=gamma, lam=lam)


def _vtrace(inputs: AdvantageInputs, *, gamma: float, lam: float, rho_bar: float = 1.0, c_bar: float = 1.0) -> Advantages:
    tokens = (inputs.rewards_BT, _given(inputs.values_BT), inputs.mask_BT, _given(inputs.logp_BT), _given(inputs.behaviour_BT))
    return vtrace(*tokens, gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar)


def _reinforce_plus_plus(inputs: AdvantageInputs, *, gamma: float) -> Advantages:
    """Discounted reward to go, to be whitened over the batch (Hu et al. 2025, REINFORCE++)."""
    return Advantages(advantages_BT=reward_to_go(inputs.rewards_BT, inputs.mask_BT, gamma=gamma))


def _given(values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError("an input that the estimator needs is missing")
    return values


_BY_PLACE = Estimator(function=optimal_token_baseline, needs=frozenset({"logp", "sum_pi_squared"}))

# Whitening as in verl 0.9.1; V-trace, which it does not have, as in its paper.
ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "gae": Estimator(function=_gae, needs=frozenset({"values"}), whitens=True),
        "vtrace": Estimator(function=_vtrace, needs=frozenset({"values", "logp"})),
        "grpo": Estimator(function=grpo),
        "dr_grpo": Estimator(function=dr_grpo),
        "rloo": Estimator(function=rloo),
        "reinforce_plus_plus": Estimator(function=_reinforce_plus_plus, whitens=True),
        "reinforce_plus_plus_baseline": Estimator(function=reinforce_plus_plus_baseline, whitens=True),
        "remax": Estimator(function=remax, needs=frozenset({"baselines"})),
        "opo": Estimator(function=opo),
        "gpg": Estimator(function=gpg),
        "grpo_passk": Estimator(function=grpo_passk),
        "gdpo": Estimator(function=gdpo, needs=frozenset({"parts"}), whitens=True),
        "optimal_token_baseline": _BY_PLACE,
        "tir_optimal_token_baseline": _BY_PLACE,  # verl's second form is what the first one is here: see docs/algorithms.md
    }
)
