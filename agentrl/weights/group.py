"""Our end of a weight-update group: rank 0 of it, the engines' processes behind us in the order of the members."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch.distributed as dist
import trio
from torch import Tensor

from agentrl.collective import PIECE_BYTES, broadcast, broadcast_pieces, join_update_group, leave_update_group
from agentrl.errors import PublishError
from agentrl.faults import point
from agentrl.ports import free_port
from agentrl.weights.joint import together
from agentrl.weights.member import CLEANUP_S, Member, unless_refused

__all__ = ["UpdateGroup"]

_numbers = itertools.count()
_POLL_S = 0.001  # between looks at an NCCL broadcast
_NCCL_MARGIN_S = 60.0  # of torch's timeout over ours, by which a collective is given up
# torch's watchdog ends the process where NCCL tells an error, such as that of an engine that died, or a collective passes its timeout: all but for
# groups made while this says 0 (ProcessGroupNCCL.hpp of torch 2.13: NoHandling). We look ourselves. Not yet run on GPUs.
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class UpdateGroup:
    """A group of some members. Every one has a fresh name and port.

    Args:
        deadline_s: of the meeting, and of each broadcast.
    """

    def __init__(self, members: Sequence[Member], *, backend: str, address: str, deadline_s: float) -> None:
        self.members = tuple(members)
        self.backend, self.address, self.deadline_s = backend, address, deadline_s
        self.port = free_port(address)
        self.name = f"weights-{next(_numbers)}-{self.port}"
        self._handle: dist.ProcessGroup | None = None

    @property
    def offsets(self) -> tuple[int, ...]:
        """The rank of each member's first process."""
        return tuple(itertools.accumulate((member.ranks for member in self.members[:-1]), initial=1))

    @property
    def world(self) -> int:
        """Processes in the group, ours included."""
        return 1 + sum(member.ranks for member in self.members)

    @property
    def piece_bytes(self) -> int | None:
        """What a bucket's broadcasts are of, where members take in each while the next one comes; None: a bucket is one."""
        return PIECE_BYTES if self.backend == "gloo" and all(member.staged for member in self.members) else None

    async def form(self) -> None:
        """Meet all members.

        Raises:
            JointFailure: they did not come.
        """
        offsets = dict(zip(self.members, self.offsets, strict=True))
        await together(self.members, lambda member: self._invite(member, offsets[member]), self._join)

    def broadcast(self, flat: Tensor) -> None:
        """Send. Blocks, at most for the deadline.

        Raises:
            PublishError: a member vanished, or the deadline passed.
        """
        assert self._handle is not None, "the group has been formed"
        point("learner.broadcast")
        if self.backend == "nccl":
            _broadcast_nccl(flat, self._handle, self.deadline_s)
        elif self.piece_bytes is not None:
            _broadcast_pieces(flat, self._handle, self.piece_bytes, self.deadline_s)
        else:
            broadcast(flat, self._handle)

    async def dissolve(self) -> None:
        """Destroy it everywhere; a member that is gone or never came does not matter, and none keeps the others waiting.

        Engines that wait in the group are freed when the last reference to our end goes. Where a broadcast of ours hangs in it, that is when the
        broadcast's deadline has passed.
        """
        with trio.CancelScope(shield=True), trio.move_on_after(CLEANUP_S):
            async with trio.open_nursery() as nursery:
                for member in self.members:
                    nursery.start_soon(unless_refused, lambda member=member: member.engine.destroy_group(self.name))
                await trio.to_thread.run_sync(self._leave, abandon_on_cancel=True)

    async def _invite(self, member: Member, offset: int) -> None:
        await member.engine.init_group(
            address=self.address,
            port=self.port,
            rank_offset=offset,
            world_size=self.world,
            group=self.name,
            backend=self.backend,
            timeout_s=self.deadline_s if member.staged else None,
            deadline_s=self.deadline_s,
        )

    def _join(self) -> None:
        nccl = self.backend == "nccl"
        with _unwatched() if nccl else nullcontext():
            self._handle = join_update_group(
                master_address=self.address,
                master_port=self.port,
                rank=0,
                world_size=self.world,
                group_name=self.name,
                backend=self.backend,
                timeout_s=self.deadline_s + (_NCCL_MARGIN_S if nccl else 0.0),
            )

    def _leave(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            leave_update_group(handle)


def _broadcast_pieces(flat: Tensor, group: dist.ProcessGroup, piece_bytes: int, deadline_s: float) -> None:
    """The group's timeout is a piece's; all of them have no more."""
    until = time.monotonic() + deadline_s
    for through in broadcast_pieces(flat, group, piece_bytes):
        if time.monotonic() > until and through < flat.numel():
            raise PublishError(f"broadcast of {flat.numel()} bytes took longer than {timedelta(seconds=deadline_s)}, {through} are through")


def _broadcast_nccl(flat: Tensor, group: dist.ProcessGroup, deadline_s: float, device: str = "cuda") -> None:
    """NCCL can give up: the communicator is aborted at the deadline. Not yet run on GPUs."""
    try:
        on_gpu = flat.to(device, non_blocking=True)
        work = dist.broadcast(on_gpu, src=0, group=group, async_op=True)
        until = time.monotonic() + deadline_s
        while not work.is_completed():
            if time.monotonic() > until:
                dist.distributed_c10d._abort_process_group(group)
                raise PublishError(f"broadcast of {flat.numel()} bytes took longer than {timedelta(seconds=deadline_s)}")
            time.sleep(_POLL_S)
        work.wait()
    except RuntimeError as error:  # CUDA's and NCCL's
        raise PublishError(f"broadcast of {flat.numel()} bytes failed: {error}") from error


@contextmanager
def _unwatched() -> Iterator[None]:
    """Groups made here are left alone by torch's watchdog."""
    before = os.environ.get(_WATCHDOG)
    os.environ[_WATCHDOG] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WATCHDOG]
        else:
            os.environ[_WATCHDOG] = before
