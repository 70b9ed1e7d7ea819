"""A learner with everything beside the policy: adapters, a critic, a reference. Trained by hand, without the training step."""

from __future__ import annotations

from typing import Any

import torch
from learner_scene import VOCABULARY, tiny_recipe
from torch import Tensor

from agentrl.config.recipe import Recipe
from agentrl.learner.learner import Learner
from agentrl.learner.optimizer import apply_gradients

ROWS, TOKENS = 4, 8

# Three rows of an adapter, and the one row of the value head, cannot be dealt to two ranks evenly.
LORA = {"rank": 3, "alpha": 6.0}


def full_recipe(**overrides: Any) -> Recipe:
    """Adapters, a critic and a reference."""
    wanted = {
        "model__lora": LORA,
        "critic": {"learning_rate": 1e-2},
        "algorithm__advantage": {"estimator": "gae"},
        "algorithm__kl": {"where": "loss"},
    }
    return tiny_recipe(**wanted | overrides)


def rows(seed: int) -> tuple[Tensor, Tensor]:
    """Token ids and the mask of wanted tokens, [ROWS, TOKENS] each."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
    wanted_BT = torch.rand(ROWS, TOKENS, generator=generator) < 0.6
    wanted_BT[:, 0] = False
    wanted_BT[:, 1] = True
    return ids_BT, wanted_BT


def play(learner: Learner, steps: range) -> list[list[float]]:
    """One update of policy and critic a step, each rank on its rows. Of every step, before its update: sums over the wanted tokens of
    the policy's and the reference's log-probs and of the values' errors."""
    state, seen = learner.state, []
    assert state.critic is not None
    assert state.critic_optimizer is not None
    for step in steps:
        ids_BT, wanted_BT = (whole[state.ranks.rank :: state.ranks.size] for whole in rows(step))
        ones_B, total = torch.ones(len(ids_BT)), rows(step)[1].sum()
        reference_BT = state.reference.logprobs(ids_BT, wanted_BT, ones_B) if state.reference else torch.zeros(ids_BT.shape)
        logp_BT, _ = state.policy(ids_BT, wanted_BT, ones_B)
        torch.autograd.backward(-logp_BT.sum() / total * state.ranks.size)
        errors_BT = (state.critic(ids_BT, wanted_BT) - 1.0) * wanted_BT
        torch.autograd.backward(errors_BT.square().sum() / total * state.ranks.size)
        seen.append(state.ranks.sum(torch.stack([logp_BT.detach().sum(), reference_BT.sum(), errors_BT.detach().sum()])).tolist())
        for optimizer, name in ((state.optimizer, "learner"), (state.critic_optimizer, "critic")):
            assert apply_gradients(optimizer, loss=0.0, learning_rate=1e-2, max_grad_norm=1.0, prefix=name)
    return seen


def gathered(learner: Learner) -> dict[str, Tensor]:
    """What is published."""
    return {name: tensor for bucket in learner.gather(1 << 20) for name, tensor in bucket}
