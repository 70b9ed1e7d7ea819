from dataclasses import replace

import pytest
from torch import nan, tensor
from torch.testing import assert_close

from agentrl.algorithm.advantages import AdvantageInputs
from agentrl.algorithm.optimal_baseline import optimal_token_baseline

# Probabilities .5, .5, .5 and 1, .5; sums of squares .5 and 1, .5: gradient squares w = .5, .5, .5 and 0, .5, summed up W = .5, 1, 1.5 and 0, .5.
# Rewards to go are 3, 3, 2 and 0, 0. The second trajectory has an observation in its midst.
GROUP = AdvantageInputs(
    rewards_BT=tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]),
    mask_BT=tensor([[True, True, True], [True, False, True]]),
    groups_B=tensor([0, 0]),
    logp_BT=tensor([[0.5, 0.5, 0.5], [1.0, nan, 0.5]]).log(),
    behaviour_BT=tensor([[0.5, 0.5, 0.5], [1.0, nan, 0.125]]).log(),
    sum_pi_squared_BT=tensor([[0.5, 0.5, 0.5], [1.0, nan, 0.5]]),
)


def test_optimal_token_baseline_by_hand():
    # baselines: .5 * 3 / .5 = 3 at the first place, 1 * 3 / 1.5 = 2 at the second, none where one trajectory is alone
    assert_close(optimal_token_baseline(GROUP).advantages_BT, tensor([[0.0, 1.0, 2.0], [-3.0, 0.0, -2.0]]))


def test_tokens_of_another_policy_weigh_by_their_squared_ratio():
    # ratio 4 of the second trajectory's last token, cut to 2: w = 4 * .5, W = 2, so its baseline is 3 / (1 + 2) = 1
    found = optimal_token_baseline(GROUP, truncate=2.0)
    assert_close(found.advantages_BT, tensor([[0.0, 2.0, 2.0], [-3.0, 0.0, -1.0]]))


def test_a_group_of_one_has_no_baseline():
    alone = replace(GROUP, groups_B=tensor([0, 1]))
    assert_close(optimal_token_baseline(alone).advantages_BT, tensor([[3.0, 3.0, 2.0], [0.0, 0.0, 0.0]]))


def test_tokens_without_a_choice_divide_nothing_by_nothing():
    # rounding may make 1 - 2 pi + sum pi^2 a little less than 0 for pi = 1
    certain = replace(GROUP, logp_BT=tensor([[0.0, 0.0, 0.0], [0.0, nan, 0.0]]), sum_pi_squared_BT=tensor([[1.0 - 1e-7] * 3] * 2))
    assert_close(optimal_token_baseline(certain).advantages_BT, tensor([[3.0, 3.0, 2.0], [0.0, 0.0, 0.0]]))


def test_what_is_missing_is_told():
    with pytest.raises(ValueError, match="sums of squared probabilities"):
        optimal_token_baseline(replace(GROUP, sum_pi_squared_BT=None))
    with pytest.raises(ValueError, match="the behaviour's log-probs"):
        optimal_token_baseline(replace(GROUP, behaviour_BT=None), truncate=2.0)
    with pytest.raises(ValueError, match="above 0"):
        optimal_token_baseline(GROUP, truncate=0.0)
