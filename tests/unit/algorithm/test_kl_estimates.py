import math

import torch
from torch import tensor
from torch.testing import assert_close

from agentrl.algorithm.kl import k1, k3


def test_estimates_by_hand():
    sampled, other = tensor([math.log(0.5)]), tensor([math.log(0.25)])
    assert_close(k1(sampled, other), tensor([math.log(2)]))
    assert_close(k3(sampled, other), tensor([0.5 - 1 + math.log(2)]))


def test_k3_is_never_negative():
    sampled, other = torch.linspace(-50, 0, 101, dtype=torch.float64), torch.linspace(-50, 0, 99, dtype=torch.float64)
    assert k3(sampled[:, None], other[None]).min().item() >= 0.0


def test_both_estimate_the_divergence_of_known_distributions():
    p, q = tensor([0.7, 0.2, 0.1]), tensor([0.5, 0.3, 0.2])
    exact = (p * (p / q).log()).sum()
    assert_close((p * k1(p.log(), q.log())).sum(), exact)
    assert_close((p * k3(p.log(), q.log())).sum(), exact)
