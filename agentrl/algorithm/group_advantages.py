"""Advantages from whole trajectories: their rewards beside those of their group. B trajectories, G groups, K parts of the reward, T tokens.

Each is the same number on all generated tokens of a trajectory, but for `remax`. None is whitened here. A group of one has nothing to be compared
with: its mean counts as 0 and its deviation as 1, as in verl, so that its reward is its advantage where no other rule is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.advantage_inputs import AdvantageInputs, Advantages
from agentrl.algorithm.gae import reward_to_go

__all__ = ["dr_grpo", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "reinforce_plus_plus_baseline", "remax", "rloo"]

# Added to the standard deviation, as verl does; far below any spread of rewards that means something.
STD_EPS = 1e-6


def grpo(inputs: AdvantageInputs) -> Advantages:
    """(reward - mean of its group) / (unbiased standard deviation of its group + 1e-6) (Shao et al. 2024, section 4.1.2)."""
    return inputs.tiled(_Groups.of(inputs.groups_B).normalised(inputs.scores_B))


def dr_grpo(inputs: AdvantageInputs) -> Advantages:
    """Reward - mean of its group: without the division, which weighs questions by how even their answers are (Dr. GRPO, Liu et al. 2025)."""
    return inputs.tiled(_Groups.of(inputs.groups_B).centred(inputs.scores_B))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """Reward - mean of its group, to be whitened over the batch (Hu et al. 2025, REINFORCE++ with a baseline)."""
    return dr_grpo(inputs)


def rloo(inputs: AdvantageInputs, *, singleton: str = "reward") -> Advantages:
    """Reward - mean of the others of its group (Ahmadian et al. 2024): n / (n - 1) (reward - mean).

    Args:
        singleton: what a group of one gets: "reward" its reward (verl's `rloo`), "zero" nothing (verl's `rloo_vectorized`).

    Raises:
        ValueError: another `singleton`.
    """
    if singleton not in ("reward", "zero"):
        raise ValueError(f"singleton must be reward or zero, got {singleton!r}")
    groups = _Groups.of(inputs.groups_B)
    size_B = groups.sizes_G[inputs.groups_B]
    advantages_B = groups.centred(inputs.scores_B) * size_B / (size_B - 1).clamp(min=1)
    return inputs.tiled(advantages_B.masked_fill(size_B == 1, 0.0) if singleton == "zero" else advantages_B)


def opo(inputs: AdvantageInputs) -> Advantages:
    """Reward - mean of its group weighted by length: sum(length reward) / sum(length), lengths in generated tokens (Hao et al. 2025, OPO)."""
    groups = _Groups.of(inputs.groups_B)
    length_B = inputs.mask_BT.bool().sum(1).to(inputs.rewards_BT.dtype)
    baseline_G = groups.sums(length_B * inputs.scores_B) / groups.sums(length_B).clamp(min=1)
    return inputs.tiled(inputs.scores_B - baseline_G.masked_fill(groups.sizes_G == 1, 0.0)[inputs.groups_B])


def gpg(inputs: AdvantageInputs) -> Advantages:
    """alpha (reward - mean of its group), alpha = B / trajectories of the batch whose reward is not 0 (Chu et al. 2025, GPG).

    alpha as in verl 0.9.1. The paper's leaves out the groups whose rewards are all equal instead.
    """
    alpha = len(inputs.groups_B) / inputs.scores_B.count_nonzero().clamp(min=1)
    return inputs.tiled(alpha * _Groups.of(inputs.groups_B).centred(inputs.scores_B))


def grpo_passk(inputs: AdvantageInputs) -> Advantages:
    """For pass@k: the best of a group gets (its reward - the second best) / (deviation + 1e-6), the others 0 (verl's `grpo_passk`; Tang et al. 2025).

    Where several are best nobody gets anything. So it is with a group of one, which verl refuses.
    """
    groups, scores_B = _Groups.of(inputs.groups_B), inputs.scores_B
    by_score_B = scores_B.argsort(descending=True, stable=True)
    ranked_B = by_score_B[inputs.groups_B[by_score_B].argsort(stable=True)]  # group by group, the best first
    starts_G = groups.sizes_G.cumsum(0) - groups.sizes_G
    several_G = groups.sizes_G > 1
    best_G, second_G = ranked_B[starts_G[several_G]], ranked_B[starts_G[several_G] + 1]
    margin_G = (scores_B[best_G] - scores_B[second_G]) / (groups.deviations(scores_B)[several_G] + STD_EPS)
    return inputs.tiled(torch.zeros_like(scores_B).index_copy_(0, best_G, margin_G))


def gdpo(inputs: AdvantageInputs, *, parts: Sequence[str], weights: Sequence[float] | None = None) -> Advantages:
    """Each part of the reward as in `grpo`, then their weighted sum, to be whitened over the batch (Liu et al. 2026, GDPO).

    So a part with a small spread is not drowned by one with a large spread. The total reward plays no role.

    Args:
        parts: names of the columns of `inputs.parts_BK`.
        weights: of each part; None: 1 each.

    Raises:
        ValueError: not as many columns or weights as names.
    """
    parts_BK = inputs.parts_BK
    weights = [1.0] * len(parts) if weights is None else weights
    if parts_BK is None or not len(parts) == parts_BK.shape[1] == len(weights) > 0:
        columns = 0 if parts_BK is None else parts_BK.shape[1]
        raise ValueError(f"gdpo needs a weight and a column for each of its parts: {len(parts)} parts, {len(weights)} weights, {columns} columns")
    groups = _Groups.of(inputs.groups_B)
    normalised_BK = torch.stack([groups.normalised(part_B) for part_B in parts_BK.to(inputs.rewards_BT.dtype).unbind(1)], dim=1)
    return inputs.tiled(normalised_BK @ normalised_BK.new_tensor(weights))


def remax(inputs: AdvantageInputs) -> Advantages:
    """Reward to go, undiscounted - reward of the group's greedy episode (Li et al. 2024, ReMax).

    Raises:
        ValueError: there are no greedy episodes.
    """
    if inputs.baselines_B is None:
        raise ValueError("remax needs the reward of a greedy episode of each group")
    to_go_BT = reward_to_go(inputs.rewards_BT, inputs.mask_BT)
    return Advantages(advantages_BT=to_go_BT - inputs.baselines_B[:, None]).within(inputs.mask_BT)


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Statistics over the groups of a batch."""

    groups_B: Tensor
    sizes_G: Tensor  # int64; 0 for a number that no trajectory has

    @classmethod
    def of(cls, groups_B: Tensor) -> _Groups:
        return cls(groups_B=groups_B, sizes_G=groups_B.bincount())

    def sums(self, values_B: Tensor) -> Tensor:
        return values_B.new_zeros(len(self.sizes_G)).index_add_(0, self.groups_B, values_B)

    def centred(self, values_B: Tensor) -> Tensor:
        """Each value without the mean of its group."""
        mean_G = self.sums(values_B) / self.sizes_G.clamp(min=1)
        return values_B - mean_G.masked_fill(self.sizes_G == 1, 0.0)[self.groups_B]

    def deviations(self, values_B: Tensor) -> Tensor:
        """Unbiased standard deviation of each group."""
        square_G = self.sums(self.centred(values_B).square())
        return (square_G / (self.sizes_G - 1).clamp(min=1)).sqrt().masked_fill(self.sizes_G == 1, 1.0)

    def normalised(self, values_B: Tensor) -> Tensor:
        return self.centred(values_B) / (self.deviations(values_B)[self.groups_B] + STD_EPS)
