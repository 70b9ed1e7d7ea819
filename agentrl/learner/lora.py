"""LoRA: low-rank adapters beside frozen linear layers (Hu et al. 2021), made and computed by peft, the extra `lora`.

A layer's weight W [O, I] acts as W + alpha / rank * up [O, R] down [R, I]; `up` begins at zero. Names of parameters, by example:

    of the model          model.layers.0.self_attn.q_proj.weight
    with adapters         model.layers.0.self_attn.q_proj.base_layer.weight        frozen
                          model.layers.0.self_attn.q_proj.lora_A.default.weight    down, trained
                          model.layers.0.self_attn.q_proj.lora_B.default.weight    up, trained
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentrl.errors import ConfigError

if TYPE_CHECKING:  # so that a model needs nothing of what recipes are made of
    from agentrl.config.recipe import LoraRecipe

__all__ = ["Adapters", "base_fingerprint"]

_NAME = "default"  # of the adapter; peft can hold several
_DOWN, _UP = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"

# Of each weight, its first elements tell which model it is of: training changes nearly all of them.
FINGERPRINT_ELEMENTS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapters:
    """What is known of the adapters in a model."""

    rank: int
    scaling: float  # alpha / rank
    dropout: float = field(compare=False)  # of no account in what the adapters are
    base: str  # `base_fingerprint` of the weights they belong to

    @classmethod
    def attach(cls, causal: Any, recipe: LoraRecipe) -> Adapters:
        """Put adapters into a causal model, in place, and freeze all else. The model answers as before until they are trained.

        Raises:
            ConfigError: peft is not installed, the model has no such layers, or adapters there would have no effect or could not be merged.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ConfigError(f"model.lora needs peft, which is not installed: pip install 'agentrl[lora]' ({error})") from error
        base = base_fingerprint(causal.named_parameters())
        config = LoraConfig(r=recipe.rank, lora_alpha=recipe.alpha, lora_dropout=recipe.dropout, target_modules=recipe.target_modules)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # about tied layers, which are refused below
                inject_adapter_in_model(config, causal, adapter_name=_NAME)
        except ValueError as error:  # no layer of these names, or one that peft has no adapters for
            raise ConfigError(f"model.lora.target_modules {recipe.target_modules!r}: {error}") from error
        _refuse_others(causal)
        return cls(rank=recipe.rank, scaling=recipe.alpha / recipe.rank, dropout=recipe.dropout, base=base)

    def merged(self, base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The base's weights with the adapters added, under the model's own names.

        Args:
            base: whole weights by their names, with adapters in the model or without.
            adapters: whole `lora_A` and `lora_B` weights by name.
        """
        for name, weight in base:
            plain = name.replace(".base_layer.", ".")
            layer = plain.removesuffix(".weight")
            if layer + _DOWN in adapters:
                weight = weight.float() + (adapters[layer + _UP] @ adapters[layer + _DOWN]) * self.scaling
            yield plain, weight

    @contextmanager
    def off(self, causal: Any) -> Iterator[None]:
        """Within it the model answers as its base. Not between a forward pass and its backward pass.

        The adapters are computed and multiplied by 0: switching them off in peft takes `requires_grad` from them, which FSDP has looked
        at when it first gathered them.
        """
        from peft.tuners.lora import LoraLayer

        layers = [module for module in causal.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            layer.set_scale(_NAME, 0.0)
        try:
            yield
        finally:
            for layer in layers:
                layer.set_scale(_NAME, 1.0)


def base_fingerprint(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Tells apart the weights that adapters may be put on: of every weight its name, shape and first elements, in float32."""
    crc = 0
    for name, weight in weights:
        first = weight.detach().flatten()[:FINGERPRINT_ELEMENTS].to(device="cpu", dtype=torch.float32)
        crc = zlib.crc32(first.numpy().tobytes(), zlib.crc32(f"{name} {tuple(weight.shape)}".encode(), crc))
    return f"{crc:08x}"


def _refuse_others(causal: Any) -> None:
    """Of the layers that were given adapters, refuse the output layer (the learner uses its weight alone) and all that are not linear."""
    from peft.tuners.lora import LoraLayer

    for name, module in causal.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if module is causal.get_output_embeddings():
            raise ConfigError(f"model.lora.target_modules takes in {name}, the output layer: adapters there are not supported, leave it out")
        if type(module.get_base_layer()) is not nn.Linear:
            raise ConfigError(f"model.lora.target_modules takes in {name}, a {type(module.get_base_layer()).__name__}: linear layers only")
