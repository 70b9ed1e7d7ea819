"""Writes tiny random Qwen2 models in Hugging Face form, without transformers: config.json, model.safetensors, tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from agentrl.engine.architecture import ModelConfig

WORDS = ["<pad>", "<eos>", "</search>", "</answer>", "<search>", "<answer>"]


def write_tiny_qwen2(
    directory: Path,
    *,
    vocabulary: int = 96,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 48,
    tied: bool = True,
    seed: int = 0,
    scale: float = 0.25,
    context_tokens: int = 512,
) -> Path:
    """A model directory with weights of the given scale: large enough that the next token depends on the whole prefix."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": context_tokens,
        "tie_word_embeddings": tied,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: random_parameter(name, shape, generator, scale) for name, shape in ModelConfig.load(directory).parameters().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(directory, vocabulary)
    return directory


def random_parameter(name: str, shape: tuple[int, ...], generator: torch.Generator, scale: float) -> torch.Tensor:
    """Normal numbers; norms are around 1."""
    values = torch.randn(shape, generator=generator) * scale
    return values + 1.0 if name.endswith("norm.weight") else values


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """A WordLevel tokenizer whose words are six tags and w6, w7, ..."""
    words = {word: index for index, word in enumerate([*WORDS, *(f"w{index}" for index in range(len(WORDS), vocabulary))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
