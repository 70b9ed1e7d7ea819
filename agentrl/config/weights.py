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
    fan_out: Literal["auto", "each", "one"] = "auto"
    """`each`: a process group per engine, so one that hangs holds up nobody else. `one`: one group and one broadcast for all. `auto`: `one` for
    nccl, `each` for gloo, which cannot give up a broadcast."""
    bucket_mb: Positive = 128
    """Weights travel in pieces of at least this size."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """What they are cast to before they travel; engines cast what comes to their own. null: as the learner has them."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """`retract`: requests stay open and their KV is computed anew. `in_place`: requests keep the KV of older weights, so their log-probs are not
    exactly their version's. `abort`: partial answers come back and the rest is asked again."""
    bucket_deadline_s: Seconds = 10.0
    """Of one bucket, and of forming a group: an engine that takes longer is left out until it has been brought back from disk."""
    deadline_s: Seconds = 60.0
    """Of every other call in an update: pausing, committing, loading from disk."""
    keep_snapshots: bool = False
    """Keep every published version as safetensors in the run directory (for exactness checks)."""
