"""The episode loop."""

from __future__ import annotations

import logging

import trio

from agentrl.env import Environment
from agentrl.rollout.builder import Assignment, TrajectoryBuilder
from agentrl.rollout.completion import Policy
from agentrl.rollout.limits import Limits
from agentrl.rollout.tokens import TokenEncoder
from agentrl.types import StopReason, Trajectory

__all__ = ["run_episode"]

CLOSE_DEADLINE_S = 5.0  # an environment's close gets this long, also when the episode was cancelled

_log = logging.getLogger(__name__)


async def run_episode(env: Environment, assignment: Assignment, policy: Policy, tokens: TokenEncoder, limits: Limits) -> Trajectory:
    """Play one episode to its end. Everything the policy sees is encoded once; everything it writes is kept as sampled.

    Raises:
        EnvironmentFailure: the environment or its tool failed, or the prompt is over its limit.
        EngineError: no engine could complete a turn.
    """
    try:
        prompt = tokens.encode_start(await env.start(assignment.task))
        limits.check_prompt(len(prompt.ids))
        record = TrajectoryBuilder(assignment, prompt.ids)
        stop: StopReason | None = None
        while stop is None:
            completion = await policy.complete(record.token_ids, stop_strings=env.stop_strings, budget=limits.completion(len(record)))
            result = await env.step(completion.text)
            last = int(completion.token_ids[-1])
            said = result.observation
            observation = None if said is None else tokens.encode_observation(said, limits.observation_tokens, after=last)
            stop = limits.stop(len(record), completion, result, observation)
            record.add(completion, result, observation if stop is None else None)
        return record.finish(stop)
    finally:
        await _close(env)


async def _close(env: Environment) -> None:
    """Close the environment, exactly once. What goes wrong in it does not undo what was played."""
    with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_DEADLINE_S) as scope:
        try:
            await env.close()
        except Exception:  # the blast radius of an environment's own clean-up
            _log.exception("closing %s failed; the episode it belonged to stands", type(env).__name__)
    if scope.cancelled_caught:
        _log.warning("closing %s took longer than %g s and was given up", type(env).__name__, CLOSE_DEADLINE_S)
