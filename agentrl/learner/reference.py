"""The reference policy that KL is measured against. It is never trained, and in no checkpoint. B trajectories, T tokens."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks

__all__ = ["Reference"]


class Reference:
    """Log-probs of a frozen copy of a model, sharded as the policy is; or, with LoRA, of the policy's base: adapters off, no copy."""

    def __init__(self, model: PolicyModel) -> None:
        """The model's adapters, where it has any, are off in every call."""
        self.model = model

    @classmethod
    def load(
        cls,
        directory: Path | str,
        ranks: Ranks,
        *,
        dtype: str = "float32",
        attention: str = "sdpa",
        packed: bool = False,
        offload: bool = False,
        compiled: bool = False,
    ) -> Reference:
        """A frozen copy of the model in a directory, kept in `dtype` ("float32" or "bfloat16"); the rest as of `PolicyModel`.

        Raises:
            ConfigError: as `PolicyModel.load`.
        """
        model = PolicyModel.load(directory, attention=attention, packed=packed).requires_grad_(False).eval()
        model.shard(ranks, dtype, offload=offload, compiled=compiled)
        return cls(model)

    @torch.no_grad()
    def logprobs(self, token_ids_BT: Tensor, wanted_BT: Tensor, temperature_B: Tensor) -> Tensor:
        """log p(token | tokens before it) at temperature: [B, T] in float32, 0 where not wanted, without gradient.

        Collective: every rank makes as many calls. Not between a forward pass of the policy and its backward pass.

        Args:
            token_ids_BT: right-padded.
            wanted_BT: bool, the first column all false.
        """
        adapters = self.model.adapters
        with nullcontext() if adapters is None else adapters.off(self.model.causal):
            logp_BT: Tensor = self.model(token_ids_BT, wanted_BT, temperature_B)[0]
        return logp_BT
