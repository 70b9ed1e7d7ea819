"""What the learner holds between steps: models, optimizers, and what adapts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from agentrl.learner.critic import CriticModel
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks
from agentrl.learner.reference import Reference
from agentrl.learner.throughput import StepWork

__all__ = ["Controllers", "LearnerState"]


@dataclass(kw_only=True, slots=True)
class Controllers:
    """What adapts over the run, outside of the models. Changed by the step, saved in every checkpoint; the same on every rank."""

    kl_coefficient: float | None = None  # of an adaptive KL penalty; None: the recipe's, unchanged
    learning_rate_scale: float = 1.0  # multiplies every learning rate, the critic's too


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LearnerState:
    """What a step changes, and where it runs."""

    policy: PolicyModel
    optimizer: torch.optim.AdamW  # of the policy's trained parameters: with LoRA, the adapters
    ranks: Ranks
    critic: CriticModel | None = None
    critic_optimizer: torch.optim.AdamW | None = None  # there with the critic
    reference: Reference | None = None  # frozen: in no optimizer and no checkpoint
    controllers: Controllers = field(default_factory=Controllers)
    work: StepWork = field(default_factory=StepWork)  # of the step going on
