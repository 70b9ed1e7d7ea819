"""Overlap on cases small enough to draw."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_episodes import episode

from agentrl.metrics.overlap import measure_overlap, speedup_bound, turn_times


def test_tokens_are_spread_evenly_over_their_turn() -> None:
    # turn:  0 ----------- 10, 40 tokens;  step: 4 ------ 7  ->  3/10 of the tokens
    found = measure_overlap([(0.0, 10.0, 40)], [(4.0, 7.0)])
    assert found.share == pytest.approx(0.3)
    assert (found.generating_s, found.training_s, found.both_s) == (10.0, 3.0, 3.0)
    assert found.bound == pytest.approx(1.3)


def test_every_turn_counts_by_its_tokens() -> None:
    # 10 tokens wholly inside, 30 tokens half inside, 60 tokens outside
    turns = [(1.0, 2.0, 10), (3.0, 5.0, 30), (8.0, 9.0, 60)]
    found = measure_overlap(turns, [(0.0, 4.0)])
    assert found.share == pytest.approx((10 + 15) / 100)
    assert (found.generating_s, found.both_s) == (4.0, 2.0)


def test_steps_that_touch_or_overlap_are_not_counted_twice() -> None:
    turn = [(0.0, 10.0, 10)]
    assert measure_overlap(turn, [(0.0, 2.0), (2.0, 4.0), (3.0, 5.0)]).share == pytest.approx(0.5)
    assert measure_overlap(turn, [(3.0, 5.0), (0.0, 9.0), (1.0, 2.0)]).share == pytest.approx(0.9)


def test_turns_that_overlap_generate_only_once() -> None:
    assert measure_overlap([(0.0, 4.0, 1), (1.0, 2.0, 1), (6.0, 7.0, 1)], []).generating_s == 5.0


def test_an_instant_is_inside_or_not_and_empty_turns_do_not_count() -> None:
    assert measure_overlap([(1.0, 1.0, 5), (3.0, 3.0, 5), (0.0, 9.0, 0)], [(0.0, 2.0)]).share == 0.5


def test_nothing_generated_or_nothing_trained_is_no_overlap() -> None:
    assert measure_overlap([], [(0.0, 1.0)]).share == 0.0
    assert measure_overlap([(0.0, 1.0, 3)], []).share == 0.0
    assert measure_overlap([], []).bound == 1.0


def test_clocks_since_the_epoch_lose_nothing_that_matters() -> None:
    now = 1_790_000_000.0
    found = measure_overlap([(now, now + 0.010, 10)], [(now + 0.005, now + 1.0)])
    assert found.share == pytest.approx(0.5, abs=1e-4)


def test_the_bound_is_two_where_both_take_as_long_and_one_where_one_is_free() -> None:
    assert speedup_bound(10.0, 10.0) == 2.0
    assert speedup_bound(10.0, 0.0) == 1.0
    assert speedup_bound(30.0, 10.0) == pytest.approx(4 / 3)


def test_the_turns_of_a_trajectory_are_its_completions() -> None:
    assert turn_times([episode(("search", [1, 1, 1]), ("answer", [1]))]) == [(100.0, 100.5, 3), (100.0, 100.5, 1)]


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=6)


@settings(max_examples=40)
@given(turns=spans, steps=spans)
def test_it_agrees_with_counting_unit_cells(turns: list[tuple[int, int]], steps: list[tuple[int, int]]) -> None:
    trained = {cell for start, end in steps for cell in range(start, end)}
    long = [(start, end) for start, end in turns if end > start]
    expected = sum(sum(cell in trained for cell in range(start, end)) / (end - start) * 7 for start, end in long)
    found = measure_overlap([(float(start), float(end), 7) for start, end in long], [(float(a), float(b)) for a, b in steps])
    generated = {cell for start, end in long for cell in range(start, end)}
    assert found.share * 7 * len(long) == pytest.approx(expected)
    assert (found.training_s, found.generating_s, found.both_s) == pytest.approx((len(trained), len(generated), len(trained & generated)))
