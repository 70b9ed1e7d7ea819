"""How a batch is cut into micro-batches, and what happens where one does not fit into memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from agentrl.algorithm.packing import MicroBatches, pack, rank_tokens
from agentrl.config.recipe import LearnerRecipe
from agentrl.errors import AgentRLError
from agentrl.learner.batch import TrainingBatch
from agentrl.learner.ranks import Ranks
from agentrl.record import record

__all__ = ["Cut", "within_memory"]

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# What torch's CPU allocator says: it raises no OutOfMemoryError.
CPU_ALLOCATOR = "DefaultCPUAllocator"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How rows become micro-batches: by tokens, or by trajectories."""

    tokens: int
    trajectories: int | None
    packed: bool = False  # rows lie end to end: tokens are without padding

    @classmethod
    def of(cls, recipe: LearnerRecipe, *, packed: bool) -> Cut:
        """A recipe's."""
        return cls(tokens=recipe.tokens_per_micro_batch, trajectories=recipe.trajectories_per_micro_batch, packed=packed)

    def halved(self) -> Cut:
        """Micro-batches of half the size."""
        return replace(self, tokens=max(1, self.tokens // 2), trajectories=self.trajectories and max(1, self.trajectories // 2))

    def micro_batches(self, batch: TrainingBatch, rows: Sequence[int], ranks: Ranks) -> MicroBatches:
        """This rank's micro-batches of these rows. Tells how evenly the ranks are loaded, as the rows come and as they are dealt."""
        lengths = batch.lengths_B.tolist()
        packed = pack(rows, lengths, budget=self.tokens, ranks=ranks.size, count=self.trajectories, padded=not self.packed)
        if ranks.size > 1:
            for name, load in zip(("before", "after"), rank_tokens(rows, lengths, packed), strict=True):
                record(f"learner/rank_tokens_max_{name}", load.most)
                record(f"learner/rank_tokens_min_{name}", load.fewest)
                record(f"learner/rank_tokens_spread_{name}", load.spread)
        return packed[ranks.rank]

    def remedy(self) -> str:
        """The recipe's key to lower."""
        if self.trajectories is not None:
            return f"learner.trajectories_per_micro_batch (now {self.trajectories})"
        return f"learner.tokens_per_micro_batch (now {self.tokens:,})"


def within_memory(work: Callable[[Cut], Result], cut: Cut, *, models: Sequence[nn.Module], ranks: Ranks, step: int, longest: int) -> Result:
    """Do some work in micro-batches; where memory runs out, once more with micro-batches of half the size.

    Only a learner of one rank can try again: the other ranks of a group stand in the middle of a collective by then.

    Args:
        work: changes no weights before it returns.
        longest: tokens of the longest row, for the message.

    Raises:
        AgentRLError: it does not fit; names step, longest row and the key to lower.
    """
    try:
        return work(cut)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        told = f"out of memory at step {step}, longest row {longest:,} tokens: lower {cut.remedy()}"
        if ranks.size > 1 or not _can_start_over(models):
            raise AgentRLError(told) from error
    log.warning("%s. Trying once more with half of it", told)
    record("learner/out_of_memory", 1)
    _start_over(models)
    try:
        return work(cut.halved())
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        raise AgentRLError(f"{told}, or shorten rollout.limits.context_tokens: half of it was not enough either") from error


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error)


def _can_start_over(models: Sequence[nn.Module]) -> bool:
    """Whether this torch (2.13 can) is able to forget a pass through FSDP that broke off."""
    return all(not isinstance(model, FSDPModule) or hasattr(model, "reset_iter_state") for model in models)


def _start_over(models: Sequence[nn.Module]) -> None:
    """Drop what a pass that broke off has left: gathered parameters, gradients, FSDP's notes of where it was."""
    for model in models:
        model.zero_grad(set_to_none=True)
        if not isinstance(model, FSDPModule):
            continue
        model.reset_iter_state()
        for state in model._get_fsdp_state()._state_ctx.all_states:  # gradients that are not reduced yet: torch has no public way to them
            for parameter in (parameter for group in state._fsdp_param_groups for parameter in group.fsdp_params):
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
