"""Where new weights wait for their commit: a spare set of the model's weights, filled while tokens are made.

    received bucket ──copied, cast, checksum──> spare ══commit: exchanged══> live          the old ones are the next spare

A commit is thereby an exchange of memory on a CPU, and one copy on a device whose captured graphs name the memory they work on. One thread does
all the copying in order, so what an update that was given up left behind cannot come after what follows. Memory: the weights once more, and the
buffers of two buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from agentrl.collective import tensor_checksum
from agentrl.engine.parking import Parking
from agentrl.engine.weights import Weights

__all__ = ["Intake"]

_STEP = 2**24  # bytes: buckets of about one size fit into one buffer, and a small one wastes no more than this
_BUFFERS = 2  # one is received into while the other is taken in


class Intake:
    """The spare beside `live`."""

    def __init__(self, live: Weights) -> None:
        self._live = live
        self._spare: Weights | None = None
        self._free: list[Tensor] = []
        self._parking = Parking()
        self._thread = ThreadPoolExecutor(1, "intake", initializer=partial(torch.set_num_threads, 1))
        self._checks = ThreadPoolExecutor(1, "checksums")

    def buffer(self, nbytes: int, device: torch.device) -> Tensor:
        """[nbytes] uint8, of memory that was used before where there is any: new memory costs as much as what is written into it."""
        for index, kept in enumerate(self._free):
            if kept.numel() >= nbytes:
                return self._free.pop(index)[:nbytes]
        return torch.empty(-(-nbytes // _STEP) * _STEP, dtype=torch.uint8, device=device)[:nbytes]

    def take_in(self, tensors: Mapping[str, Tensor], *, received: Tensor | None = None) -> Future[str]:
        """Copy checked tensors into the spare; they may be views of `received`, which is free after that. Its checksum, "" without it."""
        checksum = None if received is None else self._checks.submit(tensor_checksum, received)
        return self._thread.submit(self._copy, tensors, received, checksum)

    def commit(self, names: set[str]) -> Weights | Mapping[str, Tensor]:
        """What was taken in under these names, for `Scheduler.commit`: the whole spare where that is everything."""
        assert self._spare is not None, "something was taken in"
        if names == self._spare.named.keys():
            return self._spare
        return {name: self._spare.named[name] for name in names}

    def committed(self) -> None:
        """A GPU has better things to do with memory than to keep a spare."""
        if self._live.embedding.device.type != "cpu":
            self._spare = None

    def checksums(self) -> Future[dict[str, str]]:
        """Of the live weights, while tokens are made."""
        return self._thread.submit(self._live.checksums)

    def give_away(self, *, weights: bool) -> Future[None]:
        """Give away what lies here unused and, with `weights`, the live ones, which nothing may use until `take_back`."""
        return self._thread.submit(self._give_away, weights)

    def take_back(self) -> Future[None]:
        """Have the live weights again, as they were."""
        return self._thread.submit(self._parking.fetch)

    def _give_away(self, weights: bool) -> None:
        self._spare, self._free = None, []
        if self._live.embedding.device.type != "cpu":  # on a CPU they are in host memory already
            if weights:
                self._parking.park(self._live.named.values())
            torch.cuda.empty_cache()  # or it would be kept for this process

    def _copy(self, tensors: Mapping[str, Tensor], received: Tensor | None, checksum: Future[str] | None) -> str:
        if self._spare is None:
            self._spare = self._live.alike()
        self._spare.replace(tensors)
        if received is None or checksum is None:
            return ""
        found = checksum.result()
        if received.device.type == "cpu":
            whole = received if received._base is None else received._base  # buckets differ in size: what was lent is a part
            self._free = [whole, *self._free][:_BUFFERS]
        return found
