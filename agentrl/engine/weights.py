"""Live weights: Hugging Face names over fused storage, read from safetensors, replaced in place, checksummed.

The query, key and value projections of a layer lie in one matrix, gate and up in another: one product each instead of five. The named
tensors are views into them, so replacing a named tensor replaces what is computed with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from agentrl.collective import tensor_checksum
from agentrl.engine.architecture import ModelConfig
from agentrl.errors import EngineError

__all__ = ["LayerWeights", "Weights", "read_tensors"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer. D hidden, H heads, K key-value heads, E head size, F intermediate."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2K) E, D]
    qkv_bias: Tensor | None  # [(H + 2K) E]
    qk_norm: Tensor | None  # of a query's head, then of a key's [2, E]
    out: Tensor  # [D, H E]
    out_bias: Tensor | None  # [D]
    post_norm: Tensor  # [D]
    gate_up: Tensor  # [2F, D]
    down: Tensor  # [D, F]


class Weights:
    """The parameters of one model. `named` holds them by Hugging Face name; writing into those writes into the layers."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise EngineError(f"device is {device!r}, but torch {torch.__version__} sees no GPU here")
        self.config = config
        self.named: dict[str, Tensor] = {}
        self._dtype, self._device = dtype, device
        self.embedding = self._new("model.embed_tokens.weight")
        self.layers = tuple(self._layer(f"model.layers.{index}.") for index in range(config.layers))
        self.norm = self._new("model.norm.weight")
        self.head = self.embedding if config.tied else self._new("lm_head.weight")

    @classmethod
    def load(cls, model_dir: Path, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Weights:
        """The weights of a Hugging Face directory, cast to `dtype`."""
        weights = cls(config, dtype=dtype, device=device)
        weights.replace(weights.checked(read_tensors(model_dir), complete=True))
        return weights

    def checked(self, tensors: Mapping[str, Tensor], *, complete: bool) -> dict[str, Tensor]:
        """`tensors` without a tied head, if every name and shape is the model's (and, if `complete`, none is missing).

        Raises:
            EngineError: names the first that does not fit.
        """
        kept = {name: tensor for name, tensor in tensors.items() if not self.is_tied_head(name)}
        for name, tensor in kept.items():
            self.check(name, tuple(tensor.shape))
        missing = sorted(self.named.keys() - kept.keys()) if complete else []
        if missing:
            raise EngineError(f"{len(missing)} parameters are missing, the first is {missing[0]!r}")
        return kept

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise EngineError unless `name` is a parameter of this shape."""
        if self.is_tied_head(name):
            expected = tuple(self.embedding.shape)
        elif name in self.named:
            expected = tuple(self.named[name].shape)
        else:
            raise EngineError(f"parameter {name!r} is not one of this model's {len(self.named)}")
        if shape != expected:
            raise EngineError(f"parameter {name!r} must have shape {list(expected)}, got {list(shape)}")

    def is_tied_head(self, name: str) -> bool:
        """Whether `name` is the head of a model whose head is its embedding: accepted from others, never stored."""
        return self.config.tied and name == "lm_head.weight"

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy checked tensors into the live ones."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.named[name].copy_(tensor)

    def alike(self) -> Weights:
        """Other ones of the same shape, all 0."""
        return Weights(self.config, dtype=self._dtype, device=self._device)

    def take_over(self, spare: Weights) -> None:
        """Have the values of `spare`, which afterwards holds any. On a CPU nothing is copied: they exchange their memory."""
        if self._device != "cpu":  # a captured graph names the memory it works on
            self.replace(spare.named)
            return
        for name in ("named", "embedding", "layers", "norm", "head"):
            mine, theirs = getattr(self, name), getattr(spare, name)
            setattr(self, name, theirs)
            setattr(spare, name, mine)

    def checksums(self) -> dict[str, str]:
        """Name to checksum of its bytes as they are computed with."""
        return {name: tensor_checksum(tensor) for name, tensor in self.named.items()}

    def _layer(self, prefix: str) -> LayerWeights:
        config, attention = self.config, f"{prefix}self_attn."
        return LayerWeights(
            input_norm=self._new(f"{prefix}input_layernorm.weight"),
            qkv=self._new(*(f"{attention}{name}_proj.weight" for name in "qkv")),
            qkv_bias=self._new(*(f"{attention}{name}_proj.bias" for name in "qkv")) if config.qkv_bias else None,
            qk_norm=self._new(f"{attention}q_norm.weight", f"{attention}k_norm.weight").view(2, -1) if config.qk_norm else None,
            out=self._new(f"{attention}o_proj.weight"),
            out_bias=self._new(f"{attention}o_proj.bias") if config.out_bias else None,
            post_norm=self._new(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._new(f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight"),
            down=self._new(f"{prefix}mlp.down_proj.weight"),
        )

    def _new(self, *names: str) -> Tensor:
        """One tensor that holds the parameters `names`, stacked along their first dimension."""
        shapes = self.config.parameters()
        rows = [shapes[name][0] for name in names]
        fused = torch.zeros((sum(rows), *shapes[names[0]][1:]), dtype=self._dtype, device=self._device)
        self.named |= zip(names, torch.split(fused, rows), strict=True)
        return fused


def read_tensors(model_dir: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face directory's safetensors files.

    Raises:
        EngineError: there are none, or one is torn.
    """
    index = model_dir / "model.safetensors.index.json"
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
        tensors: dict[str, Tensor] = {}
        for file in files:
            tensors |= load_file(model_dir / file)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise EngineError(f"{model_dir}: weights cannot be read: {error}") from error
    return tensors
