"""Prompts that are too long for `rollout.limits.prompt_tokens`: refused before the run starts, or filtered out and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from agentrl.data.sources import TaskList
from agentrl.errors import DataError
from agentrl.types import Task

__all__ = ["within_limit"]

_NAMED = 3  # ids that an error message names


def within_limit(tasks: TaskList, *, count: Callable[[Task], int], limit: int, over_long: Literal["refuse", "filter"]) -> tuple[TaskList, int]:
    """The tasks whose prompts fit, and how many were filtered out.

    Args:
        count: tokens of a task's whole prompt, template and instructions included.
        limit: tokens, inclusive.

    Raises:
        DataError: `refuse` and a prompt does not fit; or nothing is left of a source.
    """
    kept, lengths = [], {}
    for part in tasks.parts:
        measured = [(task, count(task)) for task in part]
        lengths.update({task.id: length for task, length in measured if length > limit})
        kept.append([task for task, length in measured if length <= limit])
    if not lengths:
        return tasks, 0
    named = ", ".join(f"{name} ({length})" for name, length in list(lengths.items())[:_NAMED]) + (", ..." if len(lengths) > _NAMED else "")
    told = f"{len(lengths)} of {len(tasks)} prompts are longer than rollout.limits.prompt_tokens ({limit}): {named}"
    if over_long == "refuse":
        raise DataError(f"{told}. Raise the limit, or set tasks.over_long to filter")
    if not all(kept):
        raise DataError(f"{told}. Nothing is left of a source")
    return TaskList(kept), len(lengths)
