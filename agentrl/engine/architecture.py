"""The Qwen2 architecture as read from a Hugging Face directory: sizes, parameter names, stop tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import EngineError

__all__ = ["ModelConfig"]

_DEFAULT_ROPE_THETA = 10000.0  # transformers' default for Qwen2


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes of a Qwen2 model: D hidden, H heads, K key-value heads (H divisible by K), E head size."""

    architecture: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    norm_epsilon: float
    rope_theta: float
    tied: bool
    max_tokens: int  # positions the model was made for
    eos_ids: frozenset[int]

    @classmethod
    def load(cls, model_dir: Path) -> ModelConfig:
        """Read `config.json`, and `generation_config.json` for more end tokens where there is one.

        Raises:
            EngineError: missing, not Qwen2, or with a feature this engine does not compute.
        """
        raw = _read_json(model_dir / "config.json")
        if raw.get("model_type") != "qwen2":
            raise EngineError(f"{model_dir}: the embedded engine runs Qwen2 models, this is {raw.get('model_type')!r}; serve it by SGLang instead")
        _refuse_unsupported(raw, model_dir)
        generation = model_dir / "generation_config.json"
        eos = _ids(raw.get("eos_token_id")) | (_ids(_read_json(generation).get("eos_token_id")) if generation.exists() else frozenset())
        return cls(
            architecture=(raw.get("architectures") or ["Qwen2ForCausalLM"])[0],
            vocabulary=raw["vocab_size"],
            hidden=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_size=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            intermediate=raw["intermediate_size"],
            norm_epsilon=raw.get("rms_norm_eps", 1e-6),
            rope_theta=_rope(raw).get("rope_theta", _DEFAULT_ROPE_THETA),
            tied=bool(raw.get("tie_word_embeddings", False)),
            max_tokens=raw.get("max_position_embeddings", 32768),
            eos_ids=eos,
        )

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face names and shapes, in model order; a tied `lm_head.weight` is not among them."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            shapes |= {
                f"model.layers.{layer}.{name}": shape
                for name, shape in {
                    "self_attn.q_proj.weight": (query, self.hidden),
                    "self_attn.q_proj.bias": (query,),
                    "self_attn.k_proj.weight": (key, self.hidden),
                    "self_attn.k_proj.bias": (key,),
                    "self_attn.v_proj.weight": (key, self.hidden),
                    "self_attn.v_proj.bias": (key,),
                    "self_attn.o_proj.weight": (self.hidden, query),
                    "mlp.gate_proj.weight": (self.intermediate, self.hidden),
                    "mlp.up_proj.weight": (self.intermediate, self.hidden),
                    "mlp.down_proj.weight": (self.hidden, self.intermediate),
                    "input_layernorm.weight": (self.hidden,),
                    "post_attention_layernorm.weight": (self.hidden,),
                }.items()
            }
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        return shapes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise EngineError(f"{path}: expected an object, got {type(value).__name__}")
    return value


def _refuse_unsupported(raw: dict[str, Any], model_dir: Path) -> None:
    rope_type = _rope(raw).get("rope_type", _rope(raw).get("type", "default"))
    if rope_type != "default":
        raise EngineError(f"{model_dir}: rope type {rope_type!r} is not supported by the embedded engine, only 'default'")
    if raw.get("use_sliding_window"):
        raise EngineError(f"{model_dir}: sliding-window attention is not supported by the embedded engine")
    if raw.get("hidden_act", "silu") != "silu":
        raise EngineError(f"{model_dir}: activation {raw['hidden_act']!r} is not supported by the embedded engine, only 'silu'")


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """The rope section: `rope_parameters` since transformers 5, `rope_theta` and `rope_scaling` before."""
    section = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return ({"rope_theta": raw["rope_theta"]} if "rope_theta" in raw else {}) | section


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
