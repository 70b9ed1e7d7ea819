"""From trajectories to tensors: the batch of a step, and the micro-batches that go through the model.

Dimensions: B trajectories of a batch, N all their tokens one after the other, R rows of a micro-batch, T tokens of its longest row.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.errors import TrajectoryError
from agentrl.types import Trajectory

__all__ = ["MicroBatch", "StepTokens", "TrainingBatch"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingBatch:
    """The trajectories of a batch, token arrays laid end to end. The same on every rank.

    With trajectories a and b, `token_ids_N` is a0 a1 a2 b0 b1, `starts_B` is 0 3 and `lengths_B` 3 2. `loss_mask_N` is the trajectories'
    own, made where the policy wrote the tokens: nothing here adds to it.
    """

    trajectories: tuple[Trajectory, ...]  # [B], sorted by group
    token_ids_N: Tensor  # int64
    loss_mask_N: Tensor  # bool
    behaviour_N: Tensor  # float32, 0 outside the mask
    ages_N: Tensor  # int64: age of each token in steps, 0 outside the mask
    starts_B: Tensor  # int64
    lengths_B: Tensor  # int64
    rewards_B: Tensor  # float64
    groups_B: Tensor  # int64: 0..G-1
    temperatures_B: Tensor  # float32

    @classmethod
    def of(cls, groups: Sequence[Sequence[Trajectory]], token_ages: Mapping[int, int]) -> TrainingBatch:
        """The batch of whole groups.

        Args:
            token_ages: age, in steps, of the tokens of each version that occurs (for abandoned versions: in versions).

        Raises:
            TrajectoryError: no trajectories, a trajectory that begins with a generated token (nothing predicts it), a version without age.
        """
        trajectories = tuple(trajectory for group in groups for trajectory in group)
        if not trajectories:
            raise TrajectoryError("a batch without trajectories")
        for trajectory in trajectories:
            if len(trajectory) == 0 or trajectory.loss_mask[0]:
                raise TrajectoryError(f"{trajectory.ticket.name}: expected a prompt before the first generated token")
        lengths_B = torch.tensor([len(trajectory) for trajectory in trajectories])
        loss_mask_N = torch.from_numpy(np.concatenate([trajectory.loss_mask for trajectory in trajectories])) == 1
        return cls(
            trajectories=trajectories,
            token_ids_N=_join([trajectory.token_ids for trajectory in trajectories], np.int64),
            loss_mask_N=loss_mask_N,
            behaviour_N=_join([trajectory.behaviour_logprobs for trajectory in trajectories], np.float32),
            ages_N=_ages(trajectories, token_ages),
            starts_B=lengths_B.cumsum(0) - lengths_B,
            lengths_B=lengths_B,
            rewards_B=torch.tensor([trajectory.reward.total for trajectory in trajectories], dtype=torch.float64),
            groups_B=torch.tensor([index for index, group in enumerate(groups) for _ in group]),
            temperatures_B=torch.tensor([trajectory.temperature for trajectory in trajectories]),
        )

    def train_mask(self, max_token_age: int | None) -> Tensor:
        """[N] bool: `loss_mask` without the tokens older than `max_token_age`. Denominators count `loss_mask`."""
        return self.loss_mask_N if max_token_age is None else self.loss_mask_N & (self.ages_N <= max_token_age)

    def spread(self, values_B: Tensor) -> Tensor:
        """[N]: a value of each trajectory, on each of its tokens."""
        return values_B.repeat_interleave(self.lengths_B)

    def count(self, mask_N: Tensor) -> Tensor:
        """[B] int64: true tokens of each trajectory."""
        totals = torch.cat([torch.zeros(1, dtype=torch.int64), mask_N.to(torch.int64).cumsum(0)])
        return totals[self.starts_B + self.lengths_B] - totals[self.starts_B]

    def fingerprint(self) -> int:
        """A checksum of what is trained on, by which ranks notice that they hold different batches."""
        crc = zlib.crc32(self.token_ids_N.numpy().tobytes())
        return zlib.crc32(self.rewards_B.numpy().tobytes(), zlib.crc32(self.behaviour_N.numpy().tobytes(), crc))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Rows of a batch side by side, right-padded with token 0 and zeros.

    A dummy (a rank that has run out of rows) is one row of the batch with both masks 0: it costs a pass, and adds nothing.
    """

    token_ids_RT: Tensor  # int64
    loss_mask_RT: Tensor  # bool
    train_mask_RT: Tensor  # float32
    behaviour_RT: Tensor  # float32
    proximal_RT: Tensor  # float32
    advantages_RT: Tensor  # float32
    temperature_R: Tensor  # float32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTokens:
    """A batch with what the step adds to each token before the first update."""

    batch: TrainingBatch
    train_mask_N: Tensor  # bool
    advantages_N: Tensor  # float32
    proximal_N: Tensor  # float32: log-probs at the start of the step; the behaviour's where the loss does not need them

    def micro_batch(self, rows: Sequence[int], device: torch.device) -> MicroBatch:
        """The rows as a micro-batch; no rows: a dummy."""
        batch = self.batch
        rows_R = torch.tensor(rows or [int(batch.lengths_B.argmin())])
        lengths_R = batch.lengths_B[rows_R]
        place_T = torch.arange(int(lengths_R.max()))
        inside_RT = place_T < lengths_R[:, None]
        index_RT = batch.starts_B[rows_R][:, None] + place_T.where(inside_RT, 0)
        masked_RT = inside_RT if rows else torch.zeros_like(inside_RT)

        def padded(values_N: Tensor, real_RT: Tensor = inside_RT) -> Tensor:
            return (values_N[index_RT] * real_RT).to(device)

        return MicroBatch(
            token_ids_RT=padded(batch.token_ids_N),
            loss_mask_RT=padded(batch.loss_mask_N, masked_RT),
            train_mask_RT=padded(self.train_mask_N, masked_RT).float(),
            behaviour_RT=padded(batch.behaviour_N),
            proximal_RT=padded(self.proximal_N),
            advantages_RT=padded(self.advantages_N),
            temperature_R=batch.temperatures_B[rows_R].to(device),
        )


def _join(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype))


def _ages(trajectories: Sequence[Trajectory], token_ages: Mapping[int, int]) -> Tensor:
    versions_N = np.concatenate([trajectory.versions for trajectory in trajectories])
    present, inverse_N = np.unique(versions_N, return_inverse=True)
    missing = [int(version) for version in present if version >= 0 and int(version) not in token_ages]
    if missing:
        raise TrajectoryError(f"no age is known of the tokens of versions {missing}")
    ages = np.array([token_ages[int(version)] if version >= 0 else 0 for version in present], dtype=np.int64)
    return torch.from_numpy(ages[inverse_N])
