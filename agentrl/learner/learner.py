"""The learner of one rank: builds the sharded policy, trains on batches, hands out its weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.config.attentions import packs
from agentrl.config.recipe import Recipe
from agentrl.errors import AgentRLError
from agentrl.learner.batch import TrainingBatch
from agentrl.learner.critic import CriticModel
from agentrl.learner.model_directory import require_same_tokens
from agentrl.learner.optimizer import make_optimizer
from agentrl.learner.policy import PolicyModel
from agentrl.learner.profile import StepProfiler
from agentrl.learner.ranks import Ranks
from agentrl.learner.reference import Reference
from agentrl.learner.rehearsal import rehearse
from agentrl.learner.state import Controllers, LearnerState
from agentrl.learner.throughput import begin_memory, record_memory, record_throughput
from agentrl.learner.train_step import train_step
from agentrl.record import Recorder, phase, record
from agentrl.wire import encode_trajectory, pack

__all__ = ["Learner", "StepReport"]

log = logging.getLogger(__name__)

KEPT_BATCHES = 10  # of those whose updates were skipped: a run that skips now and then for weeks must not fill the disk


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What a step did. The same on every rank, but for seconds."""

    step: int
    metrics: dict[str, float]
    updates_done: int
    updates_skipped: int
    skipped_in_row: int  # batches, this one included, without a single update done


class Learner:
    """One rank of the learner. Every method is a collective: all ranks call it with the same arguments, in the same order."""

    def __init__(self, recipe: Recipe, model_dir: Path, run_dir: Path, state: LearnerState) -> None:
        self.recipe = recipe
        self.run_dir = run_dir
        self.model_dir = model_dir  # the configuration and tokenizer that checkpoints and exports carry on
        self.state = state
        self._skipped_in_row = 0
        self._profiler = StepProfiler(recipe.profile, state.ranks, run_dir)

    @classmethod
    def build(cls, recipe: Recipe, model_dir: Path, ranks: Ranks, run_dir: Path) -> Learner:
        """Load the models the recipe wants, shard each over the ranks (also over one), make the optimizers.

        Args:
            model_dir: the run's initial weights: of the policy, and by default of the critic and the reference.
            run_dir: batches whose update was skipped are kept in its `skipped/`.

        Raises:
            ConfigError: a model does not load, does not fit, or reads another tokenizer than the policy.
        """
        torch.set_num_threads(recipe.learner.threads)
        torch.manual_seed(recipe.seed)
        rehearse(recipe.algorithm, critic=recipe.critic is not None)
        return cls(recipe, model_dir, run_dir, _state(recipe, model_dir, ranks))

    @property
    def ranks(self) -> Ranks:
        """The group this rank is one of."""
        return self.state.ranks

    def train(self, batch: TrainingBatch, *, step: int, progress: float) -> StepReport:
        """Train on one batch.

        Args:
            step: the learner's step before this batch; seeds the order of mini-batches and drives the warm-up.
            progress: share of the run done before this batch, 0..1; drives the schedules.

        Raises:
            AgentRLError: ranks hold different batches.
        """
        self._agree(batch)
        with Recorder(self._profiler.marks(step)) as recorder:
            begin_memory(self.ranks.device)
            started = time.perf_counter()
            with self._profiler.step(step), phase("step"):
                updates = train_step(self.state, batch, self.recipe, step=step, progress=progress)
            record_throughput(self.state.work, self.ranks, self.recipe.model.dtype, seconds=time.perf_counter() - started)
            record_memory(self.ranks)
            for name, model in (("learner", updates.policy), ("critic", updates.critic)):
                if model:
                    record(f"{name}/updates_done", model.count(True))
                    record(f"{name}/updates_skipped", model.count(False))
        done, skipped = updates.decisive.count(True), updates.decisive.count(False)
        self._skipped_in_row = 0 if done else self._skipped_in_row + 1
        if not all(updates.policy + updates.critic) and self.ranks.first:
            self._dump(batch, step)
        return StepReport(
            step=step,
            metrics=recorder.means(),
            updates_done=done,
            updates_skipped=skipped,
            skipped_in_row=self._skipped_in_row,
        )

    def gather(self, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Full copies of the policy's weights, bucket by bucket, in the model's order, tied ones once, in the dtype of the recipe.

        Adapters are merged in: what leaves the learner is a plain model, whose weights have the names they had.

        Every rank iterates to the end; rank 0 gets the tensors, on the CPU, the others empty lists. Memory: one bucket.

        Args:
            bucket_bytes: a bucket is closed when it has at least this many bytes.
        """
        dtype = getattr(torch, self.recipe.model.dtype)
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, full in self.state.policy.full_weights():
            size += full.numel() * dtype.itemsize
            if self.ranks.first:
                bucket.append((name, full.to(device="cpu", dtype=dtype, copy=True)))
            if size >= bucket_bytes:
                yield bucket
                bucket, size = [], 0
        if size:
            yield bucket

    def _agree(self, batch: TrainingBatch) -> None:
        mine = batch.fingerprint()
        low_high = self.ranks.max(torch.tensor([mine, -mine], dtype=torch.int64))
        if low_high.tolist() != [mine, -mine]:
            raise AgentRLError(f"rank {self.ranks.rank} holds another batch than the others: fingerprint {mine:08x}")

    def _dump(self, batch: TrainingBatch, step: int) -> None:
        folder = self.run_dir / "skipped"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step_{step:08d}.msgpack"
        groups = batch.groups_B.tolist()
        path.write_bytes(pack([[group, encode_trajectory(trajectory)] for group, trajectory in zip(groups, batch.trajectories, strict=True)]))
        for outdated in sorted(folder.glob("step_*.msgpack"))[:-KEPT_BATCHES]:
            outdated.unlink()
        log.warning("step %d: an update was skipped because its loss or gradient norm is not finite; its batch is in %s", step, path)


def _state(recipe: Recipe, model_dir: Path, ranks: Ranks) -> LearnerState:
    model, learner = recipe.model, recipe.learner
    policy = PolicyModel.load(model_dir, **_reading(recipe), lora=model.lora)
    policy.shard(ranks, model.dtype, **_placing(recipe))
    optimizer = make_optimizer(policy, learning_rate=learner.learning_rate, betas=learner.betas, weight_decay=learner.weight_decay)
    critic, critic_optimizer = _critic(recipe, model_dir, ranks)
    reference = _reference(recipe, model_dir, ranks, policy)
    kl = recipe.algorithm.kl
    controllers = Controllers(kl_coefficient=kl.coefficient if kl.controller == "adaptive" else None)
    return LearnerState(
        policy=policy,
        optimizer=optimizer,
        ranks=ranks,
        critic=critic,
        critic_optimizer=critic_optimizer,
        reference=reference,
        controllers=controllers,
    )


def _critic(recipe: Recipe, model_dir: Path, ranks: Ranks) -> tuple[CriticModel, torch.optim.AdamW] | tuple[None, None]:
    if recipe.critic is None:
        return None, None
    settings = recipe.critic
    if settings.path is not None:
        require_same_tokens(model_dir, settings.path, key="critic.path")
    critic = CriticModel.load(settings.path or model_dir, **_reading(recipe))
    critic.shard(ranks, recipe.model.dtype, **_placing(recipe))
    return critic, make_optimizer(critic, learning_rate=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay)


def _reference(recipe: Recipe, model_dir: Path, ranks: Ranks, policy: PolicyModel) -> Reference | None:
    """Where KL is measured. With LoRA the base under the adapters is the run's initial model."""
    kl, model = recipe.algorithm.kl, recipe.model
    if kl.where == "none":
        return None
    if policy.adapters is not None:
        return Reference(policy)
    if kl.reference is not None:
        require_same_tokens(model_dir, kl.reference, key="algorithm.kl.reference")
    attention, packed = model.attention, policy.packed
    return Reference.load(kl.reference or model_dir, ranks, dtype=model.dtype, attention=attention, packed=packed, **_placing(recipe))


def _reading(recipe: Recipe) -> dict[str, Any]:
    """How models are read."""
    model = recipe.model
    packed = packs(recipe.learner.packing, model.attention)
    return {"attention": model.attention, "gradient_checkpointing": model.gradient_checkpointing, "packed": packed}


def _placing(recipe: Recipe) -> dict[str, Any]:
    """How they are sharded."""
    return {"offload": recipe.learner.cpu_offload, "compiled": recipe.learner.compile}
