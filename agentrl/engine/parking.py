"""Tensors whose memory is given away for a while. They keep shape and views; their storages are emptied and filled again.

    park ── the bytes to the host, the storage's size to 0 ──> fetch ── its size again, the bytes back

Tested on a CPU; not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Parking", "emptied", "storage_bytes"]


class Parking:
    """Where the bytes of tensors wait. The host memory for them is kept from one time to the next: pinning it takes longer than filling it."""

    def __init__(self) -> None:
        self._parked: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._host: list[Tensor] = []

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Empty the storages of these tensors, which nobody may read until `fetch`. Several tensors may be views of one storage."""
        assert not self._parked, "one thing at a time is parked"
        storages = _storages(tensors)
        if [len(host) for host in self._host] != [storage.nbytes() for storage in storages]:
            self._host = [torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda) for storage in storages]
        for storage, host in zip(storages, self._host, strict=True):
            host.copy_(_bytes(storage))
            self._parked.append((storage, host))
            storage.resize_(0)

    def fetch(self) -> None:
        """Fill them again; harmless where nothing is parked."""
        while self._parked:
            storage, host = self._parked[-1]
            storage.resize_(len(host))
            _bytes(storage).copy_(host)
            self._parked.pop()


def emptied(tensors: Iterable[Tensor], *, again: bool = False) -> None:
    """Empty storages whose contents are of no use any more; `again`: give them their size back, filled with 0."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size() if again else 0)
        if again:
            tensor.zero_()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """What the storages of these tensors hold now."""
    return sum(storage.nbytes() for storage in _storages(tensors))


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The different ones, in order."""
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage as bytes. [n] uint8"""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
