"""A snapshot: one version's weights as flat buckets in rank 0's memory, detached from training."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentrl.collective import combined_checksum, flatten_bucket, split_bucket, tensor_checksum
from agentrl.engine_api import WeightBucket

__all__ = ["Bucket", "Snapshot", "save_snapshot"]

# What a Hugging Face model directory holds besides its weights.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors of one dtype as one buffer of bytes, in the order of `names`."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    flat: Tensor  # [bytes] uint8

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
        """Copies of tensors of one dtype."""
        return cls(
            names=tuple(name for name, _ in tensors),
            shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
            dtype=tensors[0][1].dtype,
            flat=flatten_bucket(tensor for _, tensor in tensors),
        )

    @property
    def header(self) -> WeightBucket:
        """What an engine is told of it."""
        name = str(self.dtype).removeprefix("torch.")
        return WeightBucket(names=self.names, dtypes=(name,) * len(self.names), shapes=self.shapes)

    def tensors(self) -> dict[str, Tensor]:
        """Views into it, by name."""
        return split_bucket(self.flat, self.names, [self.dtype] * len(self.names), self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The weights of one version. `checksums` are those of agentrl.collective, by tensor name."""

    version: int
    step: int
    buckets: tuple[Bucket, ...]
    checksums: dict[str, str] = field(repr=False)

    @classmethod
    def of(cls, version: int, step: int, gathered: Iterable[Sequence[tuple[str, Tensor]]]) -> Snapshot:
        """Copy full tensors into buckets.

        Args:
            gathered: lists of (name, full tensor), as the learner's ranks gather them; a list becomes one bucket per dtype.
        """
        buckets: list[Bucket] = []
        checksums: dict[str, str] = {}
        for tensors in gathered:
            for _, same in groupby(tensors, key=lambda named: named[1].dtype):
                group = list(same)
                buckets.append(Bucket.of(group))
                checksums |= {name: tensor_checksum(tensor) for name, tensor in group}
        return cls(version=version, step=step, buckets=tuple(buckets), checksums=checksums)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.flat.numel() for bucket in self.buckets)

    @property
    def checksum(self) -> str:
        """One checksum over all tensors."""
        return combined_checksum(self.checksums)

    def tensors(self) -> dict[str, Tensor]:
        """Views of all tensors by name."""
        return {name: tensor for bucket in self.buckets for name, tensor in bucket.tensors().items()}


def save_snapshot(snapshot: Snapshot, directory: Path, model_dir: Path) -> Path:
    """Write a Hugging Face directory of the snapshot: its weights, everything else copied from `model_dir`. Committed by a rename."""
    if directory.exists():
        return directory
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for source in model_dir.iterdir():
        if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(source, temporary / source.name)
    save_file(snapshot.tensors(), temporary / "model.safetensors", metadata={"format": "pt"})
    temporary.rename(directory)
    return directory
