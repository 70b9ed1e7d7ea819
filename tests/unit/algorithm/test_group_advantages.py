import pytest
from torch import ones, tensor
from torch.testing import assert_close

from agentrl.algorithm.advantages import AdvantageInputs
from agentrl.algorithm.group_advantages import dr_grpo, gdpo, gpg, grpo, grpo_passk, opo, reinforce_plus_plus_baseline, remax, rloo


def answers(rewards, groups=None, **more):
    """Trajectories of one token."""
    mask = ones(len(rewards), 1).bool()
    return AdvantageInputs(rewards_BT=tensor(rewards)[:, None], mask_BT=mask, groups_B=tensor(groups or [0] * len(rewards)), **more)


def of_trajectories(found):
    return found.advantages_BT[:, 0]


def test_grpo_by_hand():
    # mean .5, deviation (unbiased) .57735
    found = of_trajectories(grpo(answers([1.0, 0.0, 0.0, 1.0])))
    assert_close(found, tensor([0.866, -0.866, -0.866, 0.866]), atol=1e-3, rtol=0)


def test_an_advantage_is_every_generated_tokens_and_no_others():
    mask = tensor([[True, False, True], [True, True, False]])
    earned = AdvantageInputs(rewards_BT=tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 1.0]]), mask_BT=mask, groups_B=tensor([0, 0]))
    assert_close(dr_grpo(earned).advantages_BT, tensor([[0.5, 0.0, 0.5], [-0.5, -0.5, 0.0]]))


def test_groups_are_told_by_their_number_whatever_the_order():
    assert_close(of_trajectories(dr_grpo(answers([1.0, 10.0, 0.0, 30.0], [0, 3, 0, 3]))), tensor([0.5, -10.0, -0.5, 10.0]))


def test_dr_grpo_by_hand():
    assert_close(of_trajectories(dr_grpo(answers([3.0, 0.0, 0.0]))), tensor([2.0, -1.0, -1.0]))


def test_reinforce_plus_plus_baseline_by_hand():
    assert_close(of_trajectories(reinforce_plus_plus_baseline(answers([3.0, 1.0, 5.0, 5.0], [0, 0, 1, 1]))), tensor([1.0, -1.0, 0.0, 0.0]))


def test_rloo_by_hand():
    # others' means: 0, 1.5, 1.5
    assert_close(of_trajectories(rloo(answers([3.0, 0.0, 0.0]))), tensor([3.0, -1.5, -1.5]))


@pytest.mark.parametrize(("singleton", "expected"), [("reward", 7.0), ("zero", 0.0)])
def test_rloo_of_a_group_of_one(singleton, expected):
    found = of_trajectories(rloo(answers([7.0, 2.0, 1.0], [0, 1, 1]), singleton=singleton))
    assert_close(found, tensor([expected, 1.0, -1.0]))


def test_rloo_knows_two_rules_for_a_group_of_one():
    with pytest.raises(ValueError, match="reward or zero, got 'nothing'"):
        rloo(answers([1.0]), singleton="nothing")


def test_opo_by_hand():
    # lengths 1 and 3, rewards 1 and 0: baseline 1 / 4
    mask = tensor([[True, False, False], [True, True, True]])
    earned = AdvantageInputs(rewards_BT=tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), mask_BT=mask, groups_B=tensor([0, 0]))
    assert_close(opo(earned).advantages_BT, tensor([[0.75, 0.0, 0.0], [-0.25, -0.25, -0.25]]))


def test_gpg_by_hand():
    # 3 of 4 rewards are not 0: alpha 4 / 3; differences from the means 1, -1, 0, 0
    assert_close(of_trajectories(gpg(answers([2.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]))), tensor([4 / 3, -4 / 3, 0.0, 0.0]))


def test_grpo_passk_by_hand():
    # the first group's deviation is .5, its two best .5 apart; in the second two are best
    found = of_trajectories(grpo_passk(answers([0.5, 0.0, 1.0, 2.0, 2.0, 0.0], [0, 0, 0, 1, 1, 1])))
    assert_close(found, tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0]), atol=1e-5, rtol=0)


def test_grpo_passk_gives_a_group_of_one_nothing():
    assert of_trajectories(grpo_passk(answers([5.0, 1.0, 0.0], [1, 0, 0])))[0] == 0.0


def test_gdpo_by_hand():
    # each part's two values are .7071 deviations from their mean, however large they are: 2 * .7071 - .7071 and its opposite
    earned = answers([0.0, 0.0], parts_BK=tensor([[100.0, 0.0], [0.0, 0.1]]))
    found = of_trajectories(gdpo(earned, parts=["answer", "format"], weights=[2.0, 1.0]))
    assert_close(found, tensor([0.7071, -0.7071]), atol=1e-4, rtol=0)


def test_gdpo_weighs_parts_equally_where_nothing_else_is_said():
    earned = answers([0.0, 0.0], parts_BK=tensor([[100.0, 0.0], [0.0, 0.1]]))
    assert_close(of_trajectories(gdpo(earned, parts=["answer", "format"])), tensor([0.0, 0.0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("parts", "weights"), [(["answer"], None), (["answer", "format"], [1.0]), ([], [])])
def test_gdpo_needs_a_weight_and_a_column_for_each_part(parts, weights):
    with pytest.raises(ValueError, match="2 columns"):
        gdpo(answers([0.0, 0.0], parts_BK=ones(2, 2)), parts=parts, weights=weights)


def test_remax_by_hand():
    # to go: 3, 2, 2; the greedy episode earned 1
    mask = tensor([[True, True, False, True]])
    earned = AdvantageInputs(rewards_BT=tensor([[1.0, 0.0, 0.0, 2.0]]), mask_BT=mask, groups_B=tensor([0]), baselines_B=tensor([1.0]))
    assert_close(remax(earned).advantages_BT, tensor([[2.0, 1.0, 0.0, 1.0]]))


def test_equal_rewards_have_no_advantage():
    for estimator in (grpo, dr_grpo, rloo, opo, gpg, grpo_passk):
        assert of_trajectories(estimator(answers([1.0] * 16))).tolist() == [0.0] * 16
