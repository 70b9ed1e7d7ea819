"""Models of known shapes with random weights, made on the spot: no download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

__all__ = ["SHAPES", "TOY", "Shape", "verdict"]

_SPREAD = 3.0  # random models are almost uniform over the vocabulary; matrices this much larger make log-probs that can differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A Qwen2 architecture."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int = 4096

    @property
    def config(self) -> Qwen2Config:
        """As transformers wants it."""
        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.context,
            rope_theta=1e6,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )

    def make(self, device: str = "cpu", *, seed: int = 0) -> Any:
        """A model in float32."""
        torch.manual_seed(seed)
        with torch.device(device):
            return Qwen2ForCausalLM(self.config)

    def write(self, directory: Path, *, seed: int = 0) -> Path:
        """A Hugging Face directory of it, without a tokenizer."""
        model = self.make(seed=seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 and "embed" not in name:
                    parameter.mul_(_SPREAD)
        model.save_pretrained(directory)
        return directory

    @property
    def weights(self) -> int:
        """Parameters, the tied head once."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads) + head * (self.heads + 2 * self.kv_heads)
        return self.vocabulary * self.hidden + self.layers * (attention + 3 * self.hidden * self.intermediate + 2 * self.hidden) + self.hidden


# Sizes of Qwen2.5's config.json files (Qwen, 2024).
SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="toy", hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, vocabulary=512, context=512),
        Shape(name="qwen2.5-0.5b", hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, vocabulary=151936),
        Shape(name="qwen2.5-1.5b", hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, vocabulary=151936),
        Shape(name="qwen2.5-3b", hidden=2048, intermediate=11008, layers=36, heads=16, kv_heads=2, vocabulary=151936),
    )
}
TOY = SHAPES["toy"]


def verdict(numbers: dict[str, Any], bounds: dict[str, float]) -> dict[str, Any]:
    """The numbers with "passed", or "failed" where one is not below its bound (or is no number)."""
    beyond = [name for name, bound in bounds.items() if not numbers[name] <= bound]
    told: dict[str, Any] = {"verdict": "failed" if beyond else "passed", **numbers, "bounds": bounds}
    return told | ({"error": f"{beyond[0]} is {numbers[beyond[0]]:.3g}, more than {bounds[beyond[0]]:.3g}"} if beyond else {})
