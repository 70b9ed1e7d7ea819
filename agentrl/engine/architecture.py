"""The architectures this engine computes, as read from a Hugging Face directory: sizes, parameter names, stop tokens.

qwen2   biases of the query, key and value projections
qwen3   no biases by default; each head's queries and keys are normalised before they are rotated
llama   no biases by default; rotary embeddings may be stretched
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.engine.rope import Rope
from agentrl.errors import EngineError

__all__ = ["ModelConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """What models of one `model_type` have in common, and transformers' defaults for what their file does not say."""

    model: str  # transformers' class
    max_tokens: int
    head_size: int | None = None  # None: hidden / heads
    qk_norm: bool = False


_FAMILIES = {
    "qwen2": _Family(model="Qwen2ForCausalLM", max_tokens=32768),
    "qwen3": _Family(model="Qwen3ForCausalLM", max_tokens=32768, head_size=128, qk_norm=True),
    "llama": _Family(model="LlamaForCausalLM", max_tokens=2048),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes of a model: D hidden, H heads, K key-value heads (H divisible by K), E head size."""

    family: str  # transformers' `model_type`
    architecture: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    norm_epsilon: float
    rope: Rope
    qkv_bias: bool
    out_bias: bool  # of the projection that follows attention
    qk_norm: bool
    tied: bool
    max_tokens: int  # positions the model was made for
    eos_ids: frozenset[int]

    @classmethod
    def load(cls, model_dir: Path) -> ModelConfig:
        """Read `config.json`, and `generation_config.json` for more end tokens where there is one.

        Raises:
            EngineError: missing, of another family, or with a feature this engine does not compute.
        """
        raw = _read_json(model_dir / "config.json")
        name = raw.get("model_type")
        family = _FAMILIES.get(str(name))
        if family is None:
            raise EngineError(f"{model_dir}: the embedded engine runs {', '.join(_FAMILIES)} models, this is {name!r}; serve it by SGLang instead")
        _refuse_unsupported(raw, model_dir)
        generation = model_dir / "generation_config.json"
        eos = _ids(raw.get("eos_token_id")) | (_ids(_read_json(generation).get("eos_token_id")) if generation.exists() else frozenset())
        heads, biased = raw["num_attention_heads"], name != "qwen2" and bool(raw.get("attention_bias", False))
        return cls(
            family=str(name),
            architecture=(raw.get("architectures") or [family.model])[0],
            vocabulary=raw["vocab_size"],
            hidden=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_size=raw.get("head_dim") or family.head_size or raw["hidden_size"] // heads,
            intermediate=raw["intermediate_size"],
            norm_epsilon=raw.get("rms_norm_eps", 1e-6),
            rope=Rope.read(raw, str(model_dir)),
            qkv_bias=biased or name == "qwen2",
            out_bias=biased,
            qk_norm=family.qk_norm,
            tied=bool(raw.get("tie_word_embeddings", False)),
            max_tokens=raw.get("max_position_embeddings", family.max_tokens),
            eos_ids=eos,
        )

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face names and shapes, in model order; a tied `lm_head.weight` is not among them."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_parameters().items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        return shapes

    def _layer_parameters(self) -> dict[str, tuple[int, ...]]:
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows in (("q", query), ("k", key), ("v", key)):
            shapes[f"self_attn.{name}_proj.weight"] = (rows, self.hidden)
            if self.qkv_bias:
                shapes[f"self_attn.{name}_proj.bias"] = (rows,)
        shapes["self_attn.o_proj.weight"] = (self.hidden, query)
        if self.out_bias:
            shapes["self_attn.o_proj.bias"] = (self.hidden,)
        if self.qk_norm:
            shapes |= {f"self_attn.{name}_norm.weight": (self.head_size,) for name in "qk"}
        return shapes | {
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise EngineError(f"{path}: expected an object, got {type(value).__name__}")
    return value


def _refuse_unsupported(raw: Mapping[str, Any], model_dir: Path) -> None:
    """What transformers' models of these families may have and this engine does not compute."""
    refused = {
        "sliding-window attention": raw.get("use_sliding_window") or set(raw.get("layer_types") or ()) - {"full_attention"},
        "a bias in the MLP": raw.get("mlp_bias"),
        "quantized weights": raw.get("quantization_config"),
    }
    for feature, present in refused.items():
        if present:
            raise EngineError(f"{model_dir}: the embedded engine does not compute {feature}; serve the model by SGLang instead")
    if raw.get("hidden_act", "silu") != "silu":
        raise EngineError(f"{model_dir}: activation {raw['hidden_act']!r} is not supported by the embedded engine, only 'silu'")


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
