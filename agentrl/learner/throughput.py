"""What a step has computed, and how fast: operations, tokens, memory. B trajectories, N their tokens."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.learner.batch import TrainingBatch
from agentrl.learner.flops import ModelShape, peak_flops
from agentrl.learner.ranks import Ranks
from agentrl.record import record

__all__ = ["StepWork", "begin_memory", "record_memory", "record_throughput"]

MEBI = 1 << 20
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of what getrusage counts in


@dataclass(kw_only=True, slots=True)
class StepWork:
    """Of all ranks together: every rank knows all rows of a pass, whoever computes them."""

    flops: int = 0
    tokens: int = 0  # that went through a model, once for each pass

    def passed(self, shape: ModelShape, batch: TrainingBatch, rows: Sequence[int], wanted_N: Tensor, *, backward: bool) -> None:
        """Count a pass of some rows.

        Args:
            wanted_N: bool: tokens whose log-probs or values were asked for.
        """
        lengths = batch.lengths_B[list(rows)]
        tokens, read = int(lengths.sum()), int(batch.count(wanted_N)[list(rows)].sum())
        self.flops += shape.flops(tokens=tokens, read=read, pairs=int(lengths.square().sum()), backward=backward)
        self.tokens += tokens


def record_throughput(work: StepWork, ranks: Ranks, dtype: str, *, seconds: float) -> None:
    """Record a step's rates over all its time, and forget its work. The model's share of the peak is left out where the peak is not known."""
    record("learner/passed_tokens_per_s", work.tokens / seconds)
    record("learner/tflops_per_s", work.flops / seconds / 1e12)
    peak = peak_flops(torch.cuda.get_device_name(ranks.device), dtype) if ranks.device.type == "cuda" else None
    if peak is not None:
        record("learner/mfu", work.flops / seconds / (peak * ranks.size))
    work.flops = work.tokens = 0


def begin_memory(device: torch.device) -> None:
    """Peaks on a GPU are counted from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def record_memory(ranks: Ranks) -> None:
    """Record the peaks of the rank with the largest. Collective."""
    if ranks.device.type == "cuda":
        peaks = {
            "memory_allocated_mb": torch.cuda.max_memory_allocated(ranks.device),
            "memory_reserved_mb": torch.cuda.max_memory_reserved(ranks.device),
        }
    else:
        peaks = {"memory_resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT}
    largest = ranks.max(torch.tensor(list(peaks.values()), dtype=torch.float64)).tolist()
    for name, peak in zip(peaks, largest, strict=True):
        record(f"learner/{name}", peak / MEBI)
