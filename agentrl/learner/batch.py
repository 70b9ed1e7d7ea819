"""From trajectories to tensors: the batch of a step, and the micro-batches that go through the models.

Dimensions: B trajectories of a batch, N all their tokens one after the other, R rows of a micro-batch, T tokens of its longest row.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.errors import TrajectoryError
from agentrl.types import StopReason, Trajectory

__all__ = ["MicroBatch", "StepTokens", "TrainingBatch"]

ROUNDING = 1e-9  # of a sum of reward parts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingBatch:
    """The trajectories of a batch, token arrays laid end to end. The same on every rank.

    With trajectories a and b, `token_ids_N` is a0 a1 a2 b0 b1, `starts_B` is 0 3 and `lengths_B` 3 2. `loss_mask_N` is the trajectories'
    own, made where the policy wrote the tokens: nothing here adds to it (but for the ablation that trains on observations).
    """

    trajectories: tuple[Trajectory, ...]  # [B], sorted by group; greedy baselines left out
    token_ids_N: Tensor  # int64
    loss_mask_N: Tensor  # bool
    generated_N: Tensor  # bool: the loss mask as it came
    response_N: Tensor  # bool: everything after the prompt, observations included
    behaviour_N: Tensor  # float32, 0 outside the mask
    ages_N: Tensor  # int64: age of each token in steps, 0 outside the mask
    amounts_N: Tensor  # float64: what each token earned
    starts_B: Tensor  # int64
    lengths_B: Tensor  # int64
    rewards_B: Tensor  # float64
    groups_B: Tensor  # int64: 0..G-1
    temperatures_B: Tensor  # float32
    baselines_B: Tensor | None = None  # float64: reward of the group's greedy episode, where every group has one

    @classmethod
    def of(cls, groups: Sequence[Sequence[Trajectory]], token_ages: Mapping[int, int]) -> TrainingBatch:
        """The batch of whole groups. A trajectory sampled at temperature 0 is its group's greedy baseline: it is not trained on.

        Args:
            token_ages: age, in steps, of the tokens of each version that occurs (for abandoned versions: in versions).

        Raises:
            TrajectoryError: no trajectories, a trajectory that begins with a generated token (nothing predicts it), a version without age.
        """
        sampled = [[trajectory for trajectory in group if trajectory.temperature > 0] for group in groups]
        greedy = [[trajectory.reward.total for trajectory in group if trajectory.temperature == 0] for group in groups]
        trajectories = tuple(trajectory for group in sampled for trajectory in group)
        if not trajectories:
            raise TrajectoryError("a batch without trajectories")
        for trajectory in trajectories:
            if len(trajectory) == 0 or trajectory.loss_mask[0]:
                raise TrajectoryError(f"{trajectory.ticket.name}: expected a prompt before the first generated token")
        lengths_B = torch.tensor([len(trajectory) for trajectory in trajectories])
        generated_N = torch.from_numpy(np.concatenate([trajectory.loss_mask for trajectory in trajectories])) == 1
        starts_B = lengths_B.cumsum(0) - lengths_B
        groups_B = torch.tensor([index for index, group in enumerate(sampled) for _ in group])
        baselines = torch.tensor([rewards[0] for rewards in greedy], dtype=torch.float64)[groups_B] if all(greedy) else None
        return cls(
            trajectories=trajectories,
            token_ids_N=_join([trajectory.token_ids for trajectory in trajectories], np.int64),
            loss_mask_N=generated_N,
            generated_N=generated_N,
            response_N=_responses(trajectories),
            behaviour_N=_join([trajectory.behaviour_logprobs for trajectory in trajectories], np.float32),
            ages_N=_ages(trajectories, token_ages),
            amounts_N=_amounts(trajectories, starts_B.tolist(), int(lengths_B.sum())),
            starts_B=starts_B,
            lengths_B=lengths_B,
            rewards_B=torch.tensor([trajectory.reward.total for trajectory in trajectories], dtype=torch.float64),
            groups_B=groups_B,
            temperatures_B=torch.tensor([trajectory.temperature for trajectory in trajectories]),
            baselines_B=baselines,
        )

    def train_mask(self, max_token_age: int | None, masked_stops: frozenset[StopReason] = frozenset()) -> Tensor:
        """[N] bool: `loss_mask` without tokens older than `max_token_age` and trajectories that stopped so. Denominators count `loss_mask`."""
        mask_N = self.loss_mask_N if max_token_age is None else self.loss_mask_N & (self.ages_N <= max_token_age)
        if not masked_stops:
            return mask_N
        return mask_N & self.spread(torch.tensor([trajectory.stop not in masked_stops for trajectory in self.trajectories]))

    def over_observations(self) -> TrainingBatch:
        """The batch with observations in its loss mask. An ablation: their behaviour log-probs are those the learner gives them."""
        return replace(self, loss_mask_N=self.response_N)

    def parts(self, names: Sequence[str]) -> Tensor:
        """[B, K] float64: named parts of the rewards, 0 where a trajectory has none of that name."""
        return torch.tensor([[trajectory.reward.parts.get(name, 0.0) for name in names] for trajectory in self.trajectories], dtype=torch.float64)

    def spread(self, values_B: Tensor) -> Tensor:
        """[N]: a value of each trajectory, on each of its tokens."""
        return values_B.repeat_interleave(self.lengths_B)

    def padded(self, values_N: Tensor) -> Tensor:
        """[B, T]: one row a trajectory, 0 to the right of it."""
        padded_BT = values_N.new_zeros(len(self.trajectories), int(self.lengths_B.max()))
        padded_BT[self._inside_BT] = values_N
        return padded_BT

    def flat(self, values_BT: Tensor) -> Tensor:
        """[N]: the inverse of `padded`."""
        return values_BT[self._inside_BT]

    def count(self, mask_N: Tensor) -> Tensor:
        """[B] int64: true tokens of each trajectory."""
        totals = torch.cat([torch.zeros(1, dtype=torch.int64), mask_N.to(torch.int64).cumsum(0)])
        return totals[self.starts_B + self.lengths_B] - totals[self.starts_B]

    def fingerprint(self) -> int:
        """A checksum of what is trained on, by which ranks notice that they hold different batches."""
        crc = zlib.crc32(self.token_ids_N.numpy().tobytes())
        return zlib.crc32(self.rewards_B.numpy().tobytes(), zlib.crc32(self.behaviour_N.numpy().tobytes(), crc))

    @property
    def _inside_BT(self) -> Tensor:
        return torch.arange(int(self.lengths_B.max())) < self.lengths_B[:, None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Rows of a batch side by side, right-padded with token 0 and zeros.

    A dummy (a rank that has run out of rows) is one row of the batch with all masks 0: it costs a pass, and adds nothing.
    """

    token_ids_RT: Tensor  # int64
    loss_mask_RT: Tensor  # bool
    generated_RT: Tensor  # bool: the loss mask without observations, also where they are trained on
    critic_mask_RT: Tensor  # bool: where the critic gives values
    train_mask_RT: Tensor  # float32
    behaviour_RT: Tensor  # float32
    proximal_RT: Tensor  # float32
    reference_RT: Tensor  # float32
    advantages_RT: Tensor  # float32
    values_RT: Tensor  # float32
    returns_RT: Tensor  # float32
    ages_RT: Tensor  # int64
    selected_RT: Tensor | None  # bool
    temperature_R: Tensor  # float32
    tokens_R: Tensor  # int64: generated tokens of each row


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTokens:
    """A batch with what the step adds to each token before the first update. Zeros where nothing asked for it."""

    batch: TrainingBatch
    critic_mask_N: Tensor  # bool
    train_mask_N: Tensor  # bool
    behaviour_N: Tensor  # float32: the batch's; with observations in the loss, theirs are the learner's
    proximal_N: Tensor  # float32: log-probs at the start of the step; the behaviour's where the loss does not need them
    reference_N: Tensor  # float32: log-probs of the reference policy
    values_N: Tensor  # float32: the critic's at the start of the step
    advantages_N: Tensor  # float32
    returns_N: Tensor  # float32: the critic's targets
    selected_N: Tensor | None = None  # bool: tokens a loss singles out, for this update

    @classmethod
    def of(cls, batch: TrainingBatch, *, critic_mask_N: Tensor, train_mask_N: Tensor) -> StepTokens:
        """Before anything is known but the behaviour."""
        nothing_N = torch.zeros_like(batch.behaviour_N)
        return cls(
            batch=batch,
            critic_mask_N=critic_mask_N,
            train_mask_N=train_mask_N,
            behaviour_N=batch.behaviour_N,
            proximal_N=batch.behaviour_N,
            reference_N=nothing_N,
            values_N=nothing_N,
            advantages_N=nothing_N,
            returns_N=nothing_N,
        )

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

        loss_mask_RT = padded(batch.loss_mask_N, masked_RT)
        return MicroBatch(
            token_ids_RT=padded(batch.token_ids_N),
            loss_mask_RT=loss_mask_RT,
            generated_RT=padded(batch.generated_N, masked_RT),
            critic_mask_RT=padded(self.critic_mask_N, masked_RT),
            train_mask_RT=padded(self.train_mask_N, masked_RT).float(),
            behaviour_RT=padded(self.behaviour_N),
            proximal_RT=padded(self.proximal_N),
            reference_RT=padded(self.reference_N),
            advantages_RT=padded(self.advantages_N),
            values_RT=padded(self.values_N),
            returns_RT=padded(self.returns_N),
            ages_RT=padded(batch.ages_N),
            selected_RT=None if self.selected_N is None else padded(self.selected_N, masked_RT),
            temperature_R=batch.temperatures_B[rows_R].to(device),
            tokens_R=loss_mask_RT.sum(1),
        )


def _join(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype))


def _responses(trajectories: Sequence[Trajectory]) -> Tensor:
    """From the first generated token on."""
    return torch.cat([torch.from_numpy(np.maximum.accumulate(trajectory.loss_mask)) == 1 for trajectory in trajectories])


def _amounts(trajectories: Sequence[Trajectory], starts: Sequence[int], tokens: int) -> Tensor:
    """What of a total lands on no token by name lands on the last generated one: no reward is lost."""
    amounts_N = torch.zeros(tokens, dtype=torch.float64)
    for start, trajectory in zip(starts, trajectories, strict=True):
        reward, written = trajectory.reward, np.flatnonzero(trajectory.loss_mask)
        for token, amount in zip(reward.tokens, reward.amounts, strict=True):
            amounts_N[start + token] += amount
        unplaced = reward.total - sum(reward.amounts)
        if len(written) and not abs(unplaced) < ROUNDING:
            amounts_N[start + int(written[-1])] += unplaced
    return amounts_N


def _ages(trajectories: Sequence[Trajectory], token_ages: Mapping[int, int]) -> Tensor:
    versions_N = np.concatenate([trajectory.versions for trajectory in trajectories])
    present, inverse_N = np.unique(versions_N, return_inverse=True)
    missing = [int(version) for version in present if version >= 0 and int(version) not in token_ages]
    if missing:
        raise TrajectoryError(f"no age is known of the tokens of versions {missing}")
    ages = np.array([token_ages[int(version)] if version >= 0 else 0 for version in present], dtype=np.int64)
    return torch.from_numpy(ages[inverse_N])
