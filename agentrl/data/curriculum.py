"""Tasks in an order that a class of the user's decides, from what became of those before.

    tasks:
      train: [{path: questions.jsonl}]
      curriculum: {factory: my.module:Frontier, options: {window: 200}}

The class says which task comes next and is told what became of each. Nothing of it is saved: its state is what it makes of what it is told,
and a buffer that starts again tells it everything from the journal, in the same order. So resumes and crashes change nothing.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.errors import ConfigError, DataError, RecipeCodeError
from agentrl.resolve import called, resolve
from agentrl.types import Task

__all__ = ["Curriculum", "CurriculumOrder", "find_curriculum", "make_curriculum"]


class Curriculum:
    """Which task comes next. Subclass it: `factory(tasks, **options)` is made once, by the replay buffer's process (which has no torch).

    What makes a run go on exactly where it was, after any number of crashes:

    * `next` changes nothing: it may be asked again for the same ordinal, and an answer may never be used. Randomness is a function of
      the ordinal, e.g. `random.Random(f"{self.seed}/{ordinal}")`.
    * All state is made in `issued` and `finished`, which are told everything that happened, once and in order, live and after a restart.

    `finished` comes in the order in which groups end, some (K + 1) x groups_per_batch groups after `issued`; groups that were issued and are
    not finished are still being played. A rollback takes back training, not what was learnt about tasks: it is not told.

    Args:
        tasks: the training tasks, read-only, in the order of their files.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks

    def next(self, ordinal: int) -> int:
        """The index in `tasks` of the task that gets this ordinal. Ordinals count up from 0; an index may come any number of times."""
        raise NotImplementedError

    def issued(self, ordinal: int, index: int) -> None:
        """The task has the ordinal, for good."""

    def finished(self, index: int, rewards: Sequence[float]) -> None:
        """A group of the task is complete or was dropped.

        Args:
            rewards: total rewards of its trajectories, a greedy baseline aside; also of groups that the filter or the stops drop. Fewer than
                `rollout.group_size`, or none, where attempts were exhausted.
        """


class CurriculumOrder:
    """The order of tasks of a `Curriculum`, as the replay buffer uses it."""

    def __init__(self, tasks: Sequence[Task], curriculum: Curriculum) -> None:
        self._tasks, self._curriculum = tasks, curriculum
        self._index_of = {task.id: index for index, task in enumerate(tasks)}
        self._indices = array("q")  # by ordinal, of those issued

    @property
    def size(self) -> int:
        """Tasks per epoch: an epoch is as many groups as there are tasks."""
        return len(self._tasks)

    def task(self, ordinal: int) -> Task:
        """The task that was issued as `ordinal`, or that the curriculum wants next.

        Raises:
            RecipeCodeError: the curriculum failed, or named no task.
        """
        if ordinal < len(self._indices):
            return self._tasks[self._indices[ordinal]]
        index = called(f"tasks.curriculum: next({ordinal})", self._curriculum.next, ordinal)
        if not hasattr(index, "__index__") or not 0 <= index < len(self._tasks):
            raise RecipeCodeError(f"tasks.curriculum: next({ordinal}) returned {index!r}: expected an index of the {len(self._tasks)} tasks")
        return self._tasks[index]

    def issued(self, ordinal: int, task: str) -> None:
        """The task of this id has the ordinal.

        Raises:
            DataError: there is no such task (any more).
            RecipeCodeError: the curriculum failed.
        """
        if task not in self._index_of:
            raise DataError(
                f"task {ordinal} of the run was {task!r}, which is not among the {len(self._tasks)} tasks any more: restore the task files"
            )
        self._indices.append(self._index_of[task])
        called(f"tasks.curriculum: issued({ordinal})", self._curriculum.issued, ordinal, self._indices[ordinal])

    def finished(self, ordinal: int, rewards: Sequence[float]) -> None:
        """The group of an ordinal is complete or was dropped.

        Raises:
            RecipeCodeError: the curriculum failed.
        """
        called(f"tasks.curriculum: finished of ordinal {ordinal}", self._curriculum.finished, self._indices[ordinal], tuple(rewards))


def make_curriculum(factory: str, options: Mapping[str, Any], tasks: Sequence[Task]) -> CurriculumOrder:
    """The order of `tasks.curriculum`.

    Raises:
        ConfigError: there is no such class, it does not take the options, or it makes no `Curriculum`.
        RecipeCodeError: it failed.
    """
    found = find_curriculum(factory, options)
    made = called(f"tasks.curriculum {factory}", lambda: found(tasks, **options))
    if not isinstance(made, Curriculum):
        raise ConfigError(f"tasks.curriculum: {factory} makes a {type(made).__name__}: expected an agentrl.data.curriculum.Curriculum")
    return CurriculumOrder(tasks, made)


def find_curriculum(factory: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The class of `tasks.curriculum`, looked at before anything is started.

    Raises:
        ConfigError: there is no such class, or it does not take the options.
    """
    try:
        found: Callable[..., Any] = resolve(factory)
        inspect.signature(found).bind((), **options)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"tasks.curriculum: {factory}: {error}") from error
    return found
