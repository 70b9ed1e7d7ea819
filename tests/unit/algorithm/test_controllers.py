import math

import pytest

from agentrl.algorithm.controllers import adapted_coefficient


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1.01),  # 10 % above the target, a tenth of the horizon
        (60.0, 1.02),  # an error counts as 20 % at most
        (0.0, 0.98),
    ],
)
def test_the_coefficient_follows_the_target_by_hand(kl, factor):
    assert adapted_coefficient(0.2, kl=kl, target=6.0, horizon=1000, samples=100) == pytest.approx(0.2 * factor)


def test_a_batch_larger_than_the_horizon_never_turns_the_sign():
    assert adapted_coefficient(0.2, kl=0.0, target=6.0, horizon=10, samples=1000) == pytest.approx(0.16)


def test_a_divergence_that_is_not_finite_changes_nothing():
    assert adapted_coefficient(0.2, kl=math.nan, target=6.0, horizon=10, samples=5) == 0.2
    assert adapted_coefficient(0.2, kl=math.inf, target=6.0, horizon=10, samples=5) == 0.2
