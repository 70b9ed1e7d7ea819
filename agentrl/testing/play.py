"""Play one episode of an environment, for a test of it: no engine, no buffer, no event loop to care for.

trajectory = play(SearchEnv(retriever=returning("Paris.")), policy=saying("<answer> Paris </answer>"), task=task)
assert trajectory.reward.total == 1.0
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import trio

from agentrl.env import Environment
from agentrl.rollout.builder import Assignment
from agentrl.rollout.completion import Policy
from agentrl.rollout.episode import run_episode
from agentrl.rollout.limits import Limits
from agentrl.rollout.tokens import TokenEncoder
from agentrl.testing.tokenizer import byte_encoder
from agentrl.types import Purpose, Task, Ticket, Trajectory

__all__ = ["play"]

DEADLINE_S = 30.0


def play(
    environment: Environment,
    *,
    policy: Callable[[TokenEncoder], Policy],
    task: Task | None = None,
    encoder: TokenEncoder | None = None,
    limits: Limits | None = None,
) -> Trajectory:
    """The trajectory of one episode, played by the production loop.

    Args:
        policy: e.g. `saying("<search> capital of France </search>", "<answer> Paris </answer>")`.
        encoder: by default a byte-level tokenizer with a chat template.
        limits: by default Search-R1's.

    Raises:
        EnvironmentFailure: and whatever else the environment raises: a worker would close the ticket by its cause.
    """
    encoder = encoder or _default_encoder()
    task = task or Task(id="task", prompt="Who wrote Hamlet?", answers=("Shakespeare",))
    asked = Assignment(ticket=Ticket(purpose=Purpose.TRAIN, ordinal=0, k=0, attempt=0), task=task, seed=0)
    limits = limits or Limits()

    async def main() -> Trajectory:
        with trio.fail_after(DEADLINE_S):
            return await run_episode(environment, asked, policy(encoder), encoder, limits)

    return trio.run(main)


@cache
def _default_encoder() -> TokenEncoder:
    return byte_encoder()
