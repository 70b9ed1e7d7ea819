import pytest
import torch
from torch import nan, tensor
from torch.testing import assert_close

from agentrl.algorithm.importance import (
    batch_normaliser,
    effective_sample_share,
    importance_weights,
    interpolated_proximal,
    weight_sums,
)

BEHAVIOUR = tensor([[0.5, 0.5, 0.5, 0.5]]).log()
COMPARED = tensor([[0.25, 0.5, 0.75, 1.0]]).log()  # ratios .5, 1, 1.5, 2
ALL = torch.ones(1, 4)


def test_token_weights_are_truncated_by_hand():
    weights, cut = importance_weights(COMPARED, BEHAVIOUR, ALL, level="token", truncate=1.25, bounds=None)
    assert_close(weights, tensor([[0.5, 1.0, 1.25, 1.25]]))
    assert cut.tolist() == [[False, False, True, True]]


def test_token_weights_outside_of_bounds_are_zero_by_hand():
    weights, cut = importance_weights(COMPARED, BEHAVIOUR, ALL, level="token", truncate=None, bounds=(0.75, 1.75))
    assert_close(weights, tensor([[0.0, 1.0, 1.5, 0.0]]))
    assert cut.tolist() == [[True, False, False, True]]


def test_the_weight_of_a_trajectory_is_the_product_over_its_generated_tokens():
    # .5 x 1 x 1.5 = .75 without the last token; 1.5 with it
    mask = tensor([[1, 1, 1, 0]])
    weights, cut = importance_weights(COMPARED, BEHAVIOUR, mask, level="sequence", truncate=None, bounds=None)
    assert_close(weights, tensor([[0.75, 0.75, 0.75, 0.0]]))
    assert not cut.any()
    truncated, cut = importance_weights(COMPARED, BEHAVIOUR, ALL, level="sequence", truncate=1.25, bounds=None)
    assert_close(truncated, tensor([[1.25, 1.25, 1.25, 1.25]]))
    assert cut.all()
    outside, _ = importance_weights(COMPARED, BEHAVIOUR, mask, level="sequence", truncate=None, bounds=(0.8, 2.0))
    assert not outside.any()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_have_no_gradient_and_see_nothing_outside_the_mask(level):
    compared = tensor([[-1.0, nan, -2.0]], requires_grad=True)
    weights, cut = importance_weights(compared, tensor([[-1.0, 0.0, -2.0]]), tensor([[1, 0, 1]]), level=level, truncate=2.0, bounds=None)
    assert not weights.requires_grad
    assert weights.tolist() == [[1.0, 0.0, 1.0]]
    assert not cut.any()


def test_weights_are_truncated_or_bounded_but_not_both():
    with pytest.raises(ValueError, match="not both"):
        importance_weights(COMPARED, BEHAVIOUR, ALL, level="token", truncate=2.0, bounds=(0.5, 2.0))


def test_weights_of_tokens_are_brought_to_mean_one_by_hand():
    # three tokens of weights .5, 1, 3: mean 1.5; in two micro-batches the sums add up to the same
    weights, mask = tensor([[0.5, 9.0], [1.0, 3.0]]), tensor([[1, 0], [1, 1]])
    total = weight_sums(weights[:1], mask[:1], level="token") + weight_sums(weights[1:], mask[1:], level="token")
    assert total.tolist() == [4.5, 3.0]
    assert batch_normaliser(*total).item() == 1.5


def test_weights_of_trajectories_are_brought_to_mean_one_whatever_their_lengths():
    # weights .5 (one token) and 2 (two tokens): mean 1.25, not (.5 + 2 + 2) / 3; a row without tokens is none
    weights, mask = tensor([[0.5, 0.0], [2.0, 2.0], [7.0, 7.0]]), tensor([[1, 0], [1, 1], [0, 0]])
    total = weight_sums(weights, mask, level="sequence")
    assert total.tolist() == [2.5, 2.0]
    assert batch_normaliser(*total).item() == 1.25


def test_weights_that_are_all_cut_or_absent_are_divided_by_one():
    assert batch_normaliser(tensor(0.0), tensor(3.0)).item() == 1.0
    assert batch_normaliser(tensor(0.0), tensor(0.0)).item() == 1.0


def test_the_interpolated_proximal_policy_by_hand():
    # from log-prob -1 (sampled) to -2 (now): ages 0, 1, 3 are 0, 1/2, 3/4 of the way; a prompt token has no age
    logp, behaviour = tensor([[-2.0, -2.0, -2.0, 0.0]], requires_grad=True), tensor([[-1.0, -1.0, -1.0, 0.0]])
    proximal = interpolated_proximal(logp, behaviour, tensor([[0, 1, 3, -5]]))
    assert_close(proximal, tensor([[-1.0, -1.5, -1.75, 0.0]]))
    assert not proximal.requires_grad


def test_effective_sample_share_by_hand():
    # weights 1, 1, 4: 36 / (3 * 18)
    assert_close(effective_sample_share(tensor(6.0), tensor(18.0), tensor(3.0)), tensor(2 / 3))
    assert effective_sample_share(tensor(5.0), tensor(5.0), tensor(5.0)).item() == 1.0
    assert effective_sample_share(tensor(0.0), tensor(0.0), tensor(0.0)).item() == 0.0
