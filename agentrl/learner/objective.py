"""The recipe's policy objective on one micro-batch: who is compared with whom, what is masked, what is added up.

    proximal       old (clipped ratio's denominator)      importance weights
    behaviour      behaviour                              1; for losses without a ratio current / behaviour
    recompute      the learner at the start of the step   start of the step / behaviour
    interpolate    between behaviour and current, by age  interpolated / behaviour

Dimensions: R rows of a micro-batch, T tokens of its longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.aggregation import Denominators, aggregate
from agentrl.algorithm.importance import importance_weights, interpolated_proximal
from agentrl.algorithm.kl import kl_estimate
from agentrl.algorithm.losses import BoundLoss, LossInputs, PolicyLoss, TokenLosses, find_loss
from agentrl.algorithm.rejection import kept
from agentrl.config.recipe import AlgorithmRecipe, ImportanceRecipe
from agentrl.learner.batch import MicroBatch

__all__ = ["Objective", "Terms", "weigh"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Terms:
    """What an objective came to on one micro-batch. Scalars are this micro-batch's share of the update's."""

    loss: Tensor  # with gradient
    policy: Tensor
    kl: Tensor
    token_losses: TokenLosses
    mask_RT: Tensor  # float: train mask after rejection
    weights_RT: Tensor  # importance weights; 0 where they are masked by bounds
    cut_RT: Tensor  # bool: weights that were truncated or masked


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Objective:
    """A recipe's objective at one step."""

    algorithm: AlgorithmRecipe
    method: PolicyLoss
    bound: BoundLoss  # the method with the recipe's arguments
    entropy_coefficient: float
    mean_weight: Tensor | None = None  # 0-d: the batch's mean importance weight, where weights are divided by it

    @classmethod
    def of(cls, algorithm: AlgorithmRecipe, *, entropy_coefficient: float, mean_weight: Tensor | None) -> Objective:
        """The recipe's, with what changes from step to step."""
        method = find_loss(algorithm.loss.name)
        bound = method.bind(algorithm.loss.arguments)
        return cls(algorithm=algorithm, method=method, bound=bound, entropy_coefficient=entropy_coefficient, mean_weight=mean_weight)

    def __call__(self, logp_RT: Tensor, entropy_RT: Tensor, micro: MicroBatch, denominators: Denominators) -> Terms:
        """The loss of a micro-batch.

        Args:
            logp_RT: of the current policy, with gradient. `entropy_RT` likewise.
        """
        algorithm, how = self.algorithm, self.method.aggregation or self.algorithm.aggregation
        old_RT, compared_RT = self._old(logp_RT, micro)
        mask_RT = micro.train_mask_RT * self._kept(compared_RT, micro)
        weights_RT, cut_RT = self._weights(compared_RT, micro)
        inputs = LossInputs(
            logp_BT=logp_RT,
            old_BT=old_RT,
            advantages_BT=micro.advantages_RT,
            mask_BT=mask_RT,
            weights_BT=weights_RT,
            selected_BT=micro.selected_RT,
        )
        token_losses = self.bound.losses(inputs)
        policy = aggregate(token_losses.values_BT, mask_RT, how=how, denominators=denominators)
        loss = policy
        if self.entropy_coefficient:  # without a bonus the entropy's gradient is not computed at all
            loss = policy - self.entropy_coefficient * aggregate(entropy_RT, mask_RT, how=how, denominators=denominators)
        kl = torch.zeros_like(policy)
        if algorithm.kl.where == "loss":
            kl = aggregate(kl_estimate(algorithm.kl.estimate, logp_RT, micro.reference_RT), mask_RT, how=how, denominators=denominators)
            loss = loss + algorithm.kl.coefficient * kl
        return Terms(loss=loss, policy=policy, kl=kl, token_losses=token_losses, mask_RT=mask_RT, weights_RT=weights_RT, cut_RT=cut_RT)

    def _old(self, logp_RT: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """The clipped ratio's denominator, and the policy that is compared with the behaviour."""
        match self.algorithm.proximal:
            case "behaviour":
                return micro.behaviour_RT, logp_RT.detach()
            case "recompute":
                return micro.proximal_RT, micro.proximal_RT
            case "interpolate":
                between_RT = interpolated_proximal(logp_RT.detach(), micro.behaviour_RT, micro.ages_RT)
                return between_RT, between_RT

    def _weights(self, compared_RT: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        if self.algorithm.proximal == "behaviour" and self.method.ratio:
            ones_RT = torch.ones_like(compared_RT)
            return ones_RT, ones_RT < 0
        weights_RT, cut_RT = weigh(compared_RT, micro.behaviour_RT, micro.loss_mask_RT, self.algorithm.importance)
        return weights_RT if self.mean_weight is None else weights_RT / self.mean_weight, cut_RT

    def _kept(self, compared_RT: Tensor, micro: MicroBatch) -> Tensor:
        keep_RT = torch.ones_like(compared_RT)
        for rule in self.algorithm.rejection:
            pair = (compared_RT, micro.behaviour_RT)
            keep_RT = keep_RT * kept(*pair, micro.loss_mask_RT, statistic=rule.statistic, low=rule.low, high=rule.high)
        return keep_RT


def weigh(compared_RT: Tensor, behaviour_RT: Tensor, mask_RT: Tensor, recipe: ImportanceRecipe) -> tuple[Tensor, Tensor]:
    """Importance weights as a recipe says, before they are brought to mean 1, and where they were cut."""
    return importance_weights(compared_RT, behaviour_RT, mask_RT, level=recipe.level, truncate=recipe.truncate, bounds=recipe.bounds)
