"""The search environment with a slow tool: every answered search takes a long-tailed time more.

env.factory=benchmarks.delayed_search:DelayedSearchEnv env.options.delay_mean_s=0.05
"""

from __future__ import annotations

import math
import random
from typing import Any

import trio

from agentrl.env import Observation, StepResult
from agentrl.types import Task
from envs.search import SearchEnv

__all__ = ["DelayedSearchEnv", "delay_s"]


class DelayedSearchEnv(SearchEnv):
    """`SearchEnv` that sleeps before it gives the passages.

    Args:
        delay_mean_s: mean of the delay.
        delay_sigma: of the logarithm of the delay, which is normal. At 1 the longest of 256 delays is about 11 times the mean.
        options: those of `SearchEnv`.
    """

    def __init__(self, *, delay_mean_s: float, delay_sigma: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self._delay_mean_s, self._delay_sigma = delay_mean_s, delay_sigma
        self._task_id = ""
        self._turn = 0

    async def start(self, task: Task) -> Observation:
        """As `SearchEnv.start`, without a delay."""
        self._task_id = task.id
        return await super().start(task)

    async def step(self, completion: str) -> StepResult:
        """As `SearchEnv.step`, later where it searched."""
        result = await super().step(completion)
        turn, self._turn = self._turn, self._turn + 1
        if result.tool_calls:
            await trio.sleep(delay_s(self._task_id, turn, mean_s=self._delay_mean_s, sigma=self._delay_sigma))
        return result


def delay_s(task_id: str, turn: int, *, mean_s: float, sigma: float) -> float:
    """Log-normal with this mean; a function of task and turn alone, so that every arm of a comparison waits the same times."""
    return random.Random(f"{task_id}/{turn}").lognormvariate(math.log(mean_s) - sigma**2 / 2, sigma)
