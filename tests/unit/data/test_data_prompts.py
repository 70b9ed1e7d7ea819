"""Prompts that do not fit."""

from __future__ import annotations

import pytest

from agentrl.data.prompts import within_limit
from agentrl.data.sources import TaskList
from agentrl.errors import DataError
from agentrl.types import Task

TASKS = TaskList([[Task(id="short", prompt="ab"), Task(id="long", prompt="abcdef")], [Task(id="fits", prompt="abc")]])


def letters(task: Task) -> int:
    return len(task.prompt)


def test_prompts_up_to_the_limit_fit():
    assert within_limit(TASKS, count=letters, limit=6, over_long="refuse") == (TASKS, 0)


def test_over_long_prompts_are_refused_by_name_and_length():
    with pytest.raises(DataError) as caught:
        within_limit(TASKS, count=letters, limit=3, over_long="refuse")
    assert str(caught.value) == (
        "1 of 3 prompts are longer than rollout.limits.prompt_tokens (3): long (6). Raise the limit, or set tasks.over_long to filter"
    )


def test_over_long_prompts_are_filtered_and_counted_by_source():
    kept, filtered = within_limit(TASKS, count=letters, limit=3, over_long="filter")
    assert ([[task.id for task in part] for part in kept.parts], filtered) == ([["short"], ["fits"]], 1)


def test_a_source_of_which_nothing_is_left_is_refused():
    with pytest.raises(DataError, match="Nothing is left of a source"):
        within_limit(TASKS, count=letters, limit=2, over_long="filter")
