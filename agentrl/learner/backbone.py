"""What policy and critic share: a transformer read from a Hugging Face directory, the hidden states that tokens were generated from, FSDP.

Dimensions: B trajectories, T tokens, N wanted tokens, H hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.utils.logging import disable_progress_bar

from agentrl.errors import ConfigError
from agentrl.learner.ranks import Ranks

__all__ = ["Backbone", "load_pretrained"]

# Families whose layers end in an MLP of each token by itself.
DENSE_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def load_pretrained(kind: Any, directory: Path | str, *, attention: str, gradient_checkpointing: bool = False) -> Any:
    """A transformers model in float32 on the CPU, without dropout in its attention.

    Buffers outside the state dict (rotary frequencies) are computed here, with the weights; a model made on the meta device would
    have to compute them again.

    Args:
        kind: the class whose `from_pretrained` reads it, e.g. `AutoModelForCausalLM`.
        directory: a directory, or the name of a model in the hub's local cache.

    Raises:
        ConfigError: there is no model that loads.
    """
    disable_progress_bar()
    try:
        model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention, local_files_only=True, attention_dropout=0.0)
    except (OSError, ValueError, ImportError) as error:  # what transformers raises for files, architectures, flash attention
        raise ConfigError(f"the model in {directory} cannot be loaded with model.attention {attention}: {error}") from error
    if gradient_checkpointing:
        newer_name = getattr(model, "activation_checkpointing_enable", None)
        (newer_name or model.gradient_checkpointing_enable)({"use_reentrant": False})
    return model


class Backbone:
    """The transformer without its head. Not a module: the model that has it registers the transformer under a name of its own."""

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer
        self._shape: torch.Size  # [B, T] of the forward pass going on
        self._read_N: Tensor  # ... and the flat positions whose last hidden states are read
        if transformer.config.model_type in DENSE_FAMILIES:
            self._spare_last_mlp()

    def states_before(self, token_ids_BT: Tensor, wanted_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states that the wanted tokens were generated from, and the flat positions of these tokens: [N, H] and [N].

        Args:
            token_ids_BT: right-padded. Attention is causal and positions count from the left, so padding needs no mask.
            wanted_BT: bool. The first column cannot be wanted: nothing precedes it.
        """
        targets_N = wanted_BT.flatten().nonzero()[:, 0]
        self.will_read(wanted_BT.shape, targets_N - 1)  # the token at t is generated from the state at t - 1
        hidden_BTH = self._transformer(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        return hidden_BTH.flatten(0, 1).index_select(0, self._read_N), targets_N

    def will_read(self, shape: torch.Size, positions_N: Tensor) -> None:
        """Say which flat positions of a [B, T] batch are read after the next forward pass. What it answers elsewhere is wrong."""
        self._shape, self._read_N = shape, positions_N

    def shard(self, root: nn.Module, ranks: Ranks, dtype: str) -> None:
        """Split the parameters over the ranks, layer by layer and the rest at `root`. The same at every number of ranks.

        Frozen parameters are kept in `dtype`, in which they are used anyway; trained ones stay in float32.

        Args:
            dtype: of the computation, "float32" or "bfloat16".
        """
        root.to(ranks.device)
        for parameter in root.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, dtype))
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        precision = half if dtype == "bfloat16" else MixedPrecisionPolicy()
        for layer in self._transformer.layers:
            fully_shard(layer, mesh=ranks.mesh, mp_policy=precision)
        fully_shard(root, mesh=ranks.mesh, mp_policy=precision)
        root.register_forward_hook(_reshard_root)  # after FSDP's own

    def _spare_last_mlp(self) -> None:
        """Run the last layer's MLP only where its output is read: what it adds elsewhere never is.

        Generated tokens are a fifth to a third of a search trajectory, and the MLP two thirds of a layer.
        """

        def pick(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            return inputs[0].flatten(0, 1).index_select(0, self._read_N)

        def put_back(_: nn.Module, __: tuple[Tensor], output_NH: Tensor) -> Tensor:
            blank = output_NH.new_zeros(self._shape[0] * self._shape[1], output_NH.shape[1])
            return blank.index_copy(0, self._read_N, output_NH).view(*self._shape, -1)

        mlp = self._transformer.layers[-1].mlp
        mlp.register_forward_pre_hook(pick)
        mlp.register_forward_hook(put_back)


def _reshard_root(root: Any, _: object, __: object) -> None:
    """After a pass without gradient, let go of the root's gathered parameters.

    FSDP keeps them for the backward pass, which reshards them. Where none comes they would take memory, hide the trained parameters
    from whoever asks the model for them, and be used by the next pass even if an update has come between.
    """
    if not torch.is_grad_enabled():
        root.reshard()
