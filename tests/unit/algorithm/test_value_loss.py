import pytest
import torch
from torch import nan, tensor
from torch.testing import assert_close

from agentrl.algorithm.value_loss import explained_sums, explained_variance, value_losses

OLD = tensor([0.0, 0.0, 0.0, 0.0])
RETURNS = tensor([1.0, 1.0, 1.0, -1.0])


def test_clipped_value_loss_and_its_gradient_by_hand():
    # values .2 and .5 are within .5 of the old ones: (.2 - 1)^2 / 2, (.5 - 1)^2 / 2
    # .8 has gone too far towards its return: as if it were .5, and no gradient
    # .8 away from its return -1: its own error (1.8^2 / 2) is the larger one and pulls it back
    values = tensor([0.2, 0.5, 0.8, 0.8], requires_grad=True)
    losses, clipped = value_losses(values, OLD, RETURNS, clip=0.5)
    losses.sum().backward()
    assert_close(losses.detach(), tensor([0.32, 0.125, 0.125, 1.62]))
    assert_close(values.grad, tensor([-0.8, -0.5, 0.0, 1.8]))
    assert clipped.tolist() == [False, False, True, False]


def test_without_a_clip_it_is_half_the_squared_error():
    losses, clipped = value_losses(tensor([0.2, 0.5, 0.8, 0.8]), OLD, RETURNS, clip=None)
    assert_close(losses, tensor([0.32, 0.125, 0.02, 1.62]))
    assert not clipped.any()


def test_explained_variance_by_hand():
    # returns 0, 2, 4: spread 8; errors 1, 0, 1 have mean 2/3 and spread 2 - 4/3 = 2/3: 1 - 1/12
    values, returns = tensor([[-1.0, 2.0], [3.0, nan]]), tensor([[0.0, 2.0], [4.0, nan]])
    mask = tensor([[1, 1], [1, 0]])
    sums = explained_sums(values[:1], returns[:1], mask[:1]) + explained_sums(values[1:], returns[1:], mask[1:])
    assert sums.tolist() == [3.0, 6.0, 20.0, 2.0, 2.0]
    assert explained_variance(sums) == pytest.approx(11 / 12)


def test_a_constant_explains_nothing_and_a_constant_error_takes_nothing_away():
    returns, mask = tensor([0.0, 2.0, 4.0]), torch.ones(3)
    assert explained_variance(explained_sums(torch.full((3,), 7.0), returns, mask)) == pytest.approx(0.0)
    assert explained_variance(explained_sums(returns + 5, returns, mask)) == pytest.approx(1.0)


def test_returns_that_are_all_equal_or_absent_leave_nothing_to_explain():
    equal = torch.full((3,), 0.1)
    assert explained_variance(explained_sums(tensor([0.0, 1.0, 2.0]), equal, torch.ones(3))) == 0.0
    assert explained_variance(explained_sums(equal, equal, torch.zeros(3))) == 0.0
