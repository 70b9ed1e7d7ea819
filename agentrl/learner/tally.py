"""Sums over the tokens of one update: over its micro-batches, then over the ranks. Only then are they divided."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.importance import MAX_LOG_RATIO, effective_sample_share
from agentrl.algorithm.kl import k1, k3
from agentrl.algorithm.losses import LossStats
from agentrl.learner.batch import MicroBatch
from agentrl.learner.ranks import Ranks
from agentrl.record import record

__all__ = ["Tally"]

_SUMS = (
    *("loss", "policy_loss", "entropy", "generated", "tokens", "clipped_low", "clipped_high", "importance", "truncated"),
    *("k1", "k3", "ratio", "ratio_squared"),
)


class Tally:
    """What an update's micro-batches add up to.

    Ratios, KL and effective sample size compare the behaviour policy with the learner as it is when the micro-batch passes: at the first
    update of a step that is the learner the step began with. Tokens of trajectories that were not passed through the model, because they
    could contribute no gradient, are in none of these.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        self._extremes = torch.full((2,), -torch.inf, dtype=torch.float64)  # largest ratio, and minus the smallest

    @torch.no_grad()
    def add(self, loss: Tensor, policy_loss: Tensor, logp_RT: Tensor, entropy_RT: Tensor, stats: LossStats, micro: MicroBatch) -> None:
        """Add one micro-batch of this rank."""
        trained = micro.train_mask_RT > 0
        logp, behaviour = logp_RT[trained], micro.behaviour_RT[trained]
        ratio = (logp - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        gap = (k1(behaviour, logp).sum(), k3(behaviour, logp).sum(), ratio.sum(), ratio.square().sum())
        losses = (loss, policy_loss, entropy_RT.sum(), micro.loss_mask_RT.sum())
        counts = (stats.tokens, stats.clipped_low, stats.clipped_high, stats.importance, stats.truncated)
        self._sums += torch.stack([value.double() for value in (*losses, *counts, *gap)]).cpu()
        if len(ratio):
            self._extremes = torch.maximum(self._extremes, torch.stack([ratio.max(), -ratio.min()]).double().cpu())

    def reduce(self) -> None:
        """Add up the ranks. Collective."""
        self._sums = self._ranks.sum(self._sums)
        self._extremes = self._ranks.max(self._extremes)

    @property
    def loss(self) -> float:
        """The update's loss; after `reduce` of all ranks."""
        return self["loss"]

    def __getitem__(self, name: str) -> float:
        return self._sums[_SUMS.index(name)].item()

    def record_update(self, *, decoupled: bool) -> None:
        """Record what every update has."""
        tokens, generated = self["tokens"], self["generated"]
        record("learner/loss", self["loss"])
        record("learner/policy_loss", self["policy_loss"])
        record("learner/entropy", self["entropy"] / max(generated, 1), weight=generated)
        record("learner/clip_low_share", self["clipped_low"] / max(tokens, 1), weight=tokens)
        record("learner/clip_high_share", self["clipped_high"] / max(tokens, 1), weight=tokens)
        if decoupled:
            record("learner/importance_mean", self["importance"] / max(tokens, 1), weight=tokens)
            record("learner/importance_truncated_share", self["truncated"] / max(tokens, 1), weight=tokens)

    def record_gap(self) -> None:
        """Record how far the learner is from the behaviour policy; for the first update of a step."""
        tokens = self["tokens"]
        if tokens == 0:
            return
        for name in ("k1", "k3"):
            record(f"learner/kl_{name}", self[name] / tokens)
        sums = torch.tensor([self["ratio"], self["ratio_squared"], tokens], dtype=torch.float64)
        record("learner/ess", effective_sample_share(*sums).item())
        record("learner/ratio_mean", self["ratio"] / tokens)
        record("learner/ratio_max", self._extremes[0].item())
        record("learner/ratio_min", -self._extremes[1].item())
