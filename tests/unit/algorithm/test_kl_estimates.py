import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from agentrl.algorithm.kl import k1, k3


def test_estimates_by_hand():
    sampled, other = tensor([math.log(0.5)]), tensor([math.log(0.25)])
    assert_close(k1(sampled, other), tensor([math.log(2)]))
    assert_close(k3(sampled, other), tensor([0.5 - 1 + math.log(2)]))


@settings(max_examples=20)
@given(st.floats(-50, 0), st.floats(-50, 0))
def test_k3_is_never_negative(sampled, other):
    assert k3(tensor([sampled], dtype=torch.float64), tensor([other], dtype=torch.float64)).item() >= -1e-12


def test_both_estimate_the_divergence_of_known_distributions():
    p, q = tensor([0.7, 0.2, 0.1]), tensor([0.5, 0.3, 0.2])
    exact = (p * (p / q).log()).sum()
    assert_close((p * k1(p.log(), q.log())).sum(), exact)
    assert_close((p * k3(p.log(), q.log())).sum(), exact)
