"""Weight transfers between one learner and many engines: the process group both ends form, the bucket format, checksums.

The group is formed the way SGLang forms its own (`init_custom_process_group`), so either end may be SGLang: a store under the group's name
and torch's `_new_process_group_helper`, next to whatever default group the process has, or none. Rank 0 sends.

Two facts of gloo shape everything around it: a blocked collective cannot be cancelled, it ends by the group's timeout only; and a receive
buffer smaller than what is sent aborts the receiving process. So timeouts are short and sizes are agreed upon before any collective.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from math import prod

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from agentrl.errors import PublishError

__all__ = [
    "CHECKED_BYTES",
    "PIECE_BYTES",
    "Checksum",
    "broadcast",
    "broadcast_pieces",
    "combined_checksum",
    "flatten_bucket",
    "join_update_group",
    "leave_update_group",
    "split_bucket",
    "tensor_bytes",
    "tensor_checksum",
    "torch_dtype",
]

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def join_update_group(
    *, master_address: str, master_port: int, rank: int, world_size: int, group_name: str, backend: str = "gloo", timeout_s: float = 60.0
) -> dist.ProcessGroup:
    """Form the group `group_name`; blocks until all `world_size` members have come. Rank 0 hosts the store.

    Args:
        timeout_s: deadline of the meeting and afterwards of every collective in the group.

    Raises:
        PublishError: the members did not meet in time, or the name is taken in this process.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(iter(rendezvous(f"tcp://{master_address}:{master_port}", rank, world_size, timeout=timeout)))
        store.set_timeout(timeout)
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            c10d.PrefixStore(group_name, store),
            group_name=c10d.GroupName(group_name),
            timeout=timeout,
        )
    except (RuntimeError, ValueError) as error:  # torch's DistStoreError and DistNetworkError are RuntimeErrors
        raise PublishError(
            f"group {group_name!r} of {world_size} at {master_address}:{master_port} was not formed by rank {rank}: {error}"
        ) from error
    if not isinstance(group, dist.ProcessGroup):
        raise PublishError(f"group {group_name!r}: rank {rank} is not a member")
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def leave_update_group(group: dist.ProcessGroup) -> None:
    """Forget the group. Its connections close, and so free members that wait for this one, when the caller drops the last reference too.

    Where a collective of this process hangs in it, that blocks until the group's timeout: do both in a thread.
    """
    world = c10d._world
    if group in world.pg_map:
        dist.destroy_process_group(group)


def broadcast(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Send `tensor` from rank 0, or receive into it.

    Raises:
        PublishError: a member vanished or the group's timeout passed.
    """
    try:
        dist.broadcast(tensor, src=0, group=group)
    except RuntimeError as error:
        raise PublishError(f"broadcast of {tensor.numel() * tensor.element_size()} bytes failed: {error}") from error


# As measured with buckets of 130 MB: every piece costs threads that wake each other, and what the last one brings is taken in when all is there.
PIECE_BYTES = 2**24
_UNDER_WAY = 2  # gloo's threads: the next piece goes as soon as one is through


def broadcast_pieces(flat: Tensor, group: dist.ProcessGroup, piece_bytes: int) -> Iterator[int]:
    """The same as broadcasts of `piece_bytes` each, the last one of the rest. Yields how many bytes are through, piece after piece.

    Raises:
        PublishError: a member vanished, or the group's timeout passed for a piece.
    """
    works: deque[dist.Work | None] = deque()
    through = 0
    pieces = deque(torch.split(flat, piece_bytes))
    try:
        while pieces or works:
            while pieces and len(works) < _UNDER_WAY:
                works.append(dist.broadcast(pieces.popleft(), src=0, group=group, async_op=True))
            if (work := works.popleft()) is not None:
                work.wait()
            through = min(through + piece_bytes, flat.numel())
            yield through
    except RuntimeError as error:
        raise PublishError(f"broadcast of {flat.numel()} bytes failed after {through}: {error}") from error


def flatten_bucket(tensors: Iterable[Tensor]) -> Tensor:
    """One uint8 tensor: the bytes of `tensors` in order (SGLang's `flattened_bucket`). One dtype per bucket keeps offsets aligned."""
    return torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors])


def split_bucket(bucket: Tensor, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """The named tensors of a flattened bucket, as views where their offset allows it."""
    tensors: dict[str, Tensor] = {}
    offset = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        size = tensor_bytes(dtype, shape)
        part = bucket[offset : offset + size]
        tensors[name] = (part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype).view(tuple(shape))
        offset += size
    return tensors


def tensor_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor."""
    return prod(shape) * dtype.itemsize


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of its wire name, e.g. "bfloat16".

    Raises:
        PublishError: it is none that weights come in.
    """
    if name not in _DTYPES:
        raise PublishError(f"dtype must be one of {sorted(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def tensor_checksum(tensor: Tensor) -> str:
    """16 hex digits of the tensor's bytes, independent of device and strides. Made to find faults, not forgeries."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    checksum = Checksum(flat.numel())
    checksum.add(flat)
    return checksum.hexdigest()


class Checksum:
    """`tensor_checksum` of `nbytes` bytes that come in pieces.

    The bytes are read as 64-bit words in blocks; a block's sum has an odd weight per word (mod 2^64), so any one changed word changes it. The
    sums, in order, and the length are digested. One pass at the speed of memory, and where the tensor is: of a GPU's only the sums travel.
    """

    def __init__(self, nbytes: int) -> None:
        self._digest = hashlib.blake2b(nbytes.to_bytes(8, "little"), digest_size=8)

    def add(self, piece: Tensor) -> None:
        """The next bytes, [bytes] uint8. Only the last piece may be no multiple of CHECKED_BYTES."""
        size = piece.numel()
        if piece.storage_offset() % _WORD:
            piece = piece.clone()  # words must be aligned
        whole = size // CHECKED_BYTES * CHECKED_BYTES
        if whole:
            self._digest.update(_block_sums(piece[:whole]))
        if whole < size:
            rest = piece.new_zeros(CHECKED_BYTES)
            rest[: size - whole] = piece[whole:]
            self._digest.update(_block_sums(rest))

    def hexdigest(self) -> str:
        """Of all that was added."""
        return self._digest.hexdigest()


def combined_checksum(checksums: Mapping[str, str]) -> str:
    """One checksum of many, independent of their order."""
    text = "".join(f"{name}={value};" for name, value in sorted(checksums.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


_WORD = 8  # bytes
CHECKED_BYTES = 2**13  # a checksum's block: the words' weights stay in a core's first cache, which is twice as fast as in its second


def _block_sums(blocks: Tensor) -> bytes:
    """The weighted sum of each block, as bytes."""
    words = blocks.view(torch.int64).view(-1, CHECKED_BYTES // _WORD)
    if words.is_cuda:
        return bytes(_odd_weights().to(words.device).mul(words).sum(1).cpu().numpy().data)
    # Five times as fast as the same in torch, and without Python's lock. (Tensor.numpy() would forbid to resize the storage, which parking does.)
    sums: npt.NDArray[np.int64] = np.einsum("bw,w->b", np.from_dlpack(words), _odd_weights().numpy())
    return sums.tobytes()


@cache
def _odd_weights() -> Tensor:
    return torch.arange(CHECKED_BYTES // _WORD) * 2 + 1
