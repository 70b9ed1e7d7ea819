from dataclasses import replace

import pytest
import torch
from learner_scene import trajectory
from torch import tensor

from agentrl.errors import TrajectoryError
from agentrl.learner.batch import StepTokens, TrainingBatch
from agentrl.types import Reward, StopReason


def two_rows():
    first = trajectory([1, 5, 6, 7], [0, 1, 0, 1], reward=1.0, logprob=-2.0, version=4)
    second = trajectory([1, 8], [0, 1], reward=0.0, task=0, k=1, logprob=-3.0, version=6, temperature=0.5)
    return TrainingBatch.of([[first, second]], {4: 2, 6: 0})


def test_token_arrays_are_laid_end_to_end():
    batch = two_rows()
    assert batch.token_ids_N.tolist() == [1, 5, 6, 7, 1, 8]
    assert batch.loss_mask_N.tolist() == [False, True, False, True, False, True]
    assert batch.behaviour_N.tolist() == [0, -2, 0, -2, 0, -3]
    assert (batch.starts_B.tolist(), batch.lengths_B.tolist()) == ([0, 4], [4, 2])
    assert batch.count(batch.loss_mask_N).tolist() == [2, 1]


def test_train_mask_is_the_loss_mask_without_old_tokens():
    batch = two_rows()
    assert batch.train_mask(None).tolist() == batch.loss_mask_N.tolist()
    assert batch.train_mask(1).tolist() == [False] * 5 + [True]
    assert batch.train_mask(2).tolist() == batch.loss_mask_N.tolist()


def micro_of(batch, rows):
    advantages = batch.spread(tensor([1.0, -1.0]))
    tokens = StepTokens.of(batch, critic_mask_N=batch.response_N, train_mask_N=batch.train_mask(1))
    return replace(tokens, advantages_N=advantages).micro_batch(rows, torch.device("cpu"))


def test_a_micro_batch_pads_on_the_right():
    micro = micro_of(two_rows(), [1, 0])
    assert micro.token_ids_RT.tolist() == [[1, 8, 0, 0], [1, 5, 6, 7]]
    assert micro.loss_mask_RT.tolist() == [[False, True, False, False], [False, True, False, True]]
    assert micro.train_mask_RT.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert micro.advantages_RT.tolist() == [[-1, -1, 0, 0], [1, 1, 1, 1]]
    assert micro.critic_mask_RT.tolist() == [[False, True, False, False], [False, True, True, True]]
    assert micro.temperature_R.tolist() == [0.5, 1.0]
    assert micro.tokens_R.tolist() == [1, 2]


def test_a_dummy_is_a_short_row_that_counts_nothing():
    micro = micro_of(two_rows(), [])
    assert micro.token_ids_RT.tolist() == [[1, 8]]
    assert not micro.loss_mask_RT.any()
    assert not micro.train_mask_RT.any()


def test_what_cannot_be_trained_on_is_refused():
    with pytest.raises(TrajectoryError, match="before the first generated token"):
        TrainingBatch.of([[trajectory([5, 6], [1, 1], reward=1.0)]], {0: 0})
    with pytest.raises(TrajectoryError, match=r"versions \[3\]"):
        TrainingBatch.of([[trajectory([1, 5], [0, 1], reward=1.0, version=3)]], {0: 0})
    with pytest.raises(TrajectoryError, match="without trajectories"):
        TrainingBatch.of([], {})


def test_batches_of_other_content_have_other_fingerprints():
    one = trajectory([1, 5], [0, 1], reward=1.0)
    other = trajectory([1, 6], [0, 1], reward=1.0)
    prints = [TrainingBatch.of([[row]], {0: 0}).fingerprint() for row in (one, one, other)]
    assert prints[0] == prints[1] != prints[2]


def test_rewards_lie_on_the_tokens_that_earned_them_and_none_is_lost():
    row = trajectory([1, 5, 6, 7], [0, 1, 0, 1], reward=1.0)
    placed = Reward(total=1.75, tokens=(1, 1), amounts=(0.5, 0.25))  # 1.0 has no token of its own: it is the last generated one's
    batch = TrainingBatch.of([[replace(row, reward=placed)]], {0: 0})
    assert batch.amounts_N.tolist() == [0.0, 0.75, 0.0, 1.0]
    assert batch.rewards_B.tolist() == [1.75]


def test_a_greedy_trajectory_is_its_groups_baseline_and_not_trained_on():
    def group(reward, k):
        sampled = [trajectory([1, 5], [0, 1], reward=0.0, k=place) for place in range(k)]
        return [*sampled, trajectory([1, 6], [0, 1], reward=reward, k=k, temperature=0.0)]

    batch = TrainingBatch.of([group(1.0, 2), group(0.5, 1)], {0: 0})
    assert batch.groups_B.tolist() == [0, 0, 1]
    assert batch.baselines_B.tolist() == [1.0, 1.0, 0.5]
    assert TrainingBatch.of([group(1.0, 2)[:2]], {0: 0}).baselines_B is None


def test_trajectories_that_stopped_in_a_masked_way_are_not_trained_on():
    cut = replace(trajectory([1, 5, 6], [0, 1, 1], reward=0.0, k=1), stop=StopReason.CONTEXT_LIMIT)
    batch = TrainingBatch.of([[trajectory([1, 5], [0, 1], reward=1.0), cut]], {0: 0})
    assert batch.train_mask(None, frozenset({StopReason.CONTEXT_LIMIT})).tolist() == [False, True, False, False, False]


def test_padding_and_its_inverse():
    batch = two_rows()
    padded_BT = batch.padded(batch.token_ids_N)
    assert padded_BT.tolist() == [[1, 5, 6, 7], [1, 8, 0, 0]]
    assert torch.equal(batch.flat(padded_BT), batch.token_ids_N)
