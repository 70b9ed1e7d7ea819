from torch import tensor
from torch.testing import assert_close

from agentrl.algorithm.importance import effective_sample_share, truncated_weights


def test_weights_are_cut_at_the_threshold_by_hand():
    weights, cut = truncated_weights(tensor([0.5, 2.0, 3.0]).log(), tensor([1.0, 1.0, 1.0]).log(), truncate=2.5)
    assert_close(weights, tensor([0.5, 2.0, 2.5]))
    assert cut.tolist() == [False, False, True]


def test_effective_sample_share_by_hand():
    # weights 1, 1, 4: 36 / (3 * 18)
    assert_close(effective_sample_share(tensor(6.0), tensor(18.0), tensor(3.0)), tensor(2 / 3))
    assert effective_sample_share(tensor(5.0), tensor(5.0), tensor(5.0)).item() == 1.0
    assert effective_sample_share(tensor(0.0), tensor(0.0), tensor(0.0)).item() == 0.0
