"""A model made on the spot: a Qwen2, Qwen3 or Llama with random weights, in a Hugging Face directory beside its tokenizer.

Dimensions: D of a head, H hidden.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from agentrl.config.recipe import Architecture
from agentrl.learner.model_directory import copy_tokenizer

__all__ = ["make_model"]

FAMILIES: dict[str, type[PreTrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
# Found on the quick-start task; the cited paper measures .7 for the query-key part of trained models.
ALPHA_QUERY_KEY, NOISE_QUERY_KEY = 0.7, 0.3
ALPHA_VALUE_OUTPUT = 0.6
SHARPNESS = 6.0  # of the two heads that look back, in logits
LOOK_BACK = (1, 2)  # tokens, by head


def make_model(architecture: Architecture, tokenizer_dir: Path, out_dir: Path, seed: int, dtype: str = "float32") -> Path:
    """Write the model to `out_dir` and return it. The same seed and architecture give the same weights.

    Args:
        dtype: "float32" or "bfloat16".
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_config(architecture, tokenizer), dtype=torch.float32)
        if architecture.initialisation == "mimetic":
            _mimetic(model)
    disable_progress_bar()
    model.to(getattr(torch, dtype)).save_pretrained(out_dir)
    copy_tokenizer(tokenizer_dir, out_dir)
    return out_dir


def _config(architecture: Architecture, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    # of the three only Qwen3's heads have a size of their own by default
    more = {"head_dim": architecture.hidden_size // architecture.heads} if architecture.family == "qwen3" else {}
    return FAMILIES[architecture.family](
        vocab_size=len(tokenizer),
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_hidden_layers=architecture.layers,
        num_attention_heads=architecture.heads,
        num_key_value_heads=architecture.kv_heads,
        max_position_embeddings=architecture.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        tie_word_embeddings=architecture.tie_embeddings,
        initializer_range=architecture.initializer_range,
        attention_dropout=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )


@torch.no_grad()
def _mimetic(model: Any) -> None:
    """Start attention where trained transformers end up (Trockman & Kolter 2023): W_q ~ W_k (attend to equal content), W_o ~ W_v^T
    (copy it). In layer 0 the biases of two heads make them look one and two tokens back. It is a plain Qwen2 afterwards.

    The architecture is a Qwen2 with as many key heads as heads, at least two; its recipe refuses others."""
    config = model.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        shared_HH = torch.randn(hidden, hidden) / math.sqrt(hidden)
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.copy_(ALPHA_QUERY_KEY * shared_HH + NOISE_QUERY_KEY * torch.randn(hidden, hidden) / math.sqrt(hidden))
        orthogonal_HH = torch.linalg.qr(torch.randn(hidden, hidden))[0]
        attention.v_proj.weight.copy_(orthogonal_HH)
        attention.o_proj.weight.copy_(ALPHA_VALUE_OUTPUT * orthogonal_HH.T)
        if index == 0:
            for head, back in enumerate(LOOK_BACK):
                _look_back(attention, head, back, size=hidden // heads, theta=config.rope_parameters["rope_theta"])


def _look_back(attention: Any, head: int, back: int, *, size: int, theta: float) -> None:
    """Make a head attend `back` tokens before: its key bias is constant, its query bias the same rotated by -back positions."""
    hidden = attention.o_proj.weight.shape[0]
    rows = slice(head * size, (head + 1) * size)
    frequency = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    angle_D = torch.cat([-back * frequency] * 2)
    key_D = torch.ones(size) * math.sqrt(SHARPNESS * math.sqrt(size) / size * 2)
    half = size // 2
    attention.k_proj.bias[rows] = key_D
    attention.q_proj.bias[rows] = key_D * angle_D.cos() + torch.cat([-key_D[half:], key_D[:half]]) * angle_D.sin()
    attention.q_proj.weight[rows] *= 0.1
    attention.k_proj.weight[rows] *= 0.1
    attention.o_proj.weight[:, rows] = torch.randn(hidden, size) / math.sqrt(hidden)  # no plain copy: "the token before was x"
