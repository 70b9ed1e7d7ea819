import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from agentrl.algorithm.kl import ESTIMATES, k1, k3, kl_estimate

LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        # the policy has .5, the reference .25: log-ratio log 2, r = reference / policy = 1/2
        ("k1", LOG2, 1.0),
        ("abs", LOG2, 1.0),
        ("k2", LOG2**2 / 2, LOG2),
        ("k3", 0.5 - 1 + LOG2, 1 - 0.5),
        ("k3_straight_through", 0.5 - 1 + LOG2, LOG2),
    ],
)
def test_estimates_and_their_gradients_by_hand(name, value, gradient):
    logp = tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(name, logp, tensor([math.log(0.25)], dtype=torch.float64))
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value)
    assert logp.grad.item() == pytest.approx(gradient)


def test_every_estimate_of_equal_policies_is_zero():
    logp = tensor([-3.0, 0.0, -40.0])
    assert all(not kl_estimate(name, logp, logp).any() for name in ESTIMATES)


def test_k3_is_never_negative():
    sampled, other = torch.linspace(-50, 0, 101, dtype=torch.float64), torch.linspace(-50, 0, 99, dtype=torch.float64)
    assert k3(sampled[:, None], other[None]).min().item() >= 0.0


def test_k1_and_k3_estimate_the_divergence_of_known_distributions():
    p, q = tensor([0.7, 0.2, 0.1]), tensor([0.5, 0.3, 0.2])
    exact = (p * (p / q).log()).sum()
    assert_close((p * k1(p.log(), q.log())).sum(), exact)
    assert_close((p * k3(p.log(), q.log())).sum(), exact)


def test_straight_through_has_the_gradient_of_the_divergence_and_k3_has_another():
    logits, q = tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True), tensor([0.5, 0.3, 0.2], dtype=torch.float64)

    def gradient(name):  # of the mean over tokens sampled by the policy
        logp = logits.log_softmax(0)
        return torch.autograd.grad((logp.exp().detach() * kl_estimate(name, logp, q.log())).sum(), logits)[0]

    logp = logits.log_softmax(0)
    exact = torch.autograd.grad((logp.exp() * (logp - q.log())).sum(), logits)[0]
    assert_close(gradient("k2"), exact)
    assert_close(gradient("k3_straight_through"), exact)
    assert_close(gradient("k1"), torch.zeros(3, dtype=torch.float64))
    assert (gradient("k3") - exact).abs().max() > 0.01


def test_an_unknown_estimate_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"k4.*k3_straight_through"):
        kl_estimate("k4", tensor([0.0]), tensor([0.0]))
