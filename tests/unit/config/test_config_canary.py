"""What gap the canary accepts."""

from agentrl.config.canary import CanaryRecipe


def test_bounds_follow_the_coarsest_dtype_on_the_way_unless_they_are_given():
    assert CanaryRecipe().bounds("float32", None) == (1e-3, 1e-4)
    assert CanaryRecipe().bounds("float32", "bfloat16") == (1.0, 0.1)
    assert CanaryRecipe(max_gap=0.5).bounds("bfloat16", None) == (0.5, 0.1)
    assert CanaryRecipe(max_gap=1e-5, mean_gap=1e-6).bounds("float32") == (1e-5, 1e-6)
