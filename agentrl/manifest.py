"""What a published version consists of: tensor names, types and shapes, cut into flat buckets, with checksums.

Both ends of a transfer agree on a manifest before the first collective: a receive buffer of the wrong size aborts the process (smaller)
or is silently filled in part (bigger).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

__all__ = ["DTYPE_NAMES", "TensorSpec", "combined_checksum", "dtype_of", "flatten", "tensor_checksum", "unflatten"]

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name (Hugging Face's), dtype (without "torch.") and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        """The spec of a tensor."""
        return cls(name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return prod(self.shape) * dtype_of(self.dtype).itemsize


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a wire name such as "bfloat16". Raises KeyError for any other."""
    return _DTYPES[name]


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """One uint8 tensor [bytes] of all tensors, in order, without padding: keep one dtype per bucket, so that offsets stay aligned."""
    return torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors])


def unflatten(flat: Tensor, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Views into a bucket of `flatten`, by name. Raises ValueError where the sizes differ."""
    if flat.numel() != (total := sum(spec.nbytes for spec in specs)):
        raise ValueError(f"a bucket of {flat.numel()} bytes for tensors of {total} bytes: {[spec.name for spec in specs]}")
    tensors, offset = {}, 0
    for spec in specs:
        tensors[spec.name] = flat[offset : offset + spec.nbytes].view(dtype_of(spec.dtype)).view(spec.shape)
        offset += spec.nbytes
    return tensors


def tensor_checksum(tensor: Tensor) -> str:
    """blake2b-64 of the tensor's bytes in row-major order, 16 hex digits."""
    raw = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.data, digest_size=8).hexdigest()


def combined_checksum(checksums: Mapping[str, str]) -> str:
    """One checksum over all tensors' checksums, by sorted name, 16 hex digits."""
    text = "\n".join(f"{name} {checksums[name]}" for name in sorted(checksums))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
