"""The attentions of `model.attention`: whether they can run here, and torch's own for packed sequences, taught to transformers.

`flash_attention_2` and `varlen` have not been run by the tests: they need a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

from agentrl.errors import ConfigError

__all__ = ["make_ready", "varlen_attention"]


def make_ready(attention: str) -> None:
    """Before a model with this attention is loaded.

    Raises:
        ConfigError: what it needs is not installed. flash-attn is asked for through transformers, which also knows that another
            package has a module of the same name.
    """
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise ConfigError("model.attention flash_attention_2 needs flash-attn (pip install 'agentrl[gpu]') and a GPU; or set varlen or sdpa")
    if attention == "varlen":
        _varlen()
        AttentionInterface.register("varlen", varlen_attention)


def varlen_attention(
    module: Any,
    query_RAWE: Tensor,
    key_RKWE: Tensor,
    value_RKWE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, by `torch.nn.attention.varlen` (torch 2.10 and newer; CUDA, half precision).

    Args:
        query_RAWE: [rows, heads, tokens, head size]; keys and values may have fewer heads.
        cu_seq_lens_q: int32, where sequences begin and the last one ends, over all rows; by default each row is one sequence.
        max_length_q: tokens of the longest.

    Returns:
        [rows, tokens, heads, head size], and no weights.
    """
    if attention_mask is not None:
        raise ConfigError("model.attention varlen was given an attention mask, which it has no use for: this family needs sdpa")
    rows, heads, width, size = query_RAWE.shape
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(0, (rows + 1) * width, width, dtype=torch.int32, device=query_RAWE.device)
        max_length_q = width
    flat = (states.transpose(1, 2).reshape(rows * width, -1, size) for states in (query_RAWE, key_RKWE, value_RKWE))
    limits = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    attended = _varlen()(*flat, *limits, scale=scaling, window_size=window, enable_gqa=heads != key_RKWE.shape[1])
    return attended.view(rows, width, heads, size), None


def _varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise ConfigError(f"model.attention varlen needs torch 2.10 or newer; this is {torch.__version__}: set sdpa") from error
    return varlen_attn
