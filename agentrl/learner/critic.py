"""The critic: a transformer with a scalar head that says what a state is worth. B trajectories, T tokens, N wanted tokens, H hidden."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from agentrl.errors import ConfigError
from agentrl.learner.backbone import Backbone, load_pretrained, offloading, precision
from agentrl.learner.flops import ModelShape
from agentrl.learner.ranks import Ranks

__all__ = ["CriticModel"]

# What the first architecture in a config.json ends with -> the class that reads it.
REWARD_MODELS = {"ForSequenceClassification": AutoModelForSequenceClassification, "ForTokenClassification": AutoModelForTokenClassification}


class CriticModel(nn.Module):
    """Values of the states that tokens were generated from. The root of its own FSDP; its parameters have the names of a
    `ForTokenClassification` model of its family (`model.`..., `score.`).

    The head is computed in float32 whatever the model's dtype: bfloat16 would round values to 1 part in 256.
    """

    def __init__(self, transformer: Any, head: nn.Linear | None = None, *, packed: bool = False) -> None:
        """With a new head, which is zero, every value begins at 0. With `packed`, trajectories pass end to end in one row."""
        super().__init__()
        self.model = transformer
        self.score = head or nn.Linear(transformer.config.hidden_size, 1, bias=False)
        if head is None:
            nn.init.zeros_(self.score.weight)
        self._backbone = Backbone(transformer, packed=packed)

    @classmethod
    def load(cls, directory: Path | str, *, attention: str = "sdpa", gradient_checkpointing: bool = False, packed: bool = False) -> CriticModel:
        """Read a causal model, which gets a new head, or a reward model: a classifier of sequences or tokens with one label, whose head
        is taken over. In float32 on the CPU.

        Raises:
            ConfigError: it is neither, or does not load.
        """
        reads: dict[str, Any] = {"attention": attention, "gradient_checkpointing": gradient_checkpointing}
        architecture = _architecture(directory)
        if architecture.endswith("ForCausalLM"):
            return cls(load_pretrained(AutoModel, directory, **reads), packed=packed).train()
        kind = next((kind for ending, kind in REWARD_MODELS.items() if architecture.endswith(ending)), None)
        if kind is None:
            raise ConfigError(f"critic: {directory} is a {architecture}; expected ForCausalLM, or a reward model: one of {', '.join(REWARD_MODELS)}")
        reward_model = load_pretrained(kind, directory, **reads)
        heads = [module for module in reward_model.children() if isinstance(module, nn.Linear)]
        if len(heads) != 1 or heads[0].out_features != 1:
            told = [f"{head.in_features} to {head.out_features}" for head in heads]
            raise ConfigError(f"critic: {directory} has heads {told}; expected a single one with one label, which becomes the value head")
        return cls(reward_model.base_model, heads[0], packed=packed).train()

    def forward(self, token_ids_BT: Tensor, wanted_BT: Tensor) -> Tensor:
        """The value of the state each wanted token was generated from: [B, T] in float32, 0 where not wanted.

        Args:
            token_ids_BT: right-padded.
            wanted_BT: bool. The first column cannot be wanted: nothing precedes it.
        """
        hidden_NH, _ = self._backbone.states_before(token_ids_BT, wanted_BT)
        values_N: Tensor = self.score(hidden_NH.float())[:, 0]
        return values_N.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT, values_N)

    @property
    def shape(self) -> ModelShape:
        """What a pass costs."""
        return self._backbone.model_shape(self.score.weight)

    def shard(self, ranks: Ranks, dtype: str, *, offload: bool = False, compiled: bool = False) -> None:
        """Split the parameters over the ranks: layer by layer, the head, and the rest at the root. The same at every number of ranks.

        Args:
            offload: parameters stay in the host's memory between their uses. `compiled`: compile the layers.
        """
        if not offload:
            self.score.to(ranks.device)
        fully_shard(self.score, mesh=ranks.mesh, mp_policy=precision("float32"), offload_policy=offloading(offload))
        self._backbone.shard(self, ranks, dtype, offload=offload, compiled=compiled)

    def sync_gradients(self, now: bool) -> None:
        """Whether the next backward pass adds the gradients of all ranks: only at the last micro-batch of an update."""
        root: Any = self  # fully_shard has made it an FSDPModule
        root.set_requires_gradient_sync(now)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by name, in the model's order."""
        yield from self.named_parameters()


def _architecture(directory: Path | str) -> str:
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ConfigError(f"critic: there is no model in {directory}: {error}") from error
    return str((config.architectures or ["model of no known architecture"])[0])
