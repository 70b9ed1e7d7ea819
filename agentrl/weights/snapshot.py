"""A snapshot: one version's weights as flat buckets in rank 0's memory, detached from training.

snapshot = Snapshot(version=7, step=7, dtype=None)
in training's thread:   snapshot.fill(gathered)           bucket after bucket is copied; nothing of it waits for an engine
in the publisher:       snapshot.bucket(0), bucket(1) ... each as soon as it is there, so gathering and sending overlap
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from agentrl.collective import combined_checksum, split_bucket, tensor_bytes, tensor_checksum
from agentrl.engine_api import WeightBucket
from agentrl.errors import PublishError

__all__ = ["Bucket", "Snapshot", "save_snapshot"]

# What a Hugging Face model directory holds besides its weights.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json")
_TIED_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors of one dtype as one buffer of bytes, in the order of `names`."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    flat: Tensor  # [bytes] uint8

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Bucket:
        """Copies of tensors of one dtype, cast to `dtype` on the way."""
        dtype = dtype or tensors[0][1].dtype
        shapes = tuple(tuple(tensor.shape) for _, tensor in tensors)
        flat = torch.empty(sum(tensor_bytes(dtype, shape) for shape in shapes), dtype=torch.uint8)
        bucket = cls(names=tuple(name for name, _ in tensors), shapes=shapes, dtype=dtype, flat=flat)
        for own, (_, tensor) in zip(bucket.tensors().values(), tensors, strict=True):
            own.copy_(tensor.detach())
        return bucket

    @property
    def header(self) -> WeightBucket:
        """What an engine is told of it."""
        name = str(self.dtype).removeprefix("torch.")
        return WeightBucket(names=self.names, dtypes=(name,) * len(self.names), shapes=self.shapes)

    def tensors(self) -> dict[str, Tensor]:
        """Views into it, by name."""
        return split_bucket(self.flat, self.names, [self.dtype] * len(self.names), self.shapes)


class Snapshot:
    """The weights of one version.

    Args:
        version: its name.
        step: of training, at which it was taken.
        dtype: what the weights are cast to; None: they stay as they come.
    """

    def __init__(self, *, version: int, step: int, dtype: torch.dtype | None = None) -> None:
        self.version, self.step, self.dtype = version, step, dtype
        self.gather_s = 0.0  # what gathering took
        self._buckets: list[Bucket] = []
        self._state = "open"
        self._changed = threading.Condition()
        self._sums: dict[int, str] = {}
        self._summing = threading.Lock()

    @classmethod
    def of(cls, version: int, step: int, gathered: Iterable[Sequence[tuple[str, Tensor]]], dtype: torch.dtype | None = None) -> Snapshot:
        """A whole one; see `fill`."""
        snapshot = cls(version=version, step=step, dtype=dtype)
        snapshot.fill(gathered)
        return snapshot

    def fill(self, gathered: Iterable[Sequence[tuple[str, Tensor]]]) -> None:
        """Copy full tensors into buckets. Waits for nobody.

        A head that is the embedding (its very memory) is left out: every engine knows that its model is tied.

        Args:
            gathered: lists of (name, full tensor), as the learner's ranks gather them; a list becomes one bucket per dtype.
        """
        started, state, embedding = time.perf_counter(), "broken", None
        try:
            for tensors in gathered:
                embedding = next((tensor for name, tensor in tensors if name == _EMBEDDING), embedding)
                kept = [(name, tensor) for name, tensor in tensors if name != _TIED_HEAD or not _same_memory(tensor, embedding)]
                for _, same in groupby(kept, key=lambda named: named[1].dtype if self.dtype is None else self.dtype):
                    bucket = Bucket.of(list(same), self.dtype)
                    with self._changed:
                        self._buckets.append(bucket)
                        self._changed.notify_all()
            state = "whole"
        finally:
            with self._changed:
                self._state, self.gather_s = state, time.perf_counter() - started
                self._changed.notify_all()

    def bucket(self, number: int) -> Bucket | None:
        """The bucket of this number, from 0 on, once it is there; None where there are fewer. Blocks.

        Raises:
            PublishError: gathering failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._buckets) > number or self._state != "open")
            if len(self._buckets) > number:
                return self._buckets[number]
            if self._state == "broken":
                raise PublishError(f"version {self.version}: its weights were never gathered whole")
            return None

    def bucket_checksum(self, number: int) -> str:
        """The checksum of a bucket's bytes, made when it is first asked for. Blocks."""
        with self._summing:
            if number not in self._sums:
                bucket = self.bucket(number)
                assert bucket is not None, "there is such a bucket"
                self._sums[number] = tensor_checksum(bucket.flat)
            return self._sums[number]

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All of them. Blocks until the snapshot is whole."""
        with self._changed:
            self._changed.wait_for(lambda: self._state != "open")
            if self._state == "broken":
                raise PublishError(f"version {self.version}: its weights were never gathered whole")
            return tuple(self._buckets)

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.flat.numel() for bucket in self.buckets)

    @cached_property
    def checksums(self) -> dict[str, str]:
        """Those of agentrl.collective, by tensor name."""
        return {name: tensor_checksum(tensor) for name, tensor in self.tensors().items()}

    @property
    def checksum(self) -> str:
        """One checksum over all tensors."""
        return combined_checksum(self.checksums)

    def tensors(self) -> dict[str, Tensor]:
        """Views of all tensors by name."""
        return {name: tensor for bucket in self.buckets for name, tensor in bucket.tensors().items()}


def _same_memory(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and tensor.shape == other.shape and tensor.data_ptr() == other.data_ptr()


def save_snapshot(snapshot: Snapshot, directory: Path, model_dir: Path) -> Path:
    """Write a Hugging Face directory of the snapshot: its weights, everything else copied from `model_dir`. Committed by a rename.

    Raises:
        PublishError: it could not be written; nothing of it is left.
    """
    if directory.exists():
        return directory
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for source in model_dir.iterdir():
            if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES):
                shutil.copy2(source, temporary / source.name)
        save_file(snapshot.tensors(), temporary / "model.safetensors", metadata={"format": "pt"})
        temporary.rename(directory)
    except (OSError, SafetensorError) as error:  # a full disk is the latter
        raise PublishError(f"version {snapshot.version} could not be written to {directory}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory
