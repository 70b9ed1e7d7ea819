"""The recipe's estimator and loss, tried on one group of two tokens: wrong options are found before there is anything to train on."""

from __future__ import annotations

import torch

from agentrl.algorithm.advantages import AdvantageInputs, estimate
from agentrl.algorithm.losses import find_loss
from agentrl.config.recipe import AlgorithmRecipe

__all__ = ["rehearse"]


def rehearse(algorithm: AlgorithmRecipe) -> None:
    """Estimate the advantages of two trajectories of one token each, and compute the loss of one token.

    Raises:
        ConfigError: an option is missing, unknown or out of range.
    """
    recipe = algorithm.advantage
    ones_BT = torch.ones(2, 1, dtype=torch.float64)
    inputs = AdvantageInputs(
        rewards_BT=torch.tensor([[1.0], [0.0]], dtype=torch.float64),
        mask_BT=ones_BT.bool(),
        groups_B=torch.zeros(2, dtype=torch.int64),
        values_BT=0 * ones_BT,
        baselines_B=torch.zeros(2, dtype=torch.float64),
        parts_BK=torch.zeros(2, len(recipe.options.get("parts", ())), dtype=torch.float64),
        logp_BT=-ones_BT,
        behaviour_BT=-ones_BT,
        sum_pi_squared_BT=0.5 * ones_BT,
    )
    estimate(recipe.estimator, inputs, gamma=recipe.gamma, lam=recipe.lam, whiten=recipe.whiten, options=recipe.options)
    find_loss(algorithm.loss.name).bind(algorithm.loss.arguments)
