"""The order of tasks, and how many steps a run has."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.recipe import RunRecipe, TaskSource
from agentrl.data.order import TaskOrder, total_steps
from agentrl.data.sources import TaskList
from agentrl.errors import ConfigError
from agentrl.types import Task


def order(*counts: int, weights: tuple[float | None, ...] | None = None, seed: int = 0, shuffle: bool = True) -> TaskOrder:
    parts = [[Task(id=f"{name}{i}", prompt="", source=name) for i in range(count)] for name, count in zip("abcdefgh", counts, strict=False)]
    given = weights or (None,) * len(counts)
    sources = [TaskSource(path=name, weight=weight) for name, weight in zip("abcdefgh", given, strict=False)]
    return TaskOrder(TaskList(parts), sources, seed=seed, shuffle=shuffle)


def ids(chosen: TaskOrder, start: int, end: int) -> list[str]:
    return [chosen.task(ordinal).id for ordinal in range(start, end)]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(0, 2**40))
def test_every_epoch_holds_every_task_once(counts: list[int], seed: int):
    chosen = order(*counts, seed=seed)
    everything = {f"{name}{i}" for name, count in zip("abc", counts, strict=False) for i in range(count)}
    for epoch in range(3):
        got = ids(chosen, epoch * chosen.size, (epoch + 1) * chosen.size)
        assert len(got) == chosen.size
        assert set(got) == everything


def test_every_epoch_and_every_seed_has_a_shuffle_of_its_own():
    first, second, other = ids(order(50), 0, 50), ids(order(50), 50, 100), ids(order(50, seed=1), 0, 50)
    assert sorted(first) == sorted(second) == sorted(other)
    assert len({tuple(first), tuple(second), tuple(other)}) == 3


def test_the_order_is_the_same_on_every_machine():
    assert ids(order(8, seed=7), 0, 8) == ["a4", "a0", "a2", "a1", "a5", "a3", "a7", "a6"]


def test_an_ordinals_task_does_not_depend_on_what_was_asked_before():
    forwards, backwards = order(7, 5, weights=(0.5, 0.5)), order(7, 5, weights=(0.5, 0.5))
    wanted = ids(forwards, 0, 60)
    assert [backwards.task(ordinal).id for ordinal in reversed(range(60))] == wanted[::-1]


def test_weights_hold_exactly_over_an_epoch():
    chosen = order(90, 10, weights=(1.0, 3.0))
    for epoch in range(3):
        assert Counter(name[0] for name in ids(chosen, epoch * 100, (epoch + 1) * 100)) == {"a": 25, "b": 75}


def test_a_weighted_source_is_gone_through_whole_before_a_task_comes_again():
    chosen = order(90, 10, weights=(0.25, 0.75))
    of_b = [name for name in ids(chosen, 0, 400) if name.startswith("b")]
    assert len(of_b) == 300
    assert all(len(set(of_b[start : start + 10])) == 10 for start in range(0, 300, 10))
    of_a = [name for name in ids(chosen, 0, 400) if name.startswith("a")]
    assert max(Counter(of_a).values()) == 2, "100 places for 90 tasks: none comes a third time"


def test_unshuffled_tasks_come_as_they_are_and_mixtures_evenly():
    assert ids(order(2, 2, shuffle=False), 0, 5) == ["a0", "a1", "b0", "b1", "a0"]
    assert ids(order(6, 2, weights=(0.5, 0.5), shuffle=False), 0, 8) == ["a0", "b0", "a1", "b1", "a2", "b0", "a3", "b1"]


def test_a_weight_for_some_sources_only_is_refused():
    with pytest.raises(ConfigError, match=r"tasks\.train\[1\] has no weight: give every source a weight, or none"):
        order(3, 3, weights=(1.0, None))


def test_a_weight_below_one_task_per_epoch_is_refused():
    with pytest.raises(ConfigError, match=r"tasks\.train\[1\]\.weight 0\.001 is less than one task in an epoch of 20 tasks"):
        order(10, 10, weights=(1.0, 0.001))


def test_steps_are_epochs_times_tasks_over_groups_rounded_down():
    assert total_steps(RunRecipe(steps=7), 100, 3) == 7
    assert total_steps(RunRecipe(epochs=2), 100, 24) == 8
    assert total_steps(RunRecipe(epochs=0.29), 100, 1) == 29, "exact, though 0.29 * 100 is 28.999999999999996"
    assert total_steps(RunRecipe(hours=1), 100, 24) is None


def test_epochs_that_do_not_fill_a_batch_are_refused():
    with pytest.raises(ConfigError, match=r"run\.epochs 1 of 10 tasks do not fill one batch of 24 groups"):
        total_steps(RunRecipe(epochs=1), 10, 24)
