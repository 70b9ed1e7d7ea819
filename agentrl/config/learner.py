"""The learner: optimizers, batches, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Seconds, Section, Share

__all__ = ["CheckpointRecipe", "CriticRecipe", "LearnerRecipe", "ScheduleRecipe"]


class ScheduleRecipe(Section):
    """The learning rate over the run."""

    shape: Literal["constant", "linear", "cosine"] = "constant"
    """From the peak to `final_share` of it."""
    final_share: Share = 0.0
    """Of the peak, at the end of the run (linear, cosine)."""
    warmup: Annotated[float, Field(ge=0)] = 0.0
    """Linear warm-up: steps where >= 1, share of the run where < 1."""


class CriticRecipe(Section):
    """A value model beside the policy, on the learner's ranks."""

    path: str | None = None
    """Directory or hub name: a causal model, or a reward model (a sequence or token classifier with one label), whose head becomes the value
    head. By default the policy's initial weights with a new head."""
    learning_rate: NonNegativeFloat = 1e-5
    """Peak of its schedule."""
    schedule: ScheduleRecipe = ScheduleRecipe()
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's, of all parameters."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    clip: PositiveFloat | None = 0.5
    """How far a value may move from the one at the start of the step before its loss is clipped (Schulman et al.'s PPO code). None: never."""
    mini_batches: Positive | None = None
    """Optimizer updates per pass over a batch; by default learner.mini_batches."""
    ppo_epochs: Positive | None = None
    """Passes over a batch; by default learner.ppo_epochs."""
    warmup_steps: NonNegative = 0
    """Steps at the start of the run in which only the critic is trained. The policy's schedule counts its warm-up from their end."""


class LearnerRecipe(Section):
    """The learner: FSDP2 ranks."""

    ranks: Positive = 1
    """Number of processes; the models are sharded over them."""
    replicate: Positive = 1
    """Keep this many whole copies, each sharded over ranks / replicate neighbouring ranks (hybrid sharding): weights are gathered among neighbours,
    and only gradients cross between the copies. A node's number of GPUs per copy suits a slow network between nodes."""
    groups_per_batch: Positive = 32
    """G: groups of one step."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak of the schedule."""
    schedule: ScheduleRecipe = ScheduleRecipe()
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's, of all parameters."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    mini_batches: Positive = 1
    """Optimizer updates per pass over a batch."""
    ppo_epochs: Positive = 1
    """Passes over a batch."""
    tokens_per_micro_batch: Positive = 16384
    """Tokens of one forward and backward pass of a rank, padding included where there is any."""
    trajectories_per_micro_batch: Positive | None = None
    """Cut by this number of trajectories instead."""
    packing: Literal["auto", "padded", "packed"] = "auto"
    """`padded`: trajectories side by side, padded to the longest. `packed`: end to end in one row, without padding. `auto`: packed where
    model.attention is flash_attention_2 or varlen, padded with sdpa, which computes a packed row's tokens against all others of the row."""
    max_skipped_batches: Positive = 5
    """So many batches in a row may have no finite update; one more ends the run."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it computes."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer moments in the host's memory between their uses, and update there. Slower, for models that do not fit."""
    compile: bool = False
    """Compile the transformer's layers with torch.compile: the first steps take minutes."""
    threads: Positive = 1
    """CPU threads of a rank."""
    collective_deadline_s: Seconds = 120.0
    """A rank that does not come to a collective within this time ends the learner."""


class CheckpointRecipe(Section):
    """Checkpoints. The newest `keep` are kept."""

    every: Positive = 50
    """Steps. Checkpoint 0 and the last step's are always written."""
    keep: Positive = 2
    """How many are kept."""
