import pytest
import torch
from learner_scene import trajectory
from torch import tensor

from agentrl.errors import TrajectoryError
from agentrl.learner.batch import StepTokens, TrainingBatch


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
    tokens = StepTokens(batch=batch, train_mask_N=batch.train_mask(1), advantages_N=advantages, proximal_N=batch.behaviour_N)
    return tokens.micro_batch(rows, torch.device("cpu"))


def test_a_micro_batch_pads_on_the_right():
    micro = micro_of(two_rows(), [1, 0])
    assert micro.token_ids_RT.tolist() == [[1, 8, 0, 0], [1, 5, 6, 7]]
    assert micro.loss_mask_RT.tolist() == [[False, True, False, False], [False, True, False, True]]
    assert micro.train_mask_RT.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert micro.advantages_RT.tolist() == [[-1, -1, 0, 0], [1, 1, 1, 1]]
    assert micro.temperature_R.tolist() == [0.5, 1.0]


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
