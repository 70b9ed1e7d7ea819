"""Sums over the tokens of one update: over its micro-batches, then over the ranks. Only then are they divided."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithm.gap import GAP_EXTREMES, GAP_SUMS, gap_metrics, gap_sums
from agentrl.algorithm.kl import k3
from agentrl.learner.batch import MicroBatch
from agentrl.learner.objective import Terms
from agentrl.learner.ranks import Ranks
from agentrl.record import record

__all__ = ["CriticTally", "PolicyTally"]

_SUMS = (
    *("loss", "policy_loss", "kl_loss", "entropy", "generated", "trained"),
    *("tokens", "clipped_low", "clipped_high", "capped", "importance", "truncated", "kl_reference_k3"),
)


class PolicyTally:
    """What the micro-batches of a policy update add up to.

    The gap compares the behaviour policy with the learner as it is when the micro-batch passes: at the first update of a step that is the
    learner the step began with. Tokens of trajectories that were not passed through the model, because they could contribute no gradient,
    are in none of these.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        self._gap = torch.zeros(len(GAP_SUMS), dtype=torch.float64)
        self._extremes = torch.full((len(GAP_EXTREMES),), -torch.inf, dtype=torch.float64)

    @torch.no_grad()
    def add(self, terms: Terms, logp_RT: Tensor, entropy_RT: Tensor, micro: MicroBatch) -> None:
        """Add one micro-batch of this rank."""
        mask_RT, losses = terms.mask_RT, terms.token_losses
        sums = (
            *(terms.loss, terms.policy, terms.kl, entropy_RT.sum(), micro.loss_mask_RT.sum(), micro.train_mask_RT.sum(), mask_RT.sum()),
            *((flags_RT * mask_RT).sum() for flags_RT in (losses.clipped_low_BT, losses.clipped_high_BT, losses.capped_BT)),
            *((terms.weights_RT * mask_RT).sum(), (terms.cut_RT * mask_RT).sum()),
            (k3(logp_RT, micro.reference_RT) * mask_RT).sum(),
        )
        self._sums += torch.stack([value.double() for value in sums]).cpu()
        gap, extremes = gap_sums(logp_RT, micro.behaviour_RT, micro.train_mask_RT * micro.generated_RT)
        self._gap += gap.cpu()
        self._extremes = torch.maximum(self._extremes, extremes.cpu())

    def reduce(self) -> None:
        """Add up the ranks. Collective."""
        self._sums, self._gap = self._ranks.sum(self._sums), self._ranks.sum(self._gap)
        self._extremes = self._ranks.max(self._extremes)

    @property
    def loss(self) -> float:
        """The update's loss; after `reduce` of all ranks."""
        return self["loss"]

    def __getitem__(self, name: str) -> float:
        return self._sums[_SUMS.index(name)].item()

    def record_update(self, *, weighted: bool, rejects: bool, reference: bool) -> None:
        """Record what every update has.

        Args:
            weighted: it has importance weights. `rejects`: tokens are rejected by them. `reference`: there is a reference policy.
        """
        tokens, generated = self["tokens"], self["generated"]
        record("learner/loss", self["loss"])
        record("learner/policy_loss", self["policy_loss"])
        record("learner/entropy", self["entropy"] / max(generated, 1), weight=generated)
        shares = {"clip_low_share": "clipped_low", "clip_high_share": "clipped_high", "capped_share": "capped"}
        if weighted:
            shares |= {"importance_mean": "importance", "importance_truncated_share": "truncated"}
        if reference:
            shares |= {"kl_reference_k3": "kl_reference_k3"}
            record("learner/kl_loss", self["kl_loss"])
        for metric, name in shares.items():
            record(f"learner/{metric}", self[name] / max(tokens, 1), weight=tokens)
        if rejects:
            record("learner/rejected_share", 1 - tokens / max(self["trained"], 1), weight=self["trained"])

    def record_gap(self) -> None:
        """Record how far the learner is from the behaviour policy; for the first update of a step."""
        for name, value in gap_metrics(self._gap, self._extremes).items():
            record(f"learner/{name}", value)


class CriticTally:
    """What the micro-batches of a critic's update add up to."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sums = torch.zeros(3, dtype=torch.float64)  # loss, clipped tokens, tokens

    @torch.no_grad()
    def add(self, loss: Tensor, clipped_RT: Tensor, micro: MicroBatch) -> None:
        """Add one micro-batch of this rank."""
        sums = (loss, (clipped_RT & micro.critic_mask_RT).sum(), micro.critic_mask_RT.sum())
        self._sums += torch.stack([value.double() for value in sums]).cpu()

    def reduce(self) -> None:
        """Add up the ranks. Collective."""
        self._sums = self._ranks.sum(self._sums)

    @property
    def loss(self) -> float:
        """The update's loss; after `reduce` of all ranks."""
        return self._sums[0].item()

    def record_update(self) -> None:
        """Record the loss and how much of it was clipped."""
        tokens = self._sums[2].item()
        record("critic/loss", self.loss)
        record("critic/clip_share", self._sums[1].item() / max(tokens, 1), weight=tokens)
