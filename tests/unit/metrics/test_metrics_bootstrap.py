"""The interval: known cases, and that it covers what it says it covers."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.metrics.bootstrap import cluster_interval


def test_the_interval_of_many_prompts_is_that_of_the_normal_approximation() -> None:
    # 400 prompts, half right: standard error sqrt(.25 / 400) = .025
    low, high = cluster_interval([0.0, 1.0] * 200, [1] * 400, seed=1)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)


def test_samples_of_one_prompt_are_not_independent_evidence() -> None:
    # 100 prompts whose 16 samples all agree know no more than 100 single samples
    one = cluster_interval([0.0, 1.0] * 50, [1] * 100, seed=1)
    sixteen = cluster_interval([0.0, 16.0] * 50, [16] * 100, seed=1)
    assert sixteen == pytest.approx(one)


def test_prompts_weigh_by_their_number_of_scored_samples() -> None:
    assert cluster_interval([3.0], [4], seed=0) == (0.75, 0.75)
    low, high = cluster_interval([4.0, 0.0], [4, 1], seed=0)
    assert (low, high) == (0.0, 1.0)


def test_the_same_seed_gives_the_same_interval_and_another_seed_nearly_the_same() -> None:
    scores = list(np.random.default_rng(0).random(300))
    assert cluster_interval(scores, [1] * 300, seed=3) == cluster_interval(scores, [1] * 300, seed=3)
    assert cluster_interval(scores, [1] * 300, seed=3, resamples=4000) == pytest.approx(cluster_interval(scores, [1] * 300, seed=4), abs=0.008)


def test_it_covers_the_truth_about_ninety_five_times_in_a_hundred() -> None:
    generator = np.random.default_rng(7)
    covered = 0
    for seed in range(100):
        chances = generator.beta(2, 2, size=60)  # of prompts; their mean is .5
        totals = generator.binomial(4, chances).tolist()
        low, high = cluster_interval(totals, [4] * 60, seed=seed, resamples=300)
        covered += low <= 0.5 <= high
    assert 88 <= covered <= 100


@pytest.mark.parametrize(("totals", "counts"), [([], []), ([1.0], []), ([1.0], [0])])
def test_nothing_to_draw_from_is_an_error(totals: list[float], counts: list[int]) -> None:
    with pytest.raises(ValueError, match="positive counts"):
        cluster_interval(totals, counts, seed=0)
