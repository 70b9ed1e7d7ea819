"""A snapshot: one version's weights as flat buckets in rank 0's memory, detached from training."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from agentrl.manifest import TensorSpec, combined_checksum, flatten, tensor_checksum, unflatten

__all__ = ["Bucket", "Snapshot", "save_snapshot"]

# What a Hugging Face model directory holds besides its weights.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors of one dtype as one buffer of bytes, in order."""

    specs: tuple[TensorSpec, ...]
    flat: Tensor  # [bytes] uint8


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The weights of one version. `checksums` are those of agentrl.manifest, by tensor name."""

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
                buckets.append(Bucket(specs=tuple(TensorSpec.of(name, t) for name, t in group), flat=flatten(t for _, t in group)))
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
        return {name: tensor for bucket in self.buckets for name, tensor in unflatten(bucket.flat, bucket.specs).items()}


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
