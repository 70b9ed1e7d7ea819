"""Floating-point operations of a model's passes, and what share of a GPU's they are.

Counted are products with weights and attention, as in PaLM (Chowdhery et al. 2022, appendix B): a token costs 2 operations for each weight it
meets in the forward pass and 4 in the backward pass (2 for a frozen weight, whose own gradient is not computed), and with L layers of A heads x head
size, in a sequence of T tokens, 4 L A T for attention forward and 8 L A T backward: 6 N + 12 L A T together. Two differences: the output layer,
and the last layer's MLP where only a part of it is computed, count for the tokens they are computed for; the embedding's look-up counts nothing.
As in PaLM attention counts all T keys though half of them are masked, and what gradient checkpointing computes again does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["PEAK_FLOPS", "ModelShape", "peak_flops"]

# Dense operations per second in bfloat16 and float32, by what stands in the device's name; the first that fits counts. From NVIDIA's data sheets:
# H100 (2023), H200 (2024), B200 in HGX (2024), A100 (2021), L40S (2023), L4 (2023); half of the figures "with sparsity".
PEAK_FLOPS: tuple[tuple[str, float, float], ...] = (
    ("H100 PCIe", 756e12, 51e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100", 989e12, 67e12),
    ("H200 NVL", 835e12, 60e12),
    ("H200", 989e12, 67e12),
    ("B200", 2250e12, 75e12),
    ("A100", 312e12, 19.5e12),
    ("L40S", 362e12, 91.6e12),
    ("L4", 121e12, 30.3e12),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Of a GPU by the name torch gives it; None of one that is not in the table, and of a CPU."""
    found = next((row for row in PEAK_FLOPS if row[0] in device_name), None)
    if found is None:
        return None
    _, half, full = found
    return half if dtype == "bfloat16" else full


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The weights that a token meets."""

    everywhere: int  # weights that every token meets
    everywhere_trained: int
    where_read: int  # weights that only tokens whose log-probs (or values) are asked for meet
    where_read_trained: int
    attention: int  # layers x heads x head size

    @classmethod
    def of(cls, config: Any, everywhere: Iterable[Tensor], where_read: Iterable[Tensor]) -> ModelShape:
        """Of a transformers configuration and its matrices. Vectors (norms, biases) are left out."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        every, read = [p for p in everywhere if p.ndim == 2], [p for p in where_read if p.ndim == 2]
        return cls(
            everywhere=sum(p.numel() for p in every),
            everywhere_trained=sum(p.numel() for p in every if p.requires_grad),
            where_read=sum(p.numel() for p in read),
            where_read_trained=sum(p.numel() for p in read if p.requires_grad),
            attention=config.num_hidden_layers * config.num_attention_heads * size,
        )

    def flops(self, *, tokens: int, read: int, pairs: int, backward: bool) -> int:
        """Of passes over sequences.

        Args:
            tokens: of all sequences, padding aside.
            read: of these, those whose log-probs are asked for.
            pairs: the sum over sequences of their squared lengths.
        """
        forward = 2 * self.everywhere * tokens + 2 * self.where_read * read + 4 * self.attention * pairs
        if not backward:
            return forward
        return 2 * forward + 4 * self.attention * pairs + 2 * self.everywhere_trained * tokens + 2 * self.where_read_trained * read
