from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithm.packing import pack


def test_rows_of_like_length_go_together_within_the_budget():
    assert pack([0, 1, 2, 3], [10, 2, 9, 3], budget=20, ranks=1) == (((0, 2), (3, 1)),)


def test_a_row_beyond_the_budget_goes_alone():
    assert pack([0, 1, 2], [50, 4, 4], budget=8, ranks=1) == (((0,), (1, 2)),)


def test_rows_are_dealt_to_and_fro_and_a_rank_that_runs_out_gets_dummies():
    assert pack([0, 1, 2, 3, 4], [5, 4, 3, 2, 1], budget=5, ranks=2) == (((0,), (3, 4)), ((1,), (2,)))
    assert pack([0], [5], budget=5, ranks=2) == (((0,),), ((),))


def test_no_rows_at_all_is_one_dummy_each():
    assert pack([], [5, 5], budget=5, ranks=2) == (((),), ((),))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 120), st.integers(1, 5))
def test_every_row_goes_through_exactly_once_and_ranks_step_alike(lengths, budget, ranks):
    packed = pack(range(len(lengths)), lengths, budget=budget, ranks=ranks)
    assert sorted(row for rank in packed for micro in rank for row in micro) == list(range(len(lengths)))
    assert len({len(rank) for rank in packed}) == 1
    for micro in (micro for rank in packed for micro in rank):
        assert len(micro) <= 1 or len(micro) * max(lengths[row] for row in micro) <= budget


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 5))
def test_ranks_get_as_many_tokens_as_one_another_give_or_take_two_rows(lengths, ranks):
    packed = pack(range(len(lengths)), lengths, budget=40, ranks=ranks)
    tokens = [sum(lengths[row] for micro in rank for row in micro) for rank in packed]
    assert max(tokens) - min(tokens) <= 2 * max(lengths)
