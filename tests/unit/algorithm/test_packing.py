from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithm.packing import RankTokens, pack, rank_tokens


def test_rows_of_like_length_go_together_within_the_budget():
    assert pack([0, 1, 2, 3], [10, 2, 9, 3], budget=20, ranks=1) == (((0, 2), (3, 1)),)


def test_a_row_beyond_the_budget_goes_alone():
    assert pack([0, 1, 2], [50, 4, 4], budget=8, ranks=1) == (((0,), (1, 2)),)


def test_each_row_goes_to_the_rank_with_the_fewest_tokens_and_a_rank_that_runs_out_gets_dummies():
    # 5 to rank 0, 4 to rank 1, 3 to rank 1 (4 < 5: now 7), 2 to rank 0 (7), 1 to rank 0 (a tie)
    assert pack([0, 1, 2, 3, 4], [5, 4, 3, 2, 1], budget=5, ranks=2) == (((0,), (3, 4)), ((1,), (2,)))
    assert pack([0], [5], budget=5, ranks=2) == (((0,),), ((),))


def test_one_long_row_outweighs_many_short_ones():
    # 9 to rank 0; the four rows of 2 to rank 1, which then has 8
    assert pack([0, 1, 2, 3, 4], [2, 2, 9, 2, 2], budget=100, ranks=2) == (((2,),), ((0, 1, 3, 4),))


def test_by_count_micro_batches_have_so_many_rows_whatever_their_length():
    assert pack([0, 1, 2, 3, 4], [50, 4, 40, 4, 30], budget=8, ranks=1, count=2) == (((0, 2), (4, 1), (3,)),)


def test_by_count_no_rank_has_more_than_its_share_of_the_rows():
    # 9 to rank 0, then 2 and 2 to rank 1, which has its half of the four rows; the last one goes to rank 0
    assert pack([0, 1, 2, 3], [2, 2, 9, 2], budget=1, ranks=2, count=1) == (((2,), (3,)), ((0,), (1,)))


def test_no_rows_at_all_is_one_dummy_each():
    assert pack([], [5, 5], budget=5, ranks=2) == (((),), ((),))
    assert pack([], [5, 5], budget=5, ranks=2, count=3) == (((),), ((),))


def test_tokens_of_the_ranks_before_and_after():
    # as they come: rows 0 1 2 (9 + 8 + 1) and 3 4 (2 + 2); packed: 9 + 2 on rank 0, 8 + 2 + 1 on rank 1
    lengths = [9, 8, 1, 2, 2]
    before, after = rank_tokens([0, 1, 2, 3, 4], lengths, pack(range(5), lengths, budget=10, ranks=2))
    assert (before, before.spread) == (RankTokens(most=18, fewest=4), 14)
    assert (after, after.spread) == (RankTokens(most=11, fewest=11), 0)


def test_tokens_of_ranks_without_rows_are_none():
    before, after = rank_tokens([1], [3, 7], pack([1], [3, 7], budget=10, ranks=2))
    assert before == after == RankTokens(most=7, fewest=0)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 120), st.integers(1, 5), st.none() | st.integers(1, 7))
def test_every_row_goes_through_exactly_once_and_ranks_step_alike(lengths, budget, ranks, count):
    packed = pack(range(len(lengths)), lengths, budget=budget, ranks=ranks, count=count)
    assert sorted(row for rank in packed for micro in rank for row in micro) == list(range(len(lengths)))
    assert len({len(rank) for rank in packed}) == 1
    for micro in (micro for rank in packed for micro in rank):
        assert len(micro) <= (1 if count is None else count) or (count is None and len(micro) * max(lengths[row] for row in micro) <= budget)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 5))
def test_ranks_get_as_many_tokens_as_one_another_give_or_take_a_row(lengths, ranks):
    packed = pack(range(len(lengths)), lengths, budget=40, ranks=ranks)
    assert rank_tokens(range(len(lengths)), lengths, packed)[1].spread <= max(lengths)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 5), st.integers(1, 7))
def test_by_count_there_are_as_few_micro_batches_as_there_can_be(lengths, ranks, count):
    packed = pack(range(len(lengths)), lengths, budget=1, ranks=ranks, count=count)
    share = -(-len(lengths) // ranks)
    assert len(packed[0]) == max(1, -(-share // count))


def test_without_padding_the_budget_counts_the_tokens_of_the_rows():
    # 10 + 9 = 19, then 3 + 2: padded to the longest it would be 20 and 6
    assert pack([0, 1, 2, 3], [10, 2, 9, 3], budget=22, ranks=1, padded=False) == (((0, 2, 3), (1,)),)
    assert pack([0, 1, 2], [50, 4, 4], budget=8, ranks=1, padded=False) == (((0,), (1, 2)),)
    assert pack([0, 1, 2], [5, 4, 3], budget=100, ranks=1, padded=False) == (((0, 1, 2),),)


def test_few_rows_are_exchanged_until_the_ranks_are_even():
    # longest first: 5 + 3 + 3 = 11 against 4 + 3 = 7, where 5 + 4 against 3 + 3 + 3 is even
    lengths = [5, 4, 3, 3, 3]
    assert [sum(lengths[row] for row in rows) for (rows,) in pack(range(5), lengths, budget=100, ranks=2, padded=False)] == [9, 9]


def test_a_rank_that_is_full_with_one_row_stays_so():
    assert pack([0, 1, 2], [50, 4, 3], budget=100, ranks=2) == (((0,),), ((1, 2),))
