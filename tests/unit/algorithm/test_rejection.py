import pytest
import torch
from torch import nan, tensor

from agentrl.algorithm.rejection import STATISTICS, kept

# Three trajectories of tokens of ratio r = compared / behaviour; the third has one generated token, the others two.
RATIOS = tensor([[0.5, 2.0], [1.2, 1.5], [0.8, 100.0]], dtype=torch.float64)
MASK = tensor([[1, 1], [1, 1], [1, 0]])
NOTHING = torch.zeros_like(RATIOS)


def rows_kept(statistic, *, low=None, high=None):
    keep = kept(RATIOS.log(), NOTHING, MASK, statistic=statistic, low=low, high=high)
    assert keep.dtype is torch.bool
    assert not keep[2, 1]
    return keep.tolist()


def test_tokens_are_kept_by_their_ratio():
    assert rows_kept("token_k1", low=0.7, high=1.3) == [[False, False], [True, False], [True, False]]


def test_bounds_of_the_ratio_are_bounds_of_the_ratio_itself():
    # .72 is within [.7, 1.3] and 1.35 is not; of their reciprocals, 1.39 and .74, it is the other way round
    compared = tensor([[0.72, 1.35]]).log()
    assert kept(compared, torch.zeros(1, 2), torch.ones(1, 2), statistic="token_k1", low=0.7, high=1.3).tolist() == [[True, False]]


def test_trajectories_are_kept_by_the_product_of_their_ratios():
    # products 1, 1.8, .8
    assert rows_kept("seq_sum_k1", low=0.9, high=1.7) == [[True, True], [False, False], [False, False]]
    assert rows_kept("seq_sum_k1", low=0.7, high=1.9) == [[True, True], [True, True], [True, False]]


def test_trajectories_are_kept_by_the_geometric_mean_of_their_ratios():
    # geometric means 1, sqrt(1.8) = 1.342, .8
    assert rows_kept("seq_mean_k1", low=0.9, high=1.35) == [[True, True], [True, True], [False, False]]
    assert rows_kept("seq_mean_k1", low=0.7, high=1.33) == [[True, True], [False, False], [True, False]]


def test_squared_logarithms_by_hand():
    # k2 = (log r)^2 / 2: .240, .240 | .0166, .0822 | .0249
    assert rows_kept("token_k2", high=0.05) == [[False, False], [True, False], [True, False]]
    assert rows_kept("seq_sum_k2", high=0.09) == [[False, False], [False, False], [True, False]]  # .480, .0988, .0249
    assert rows_kept("seq_mean_k2", high=0.05) == [[False, False], [True, True], [True, False]]  # .240, .0494, .0249
    assert rows_kept("seq_max_k2", high=0.09) == [[False, False], [True, True], [True, False]]  # .240, .0822, .0249


def test_k3_by_hand():
    # k3 = r - 1 - log r: .1931, .3069 | .0177, .0945 | .0231
    assert rows_kept("token_k3", high=0.2) == [[True, False], [True, True], [True, False]]
    assert rows_kept("seq_sum_k3", high=0.11) == [[False, False], [False, False], [True, False]]  # .5, .1122, .0231
    assert rows_kept("seq_mean_k3", high=0.06) == [[False, False], [True, True], [True, False]]  # .25, .0561, .0231
    assert rows_kept("seq_max_k3", high=0.09) == [[False, False], [False, False], [True, False]]  # .3069, .0945, .0231


@pytest.mark.parametrize("statistic", STATISTICS)
def test_equal_policies_are_kept_and_nothing_outside_the_mask_is_looked_at(statistic):
    compared = tensor([[-1.0, nan], [nan, nan]])
    mask = tensor([[1, 0], [0, 0]])
    keep = kept(compared, torch.full((2, 2), -1.0), mask, statistic=statistic, low=0.99 if statistic.endswith("k1") else None, high=1.01)
    assert keep.tolist() == [[True, False], [False, False]]


def test_what_is_not_a_number_stays_to_be_seen():
    keep = kept(tensor([[nan, -1.0]]), tensor([[-1.0, -1.0]]), tensor([[1, 1]]), statistic="seq_mean_k3", low=None, high=0.1)
    assert keep.all()


def test_an_open_side_bounds_nothing():
    assert rows_kept("token_k1", low=0.7) == [[False, True], [True, True], [True, False]]
    assert rows_kept("token_k1", low=0.0) == [[True, True], [True, True], [True, False]]


def test_an_unknown_statistic_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"seq_max_k1.*token_k1"):
        kept(NOTHING, NOTHING, MASK, statistic="seq_max_k1", low=None, high=1.0)
