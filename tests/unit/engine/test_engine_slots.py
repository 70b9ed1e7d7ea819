"""Who holds which slot."""

from agentrl.engine.slots import SlotTable


def test_free_slots_go_out_lowest_first_and_come_back():
    table = SlotTable(3)
    assert [table.take(), table.take(), table.take(), table.take()] == [0, 1, 2, None]
    table.release(2)
    table.release(0)
    assert [table.take(), table.take()] == [0, 2]


def test_the_longest_kept_prefix_is_continued_and_only_once():
    table = SlotTable(3)
    for tokens in ([1, 2], [1, 2, 3], [1, 9, 3, 4]):
        table.keep(table.take(), tokens, "")
    assert table.resume([1, 2, 3, 4], "") == (1, 3)
    assert table.resume([1, 2, 3, 4], "") == (0, 2)
    assert table.resume([1, 2, 3, 4], "") is None


def test_a_prompt_equal_to_a_kept_sequence_has_no_token_left_to_compute():
    table = SlotTable(1)
    table.keep(table.take(), [1, 2], "")
    assert table.resume([1, 2], "") is None
    assert table.resume([1, 2, 3], "other") is None


def test_the_slot_kept_longest_is_taken_first_wherever_it_has_been_moved():
    table = SlotTable(3)
    running = [table.take() for _ in range(3)]
    table.keep(0, [1], "")
    table.keep(1, [2, 3], "")
    assert table.move(2, 0) == 1  # the running sequence of slot 2 is in slot 0 now, the oldest kept one in slot 2
    assert table.take() == 2
    assert table.resume([2, 3, 4], "") == (1, 2)
    assert running == [0, 1, 2]


def test_a_running_slot_moves_to_a_free_one():
    table = SlotTable(3)
    for _ in range(3):
        table.take()
    table.release(0)
    assert table.lowest_below(2) == 0
    assert table.move(2, 0) == 0
    assert table.take() == 2
    assert table.lowest_below(2) is None


def test_dropping_kept_prefixes_frees_their_slots():
    table = SlotTable(2)
    table.keep(table.take(), [1], "")
    table.drop_kept()
    assert table.resume([1, 2], "") is None
    assert [table.take(), table.take(), table.take()] == [0, 1, None]
