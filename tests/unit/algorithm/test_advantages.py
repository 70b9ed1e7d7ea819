from torch import tensor
from torch.testing import assert_close

from agentrl.algorithm.advantages import group_relative_advantages


def test_group_relative_advantage_by_hand():
    # rewards 1, 0, 0, 1: mean .5, std (unbiased) .5774
    advantages = group_relative_advantages(tensor([1.0, 0.0, 0.0, 1.0]), tensor([0, 0, 0, 0]), normalise_by_std=True)
    assert_close(advantages, tensor([0.866, -0.866, -0.866, 0.866]), atol=1e-3, rtol=0)


def test_without_the_deviation_only_the_mean_is_taken_off():
    advantages = group_relative_advantages(tensor([3.0, 0.0, 0.0]), tensor([0, 0, 0]), normalise_by_std=False)
    assert_close(advantages, tensor([2.0, -1.0, -1.0]))


def test_groups_are_told_by_their_number_whatever_the_order():
    rewards, groups = tensor([1.0, 10.0, 0.0, 30.0]), tensor([0, 1, 0, 1])
    assert_close(group_relative_advantages(rewards, groups, normalise_by_std=False), tensor([0.5, -10.0, -0.5, 10.0]))


def test_a_group_of_one_keeps_its_reward():
    rewards, groups = tensor([2.0, 1.0, 0.0]), tensor([0, 1, 1])
    assert_close(group_relative_advantages(rewards, groups, normalise_by_std=True)[0].item(), 2.0, atol=1e-5, rtol=0)
    assert_close(group_relative_advantages(rewards, groups, normalise_by_std=False)[0].item(), 2.0)


def test_equal_rewards_have_no_advantage():
    rewards = tensor([1.0] * 16)
    assert group_relative_advantages(rewards, tensor([0] * 16), normalise_by_std=True).tolist() == [0.0] * 16
