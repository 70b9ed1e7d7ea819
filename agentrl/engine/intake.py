"""Where new weights wait for their commit: a spare set of the model's weights, filled while tokens are made.

    bucket, piece by piece ──checksum, copied, cast──> spare ══commit: exchanged══> live          the old ones are the next spare

A commit is thereby an exchange of memory on a CPU, and one copy on a device whose captured graphs name the memory they work on. One thread does
all the copying in order, so what an update that was given up left behind cannot come after what follows. Memory: the weights once more, and the
buffers of two buckets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from threading import Lock

import torch
from torch import Tensor

from agentrl.collective import Checksum, split_bucket, tensor_bytes
from agentrl.engine.parking import Parking
from agentrl.engine.weights import Weights

__all__ = ["Announced", "Arrival", "Intake"]

_STEP = 2**24  # bytes: buckets of about one size fit into one buffer, and a small one wastes no more than this
_BUFFERS = 2  # one is received into while the other is taken in


@dataclass(frozen=True, kw_only=True, slots=True)
class Announced:
    """The tensors of one bucket, checked: all of them are the model's."""

    names: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[tuple[int, ...]]

    @property
    def ends(self) -> list[int]:
        """Where in the bucket's bytes each tensor ends."""
        return list(accumulate(tensor_bytes(dtype, shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)))

    @property
    def bytes(self) -> int:
        """Size on the wire."""
        return self.ends[-1]


class Intake:
    """The spare beside `live`."""

    def __init__(self, live: Weights) -> None:
        self._live = live
        self._spare: Weights | None = None
        self._free: list[Tensor] = []
        self._lending = Lock()
        self._parking = Parking()
        self._thread = ThreadPoolExecutor(1, "intake", initializer=partial(torch.set_num_threads, 1))

    def buffer(self, nbytes: int, device: torch.device) -> Tensor:
        """[nbytes] uint8, of memory that was used before where there is any: new memory costs as much as what is written into it."""
        with self._lending:
            for index, kept in enumerate(self._free):
                if kept.numel() >= nbytes:
                    return self._free.pop(index)[:nbytes]
        return torch.empty(-(-nbytes // _STEP) * _STEP, dtype=torch.uint8, device=device)[:nbytes]

    def take_in(self, tensors: Mapping[str, Tensor]) -> Future[str]:
        """Copy checked tensors into the spare. Nothing is known of their checksum: ""."""
        return self._thread.submit(self._copy, tensors)

    def arrival(self, bucket: Announced, buffer: Tensor, wanted: Callable[[], bool]) -> Arrival:
        """The way into the spare of a bucket that is being received into `buffer`, one of ours, as long as it is `wanted`."""

        def copy(tensors: Mapping[str, Tensor]) -> None:
            if wanted():
                self._copy(self._live.checked(tensors, complete=False))

        return Arrival(self._thread, bucket, buffer, copy, self._give_back)

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

    def close(self) -> None:
        """Take in nothing more. Blocks while something is being copied; what waits behind it is dropped."""
        self._thread.shutdown(cancel_futures=True)

    def _give_away(self, weights: bool) -> None:
        self._spare = None
        with self._lending:
            self._free = []
        if self._live.embedding.device.type != "cpu":  # on a CPU they are in host memory already
            if weights:
                self._parking.park(self._live.named.values())
            torch.cuda.empty_cache()  # or it would be kept for this process

    def _copy(self, tensors: Mapping[str, Tensor]) -> str:
        if self._spare is None:
            self._spare = self._live.alike()
        self._spare.replace(tensors)
        return ""

    def _give_back(self, buffer: Tensor) -> None:
        if buffer.device.type == "cpu":
            whole = buffer if buffer._base is None else buffer._base  # buckets differ in size: what was lent is a part
            with self._lending:
                self._free = [whole, *self._free][:_BUFFERS]


class Arrival:
    """A bucket on its way in: its checksum is made of what is there, and each tensor copied when it is whole. All of it in `thread`."""

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        bucket: Announced,
        buffer: Tensor,
        copy: Callable[[Mapping[str, Tensor]], None],
        free: Callable[[Tensor], None],
    ) -> None:
        self._thread, self._bucket, self._buffer = thread, bucket, buffer
        self._copy, self._free = copy, free
        self._checksum = Checksum(buffer.numel())
        self._ends = bucket.ends
        self._arrived, self._copied = 0, 0  # bytes, tensors
        self._steps: list[Future[None]] = []

    def advance(self, arrived: int) -> None:
        """So many bytes of it are there."""
        self._steps.append(self._thread.submit(self._advance, arrived))

    def finish(self) -> Future[str]:
        """It is there. Its checksum, when all of it has been copied; the buffer is free then."""
        return self._thread.submit(self._finish)

    def _advance(self, arrived: int) -> None:
        self._checksum.add(self._buffer[self._arrived : arrived])
        self._arrived = arrived
        first, last = self._copied, bisect_right(self._ends, arrived)
        begin = self._ends[first - 1] if first else 0
        whole = self._buffer[begin : self._ends[last - 1]] if last > first else self._buffer[:0]
        names, dtypes, shapes = self._bucket.names[first:last], self._bucket.dtypes[first:last], self._bucket.shapes[first:last]
        self._copy(split_bucket(whole, names, dtypes, shapes))
        self._copied = last

    def _finish(self) -> str:
        for step in self._steps:
            step.result()
        self._free(self._buffer)
        return self._checksum.hexdigest()
