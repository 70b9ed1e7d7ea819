"""What policy and critic share: a transformer read from a Hugging Face directory, the hidden states that tokens were generated from, FSDP.

Dimensions: B trajectories, T tokens, N wanted tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers.utils.logging import disable_progress_bar

from agentrl.config.attentions import PACKED_ATTENTIONS
from agentrl.errors import ConfigError
from agentrl.learner.attention import make_ready
from agentrl.learner.flops import ModelShape
from agentrl.learner.layout import Layout
from agentrl.learner.ranks import Ranks

__all__ = ["Backbone", "load_pretrained", "offloading", "precision"]

# Families whose layers end in an MLP of each token by itself.
DENSE_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

# By how much log-probs may differ, on the mean, between a packed row and the same sequences side by side. Sequences that see one another differ by
# one and more; kernels in bfloat16 by some hundredths.
KEPT_APART = {"float32": 1e-3, "bfloat16": 0.1}


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
    make_ready(attention)
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

    def __init__(self, transformer: Any, *, packed: bool = False) -> None:
        """With `packed`, trajectories pass end to end in one row instead of side by side."""
        self.packed = packed
        self._transformer = transformer
        self._shape: torch.Size  # [R, W] of the forward pass going on
        self._read_N: Tensor  # ... and the flat positions whose last hidden states are read
        self._spares = transformer.config.model_type in DENSE_FAMILIES
        if self._spares:
            self._spare_last_mlp()

    def states_before(self, token_ids_BT: Tensor, wanted_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states that the wanted tokens were generated from, and the flat positions of these tokens: [N, H] and [N].

        Args:
            token_ids_BT: right-padded.
            wanted_BT: bool. The first column cannot be wanted: nothing precedes it.
        """
        targets_N = wanted_BT.flatten().nonzero()[:, 0]
        if self.packed:
            boundaries = self._transformer.config._attn_implementation in PACKED_ATTENTIONS
            layout = Layout.packed(token_ids_BT, targets_N, boundaries=boundaries)
        else:
            layout = Layout.padded(token_ids_BT, targets_N)
        self.will_read(layout.token_ids_RW.shape, layout.read_N)
        # neither mask nor cache: with either, transformers would let packed sequences see one another without a word
        answer = self._transformer(input_ids=layout.token_ids_RW, attention_mask=None, use_cache=False, **layout.arguments)
        return answer.last_hidden_state.flatten(0, 1).index_select(0, self._read_N), targets_N

    def will_read(self, shape: torch.Size, positions_N: Tensor) -> None:
        """Say which flat positions of an [R, W] input are read after the next forward pass. What it answers elsewhere is wrong."""
        self._shape, self._read_N = shape, positions_N

    @torch.no_grad()
    def require_kept_apart(self, answer: Callable[[Tensor, Tensor], Tensor], ranks: Ranks, dtype: str) -> None:
        """Refuse a model that lets packed sequences see one another. Collective.

        Args:
            answer: the log-probs [B, T] of wanted tokens by the model this is the backbone of.

        Raises:
            ConfigError: naming the keys.
        """
        if not self.packed:
            return
        token_ids_BT = (torch.arange(1, 17, device=ranks.device) % self._transformer.config.vocab_size).view(2, 8)
        wanted_BT = torch.arange(8, device=ranks.device).expand(2, 8) > 0
        packed_BT = answer(token_ids_BT, wanted_BT)
        self.packed = False
        side_by_side_BT = answer(token_ids_BT, wanted_BT)
        self.packed = True
        apart = (packed_BT - side_by_side_BT).abs().mean().item()
        if not apart < KEPT_APART[dtype]:
            attention = self._transformer.config._attn_implementation
            raise ConfigError(
                f"log-probs of packed trajectories differ by {apart:.3g} from those of the same trajectories side by side: this family with"
                f" model.attention {attention} does not keep them apart. Set learner.packing=padded"
            )

    def model_shape(self, head: Tensor) -> ModelShape:
        """What a pass costs. `head`: what the states that are read are multiplied with."""
        layers = self._transformer.layers
        last = set(layers[-1].mlp.parameters()) if self._spares else set()
        return ModelShape.of(self._transformer.config, [p for p in layers.parameters() if p not in last], [*last, head])

    def shard(self, root: nn.Module, ranks: Ranks, dtype: str, *, offload: bool = False, compiled: bool = False) -> None:
        """Split the parameters over the ranks, layer by layer and the rest at `root`. The same at every number of ranks.

        Frozen parameters are kept in `dtype`, in which they are used anyway; trained ones stay in float32, and so do the sums of gradients.

        Args:
            dtype: of the computation, "float32" or "bfloat16".
            offload: parameters, gradients and with them the optimizer's moments stay in the host's memory between their uses.
            compiled: compile the layers, each by itself, for any shape; but for the last one where only a part of it is computed.
        """
        _place(root, ranks.device, offload=offload)
        for parameter in root.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, dtype))
        settings: dict[str, Any] = {"mesh": ranks.mesh, "mp_policy": precision(dtype), "offload_policy": offloading(offload)}
        layers = self._transformer.layers
        if compiled:
            for layer in layers[: -1 if self._spares else None]:
                layer.compile(dynamic=True)
        for layer in layers:
            fully_shard(layer, **settings)
        fully_shard(root, **settings | {"mp_policy": replace(precision(dtype), cast_forward_inputs=False)})  # temperatures keep their digits
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


def precision(dtype: str) -> MixedPrecisionPolicy:
    """Computation in `dtype`; parameters and the sums of gradients over ranks in float32."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if dtype == "bfloat16" else MixedPrecisionPolicy()


def offloading(offload: bool) -> OffloadPolicy:
    """Where parameters are between their uses."""
    return CPUOffloadPolicy() if offload else OffloadPolicy()


def _place(root: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Bring a model to its device; offloaded, its buffers only: FSDP brings a layer's parameters when they are used."""
    if not offload:
        root.to(device)
        return
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _reshard_root(root: Any, _: object, __: object) -> None:
    """After a pass without gradient, let go of the root's gathered parameters.

    FSDP keeps them for the backward pass, which reshards them. Where none comes they would take memory, hide the trained parameters
    from whoever asks the model for them, and be used by the next pass even if an update has come between.
    """
    if not torch.is_grad_enabled():
        root.reshard()
