"""Orders that a recipe's own class decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.data.curriculum import Curriculum, make_curriculum
from agentrl.errors import ConfigError, RecipeCodeError
from agentrl.types import Task

TASKS = [Task(id=name, prompt="?") for name in "abc"]


class Backwards(Curriculum):
    """The last task first."""

    def __init__(self, tasks: Sequence[Task], *, stride: int = 1) -> None:
        super().__init__(tasks)
        self.stride = stride

    def next(self, ordinal: int) -> int:
        return len(self.tasks) - 1 - ordinal * self.stride


def not_a_curriculum(tasks: Sequence[Task]) -> dict[str, Any]:
    return {}


def test_an_ordinal_has_the_task_that_is_wanted_until_it_is_issued_and_then_for_good():
    order = make_curriculum(f"{__name__}:Backwards", {}, TASKS)
    assert (order.size, order.task(0).id) == (3, "c")
    order.issued(0, "a")  # as a journal says
    assert [order.task(0).id, order.task(1).id] == ["a", "b"]
    order.finished(0, [1.0])
    with pytest.raises(RecipeCodeError, match=r"next\(3\) returned -1: expected an index of the 3 tasks"):
        order.task(3)


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (f"{__name__}:Forwards", {}, "has no Forwards"),
        (f"{__name__}:Backwards", {"speed": 2}, "got an unexpected keyword argument 'speed'"),
        (f"{__name__}:not_a_curriculum", {}, "makes a dict: expected an agentrl.data.curriculum.Curriculum"),
    ],
)
def test_a_class_that_does_not_fit_is_a_mistake_of_the_recipe(factory: str, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make_curriculum(factory, options, TASKS)
