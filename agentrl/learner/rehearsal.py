"""The recipe's estimator and loss, tried on one group of two tokens: what is wrong is found before there is anything to train on."""

from __future__ import annotations

from functools import partial

import torch

from agentrl.algorithm.advantages import AdvantageInputs, estimate, find_estimator
from agentrl.algorithm.losses import find_loss
from agentrl.config.recipe import AlgorithmRecipe, ImportanceRecipe
from agentrl.errors import ConfigError, RecipeCodeError

__all__ = ["rehearse"]

GREEDY = "remax"  # the estimator for which greedy episodes are played


def rehearse(algorithm: AlgorithmRecipe, *, critic: bool) -> None:
    """Estimate the advantages of two trajectories of one token each, and compute the loss of one token.

    Args:
        critic: the recipe has one.

    Raises:
        ConfigError: naming the key: an option is missing, unknown or out of range; what the estimator needs is not there; an option would do
            nothing with this loss.
        RecipeCodeError: a function of the user's failed.
    """
    attempts = {"algorithm.advantage": partial(_estimate, algorithm, critic=critic), "algorithm.loss": partial(_lose, algorithm)}
    for key, attempt in attempts.items():
        try:
            attempt()
        except ConfigError as error:
            raise ConfigError(f"{key}: {str(error).removeprefix(f'{key}: ')}") from error
        except (TypeError, ValueError, RuntimeError, LookupError, ArithmeticError) as error:  # the user's function, tried on two tokens
            raise RecipeCodeError(f"{key} failed on two trajectories of one token: {type(error).__name__}: {error}") from error


def _estimate(algorithm: AlgorithmRecipe, *, critic: bool) -> None:
    recipe = algorithm.advantage
    estimator = find_estimator(recipe.estimator)
    if "baselines" in estimator.needs and recipe.estimator != GREEDY:
        raise ConfigError(f"{recipe.estimator} needs greedy episodes, which are played for the estimator {GREEDY} only")
    if "values" in estimator.needs and not critic:
        raise ConfigError(f"{recipe.estimator} needs a critic's values: add a `critic` section")
    ones_BT = torch.ones(2, 1, dtype=torch.float64)
    inputs = AdvantageInputs(
        rewards_BT=torch.tensor([[1.0], [0.0]], dtype=torch.float64),
        mask_BT=ones_BT.bool(),
        groups_B=torch.zeros(2, dtype=torch.int64),
        values_BT=0 * ones_BT if critic else None,
        baselines_B=torch.zeros(2, dtype=torch.float64),
        parts_BK=torch.zeros(2, len(recipe.options.get("parts", ())), dtype=torch.float64),
        logp_BT=-ones_BT,
        behaviour_BT=-ones_BT,
        sum_pi_squared_BT=0.5 * ones_BT,
    )
    estimate(recipe.estimator, inputs, gamma=recipe.gamma, lam=recipe.lam, whiten=recipe.whiten, options=recipe.options)


def _lose(algorithm: AlgorithmRecipe) -> None:
    method = find_loss(algorithm.loss.name)
    if method.ratio and algorithm.proximal == "behaviour" and algorithm.importance != ImportanceRecipe():
        raise ConfigError(
            f"algorithm.importance has no effect with proximal behaviour and {algorithm.loss.name}, whose ratio is the importance weight: set"
            " algorithm.proximal to recompute, or leave importance out"
        )
    if method.aggregation is not None and algorithm.aggregation not in ("token_mean", method.aggregation):
        raise ConfigError(f"{algorithm.loss.name} is defined with aggregation {method.aggregation}: leave algorithm.aggregation out")
    method.bind(algorithm.loss.arguments)
