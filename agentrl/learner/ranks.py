"""The group of learner processes: who they are, on which device, and the few collectives the learner needs besides FSDP's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.errors import AgentRLError

__all__ = ["Ranks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """One process's place among the learner's processes. Made once per process; FSDP runs on its mesh at any size, also 1."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # shard, or replicate x shard

    @classmethod
    def single(cls, device: Literal["cpu", "cuda"] = "cpu") -> Ranks:
        """A group of one, without a network. A second call in the same process gets the same group."""
        if not dist.is_initialized():
            dist.init_process_group(_backend(device), store=HashStore(), rank=0, world_size=1)
        if dist.get_world_size() != 1:
            raise AgentRLError(f"this process is already one of {dist.get_world_size()} ranks: it cannot be a group of one")
        return cls._here(device)

    @classmethod
    def join(cls, rank: int, size: int, init_method: str, device: Literal["cpu", "cuda"], deadline_s: float, replicate: int = 1) -> Ranks:
        """Meet the other ranks at `init_method` (`tcp://host:port`).

        Args:
            replicate: whole copies of the models; each is sharded over size / replicate neighbouring ranks.
            deadline_s: of meeting and of every collective after it. A rank that does not come, or freezes, ends the others with an
                error after this time; the run ends, and its next start goes on from a checkpoint.
        """
        dist.init_process_group(_backend(device), init_method=init_method, rank=rank, world_size=size, timeout=timedelta(seconds=deadline_s))
        return cls._here(device).with_copies(replicate)

    @classmethod
    def _here(cls, kind: str) -> Ranks:
        rank, size = dist.get_rank(), dist.get_world_size()
        device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(device)
        return cls(rank=rank, size=size, device=device, mesh=init_device_mesh(kind, (size,), mesh_dim_names=("shard",)))

    def with_copies(self, replicate: int) -> Ranks:
        """The same ranks with a mesh for `replicate` copies. Collective."""
        if replicate == 1:
            return self
        shape, names = (replicate, self.size // replicate), ("replicate", "shard")
        return replace(self, mesh=init_device_mesh(self.device.type, shape, mesh_dim_names=names))

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and speaks to the others' world."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, elementwise."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """The maximum over ranks, elementwise. NaN is not carried reliably: ask for it separately."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Return when every rank is here."""
        self.sum(torch.zeros(1))

    def leave(self) -> None:
        """Leave the group; nothing may use it afterwards."""
        dist.destroy_process_group()

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total, operation)
        return total.to(values.device)


def _backend(device: str) -> str:
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
