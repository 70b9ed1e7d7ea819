"""Tasks from the sources of a recipe: files, data sets or classes, named, limited, and with ids unique over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np

from agentrl.config.recipe import TaskSource
from agentrl.data.readers import HUB, read_rows
from agentrl.data.rows import task_of_row
from agentrl.errors import DataError
from agentrl.resolve import resolve
from agentrl.seeds import mix
from agentrl.types import Task

__all__ = ["TaskList", "first_tasks", "load_tasks"]

_LIMIT = 0x6C696D69  # the subset of `limit` draws other numbers than the shuffles do


class TaskList(Sequence[Task]):
    """Tasks of several sources in one row, source after source; `parts` has them by source."""

    def __init__(self, parts: Sequence[Sequence[Task]]) -> None:
        self.parts = tuple(tuple(part) for part in parts)
        self._tasks = tuple(task for part in self.parts for task in part)

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        return self._tasks[index]


def load_tasks(sources: Sequence[TaskSource], *, seed: int, base: Path | None = None) -> TaskList:
    """All tasks of the sources, in their order.

    Args:
        seed: chooses the subset of a source with a `limit`.
        base: where relative paths start; by default the current directory.

    Raises:
        DataError: a row is wrong, an id occurs twice, or there is no task; names file and line.
    """
    places: dict[str, str] = {}
    parts = []
    for source in sources:
        part = []
        for place, task in _placed_tasks(source, base or Path.cwd()):
            if task.id in places:
                raise DataError(f"{place}: the task id {task.id!r} occurs twice, first at {places[task.id]}: ids must be unique over all sources")
            places[task.id] = place
            part.append(task)
        if not part:
            raise DataError(f"{source.path or source.factory}: no tasks")
        parts.append(_limited(part, source.limit, seed))
    return TaskList(parts)


def first_tasks(sources: Sequence[TaskSource], count: int) -> list[Task]:
    """The first tasks of the sources, in their order, limits aside: of files no more is read than that takes."""
    return [task for _, task in islice((placed for source in sources for placed in _placed_tasks(source, Path.cwd())), count)]


def _placed_tasks(source: TaskSource, base: Path) -> Iterator[tuple[str, Task]]:
    if source.factory is not None:
        yield from _made_tasks(source.factory, source.options)
        return
    assert source.path is not None
    path = source.path if source.path.startswith(HUB) else str(base / source.path)
    default = path.removeprefix(HUB).partition(":")[0].rsplit("/", 1)[-1] if path.startswith(HUB) else Path(path).stem
    for number, (place, row) in enumerate(read_rows(path)):
        yield place, task_of_row(row, place=place, number=number, source=source.name, default_source=default)


def _made_tasks(factory: str, options: dict[str, Any]) -> Iterator[tuple[str, Task]]:
    for number, task in enumerate(resolve(factory)(**options)):
        if not isinstance(task, Task):
            raise DataError(f"{factory}: item {number} is a {type(task).__name__}, not an agentrl.types.Task")
        yield f"{factory}: item {number}", task


def _limited(tasks: list[Task], limit: int | None, seed: int) -> list[Task]:
    """A seeded subset, in the order of the file."""
    if limit is None or limit >= len(tasks):
        return tasks
    chosen = np.random.RandomState(mix(seed, _LIMIT) & 0xFFFFFFFF).permutation(len(tasks))[:limit]
    return [tasks[index] for index in sorted(chosen)]
