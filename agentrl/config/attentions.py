"""Which attentions take packed trajectories. Without pydantic, for whoever has a model and no recipe."""

from __future__ import annotations

__all__ = ["PACKED_ATTENTIONS", "packs"]

# Attentions that take trajectories end to end and compute none against the others. Kernels for GPUs, in half precision.
PACKED_ATTENTIONS = ("flash_attention_2", "varlen")


def packs(packing: str, attention: str) -> bool:
    """Whether trajectories go through the model end to end: `learner.packing` with `model.attention`."""
    return packing == "packed" or (packing == "auto" and attention in PACKED_ATTENTIONS)
