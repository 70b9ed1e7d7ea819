"""Publishing weights."""

from __future__ import annotations

from typing import Literal

from agentrl.config.section import Positive, Seconds, Section

__all__ = ["WeightsRecipe"]


class WeightsRecipe(Section):
    """Publishing weights to the engines: in buckets by a process group (`backend`), or by disk. `pause`: what happens to open requests."""

    publish_every: Positive = 1
    """Steps between versions; the last step always publishes."""
    transport: Literal["group", "disk"] = "group"
    """By a process group, or by files."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: nccl where engines and learner are on GPUs."""
    bucket_mb: Positive = 256
    """Weights travel in pieces of at least this size."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """`retract`: requests stay open and their KV is computed anew. `in_place`: requests keep the KV of older weights, so their log-probs are not
    exactly their version's. `abort`: partial answers come back and the rest is asked again."""
    deadline_s: Seconds = 60.0
    """Per engine and version."""
    keep_snapshots: bool = False
    """Keep every published version as safetensors in the run directory (for exactness checks)."""
