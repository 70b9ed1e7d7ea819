import math
from itertools import product

import numpy as np
import pytest

from retriever.ranking import bootstrap, dcg, ndcg_at, paired_bootstrap, recall_at, reciprocal_rank


def test_recall_by_hand():
    ranked, relevant = ["d", "a", "e", "b"], {"a", "b", "c"}
    assert [recall_at(ranked, relevant, k) for k in (1, 2, 3, 4, 9)] == [0, 1 / 3, 1 / 3, 2 / 3, 2 / 3]
    assert recall_at([], relevant, 5) == 0


def test_reciprocal_rank_by_hand():
    assert reciprocal_rank(["d", "a", "b"], {"a", "b"}, 10) == 1 / 2
    assert reciprocal_rank(["d", "a", "b"], {"b"}, 2) == 0


def test_dcg_of_both_gains_by_hand():
    # Grades 3, 2, 3, 0, 1, 2. Linear: 3 + 2/1.58496 + 3/2 + 0 + 1/2.58496 + 2/2.80735; exponential: 7 + 3/1.58496 + 7/2 + 0 + 1/2.58496 + 3/2.80735
    assert dcg([3, 2, 3, 0, 1, 2], gain="linear") == pytest.approx(6.8611, abs=1e-4)
    assert dcg([3, 2, 3, 0, 1, 2], gain="exponential") == pytest.approx(13.8483, abs=1e-4)


def test_ndcg_divides_by_the_best_order_of_all_that_is_judged():
    # Found: b (1) then a (3); best: a, b, c, cut at 2 gives 3 + 1/log2 3.
    grades = {"a": 3, "b": 1, "c": 1, "d": 0}
    second = 1 / math.log2(3)
    assert ndcg_at(["b", "a", "c"], grades, 2, gain="linear") == pytest.approx((1 + 3 * second) / (3 + second))
    assert ndcg_at(["b", "a", "c"], grades, 2, gain="exponential") == pytest.approx((1 + 7 * second) / (7 + second))
    assert ndcg_at(["a", "b", "c"], grades, 2, gain="linear") == 1
    assert ndcg_at(["x", "y"], grades, 2, gain="linear") == 0


def test_grades_below_zero_are_worth_nothing_and_do_not_subtract():
    assert ndcg_at(["spam", "a"], {"spam": -2, "a": 1}, 5, gain="exponential") == pytest.approx(1 / math.log2(3))


def test_binary_grades_make_both_gains_the_same():
    grades = {"a": 1, "b": 1}
    assert ndcg_at(["x", "b", "a"], grades, 3, gain="linear") == ndcg_at(["x", "b", "a"], grades, 3, gain="exponential")


@pytest.mark.parametrize("measure", [recall_at, reciprocal_rank])
def test_a_question_without_a_relevant_document_has_no_score(measure):
    with pytest.raises(ValueError, match="at least one relevant document"):
        measure(["a"], set(), 1)
    with pytest.raises(ValueError, match="k = 0"):
        measure(["a"], {"a"}, 0)
    with pytest.raises(ValueError, match="at least one relevant document"):
        ndcg_at(["a"], {"a": 0}, 1, gain="linear")


def test_the_interval_is_that_of_all_draws_enumerated():
    # Four questions have 4^4 equally likely draws; the sampled quantiles approach theirs.
    scores = [0.0, 0.0, 1.0, 1.0]
    means = [np.mean(draw) for draw in product(scores, repeat=4)]
    interval = bootstrap(scores, seed=0, resamples=20_000, level=0.8)
    assert interval.mean == 0.5
    assert (interval.low, interval.high) == tuple(np.quantile(means, [0.1, 0.9]))


def test_the_width_is_that_of_the_normal_approximation_for_many_questions():
    # 1,190 questions, 88 % right: 1.96 * sqrt(.88 * .12 / 1190) = .01846 on each side
    scores = [1.0] * 1047 + [0.0] * 143
    interval = bootstrap(scores, seed=1)
    assert interval.mean == pytest.approx(1047 / 1190)
    assert (interval.high - interval.low) / 2 == pytest.approx(0.01846, rel=0.06)


def test_equal_seeds_give_equal_intervals_and_others_do_not():
    scores = list(np.random.default_rng(5).random(50))
    assert bootstrap(scores, seed=3) == bootstrap(scores, seed=3)
    assert bootstrap(scores, seed=3) != bootstrap(scores, seed=4)


def test_a_paired_difference_sees_what_two_intervals_hide():
    base = [1.0, 0.0] * 100
    better = [*base]
    for question in (1, 3, 5, 7, 9, 11):  # six of 200 found besides, none lost
        better[question] = 1.0
    difference = paired_bootstrap(better, base, seed=0)
    assert difference.mean == pytest.approx(0.03)
    assert difference.excludes_zero
    assert bootstrap(better, seed=0).low < bootstrap(base, seed=0).mean  # the two intervals overlap
    assert not paired_bootstrap(base, base, seed=0).excludes_zero


def test_scores_that_cannot_be_compared_are_refused():
    for wrong in ([], [float("nan")]):
        with pytest.raises(ValueError, match="finite scores of at least one question"):
            bootstrap(wrong, seed=0)
    with pytest.raises(ValueError, match="same questions"):
        paired_bootstrap([1.0], [1.0, 0.0], seed=0)
