"""Group-relative advantages. B trajectories."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["group_relative_advantages"]

# Added to the standard deviation, as verl does; far below any spread of rewards that means something.
STD_EPS = 1e-6


def group_relative_advantages(rewards_B: Tensor, groups_B: Tensor, *, normalise_by_std: bool) -> Tensor:
    """GRPO's outcome advantage: (reward - mean of its group) / (standard deviation of its group + 1e-6).

    The standard deviation is unbiased (n - 1). A group of one has mean 0 and deviation 1, as in verl: its reward is its advantage.

    Args:
        rewards_B: total reward of each trajectory.
        groups_B: group of each trajectory, integers 0..G-1 in any order.
        normalise_by_std: False leaves out the division (Dr. GRPO, Liu et al. 2025).

    Returns:
        Advantages, [B]: the same for every generated token of a trajectory (Shao et al. 2024, section 4.1.2).
    """
    groups = int(groups_B.max()) + 1 if len(groups_B) else 0
    count_G = rewards_B.new_zeros(groups).index_add_(0, groups_B, torch.ones_like(rewards_B))
    mean_G = rewards_B.new_zeros(groups).index_add_(0, groups_B, rewards_B) / count_G.clamp(min=1)
    alone_G = count_G == 1
    centred_B = rewards_B - mean_G.masked_fill(alone_G, 0.0)[groups_B]
    if not normalise_by_std:
        return centred_B
    square_G = rewards_B.new_zeros(groups).index_add_(0, groups_B, centred_B.square())
    std_G = (square_G / (count_G - 1).clamp(min=1)).sqrt().masked_fill(alone_G, 1.0)
    return centred_B / (std_G[groups_B] + STD_EPS)
