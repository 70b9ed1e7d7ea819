import pytest
from torch import nan, tensor
from torch.testing import assert_close

from agentrl.algorithm.whitening import whiten


def test_whitening_by_hand():
    # 1, 3, 5: mean 3, unbiased variance 4
    values, mask = tensor([[1.0, nan, 3.0], [5.0, 99.0, 99.0]]), tensor([[True, False, True], [True, False, False]])
    assert_close(whiten(values, mask), tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("mask", [[True, True, True], [False, True, False], [False, False, False]])
def test_equal_values_one_value_and_none_become_zero(mask):
    assert whiten(tensor([[7.0, 7.0, 7.0]]), tensor([mask])).tolist() == [[0.0, 0.0, 0.0]]
