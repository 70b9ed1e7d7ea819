"""The soft over-long penalty."""

import pytest

from agentrl.config.recipe import OverLongRecipe
from agentrl.rollout.over_long import OverLong


@pytest.mark.parametrize(
    ("generated", "penalty"),
    [
        (0, 0.0),
        (16, 0.0),  # L - C = 20 - 4 tokens are free
        (17, -0.25),  # (16 - 17) / 4
        (19, -0.75),
        (20, -1.0),
        (99, -1.0),
    ],
)
def test_the_penalty_grows_linearly_over_the_last_tokens_before_the_limit(generated, penalty):
    assert OverLong(limit_tokens=20, buffer_tokens=4).penalty(generated) == penalty
    assert OverLong.of(OverLongRecipe(limit_tokens=20, buffer_tokens=4, factor=0.5)).penalty(generated) == penalty / 2


def test_no_penalty_is_no_negative_zero_and_no_recipe_no_penalty():
    assert str(OverLong(limit_tokens=20, buffer_tokens=4).penalty(3)) == "0.0"
    assert OverLong.of(None) is None
