"""Growing a trajectory turn by turn. The loss mask is born here."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agentrl.env import StepResult
from agentrl.errors import EnvironmentFailure
from agentrl.rollout.completion import Completion
from agentrl.rollout.over_long import PART, OverLong
from agentrl.rollout.tokens import Encoded, Tokens
from agentrl.types import CloseCause, Reward, StopReason, Task, Ticket, Trajectory, Turn

__all__ = ["Assignment", "TrajectoryBuilder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What a worker was asked to play."""

    ticket: Ticket
    task: Task
    seed: int  # of the sample; a turn's is `seeds.turn_seed` of it
    temperature: float = 1.0  # 0 is greedy
    worker: int = 0
    incarnation: int = 0
    over_long: OverLong | None = None  # the penalty on length, where there is one


class TrajectoryBuilder:
    """The prompt, then per turn a completion (mask 1) and the observation that answered it (mask 0)."""

    def __init__(self, assignment: Assignment, prompt: Tokens) -> None:
        self._assignment = assignment
        self._dispatched_s = time.time()
        self._ids = [prompt]
        self._completions: list[Completion] = []
        self._turns: list[Turn] = []
        self._parts: dict[str, float] = {}
        self._rewards: list[tuple[int, float]] = []  # (token, amount)
        self._length = len(prompt)

    def __len__(self) -> int:
        return self._length

    @property
    def token_ids(self) -> Tokens:
        """All tokens so far: what the policy continues."""
        if len(self._ids) > 1:
            self._ids = [np.concatenate(self._ids)]
        return self._ids[0]

    def add(self, completion: Completion, result: StepResult, observation: Encoded | None) -> None:
        """Add one turn. The reward it earned lands on its last generated token.

        Args:
            observation: None where the policy will not see one: the episode ends here.

        Raises:
            EnvironmentFailure: a part of the reward is not a finite number.
        """
        start, end = self._length, self._length + len(completion.token_ids)
        self._ids.append(completion.token_ids)
        if observation is not None:
            self._ids.append(observation.ids)
        self._length = end + (0 if observation is None else len(observation.ids))
        self._completions.append(completion)
        self._turns.append(
            Turn(
                completion=(start, end),
                observation=(end, self._length),
                action=result.action,
                argument=result.argument,
                stop=completion.stop,
                engine=completion.engine,
                started_s=completion.started_s,
                generated_s=completion.generated_s,
                ended_s=time.time(),
                tool_calls=result.tool_calls,
                truncated=observation is not None and observation.truncated,
                neutralised=0 if result.observation is None else result.observation.neutralised,
            )
        )
        self._earn(result.parts, end - 1)
        self._name(result.measures)

    def finish(self, stop: StopReason) -> Trajectory:
        """The trajectory of the turns added. What its length costs lands on its last generated token."""
        asked = self._assignment
        if asked.over_long is not None and self._turns:
            generated = sum(end - start for start, end in (turn.completion for turn in self._turns))
            self._earn({PART: asked.over_long.penalty(generated)}, self._turns[-1].completion[1] - 1)
        token_ids = self.token_ids
        loss_mask = np.zeros(len(token_ids), dtype=np.uint8)
        behaviour_logprobs = np.zeros(len(token_ids), dtype=np.float32)
        versions = np.full(len(token_ids), -1, dtype=np.int32)
        for turn, completion in zip(self._turns, self._completions, strict=True):
            written = slice(*turn.completion)
            loss_mask[written] = 1
            behaviour_logprobs[written] = completion.logprobs
            versions[written] = completion.versions
        return Trajectory(
            ticket=asked.ticket,
            task_id=asked.task.id,
            source=asked.task.source,
            token_ids=token_ids,
            loss_mask=loss_mask,
            behaviour_logprobs=behaviour_logprobs,
            versions=versions,
            turns=tuple(self._turns),
            reward=self._reward(),
            stop=stop,
            dispatched_s=self._dispatched_s,
            finished_s=time.time(),
            worker=asked.worker,
            incarnation=asked.incarnation,
            temperature=asked.temperature,
        )

    def _earn(self, parts: Mapping[str, float], token: int) -> None:
        self._name(parts)
        if parts:
            self._rewards.append((token, float(sum(parts.values()))))

    def _name(self, numbers: Mapping[str, float]) -> None:
        """Add to the named numbers, which alone earn nothing."""
        for name, amount in numbers.items():
            if not math.isfinite(amount):
                raise EnvironmentFailure(f"the reward's part {name!r} is {amount}: expected a finite number", cause=CloseCause.REWARD_ERROR)
            self._parts[name] = self._parts.get(name, 0.0) + float(amount)

    def _reward(self) -> Reward:
        tokens, amounts = tuple(token for token, _ in self._rewards), tuple(amount for _, amount in self._rewards)
        return Reward(total=float(sum(amounts)), parts=self._parts, tokens=tokens, amounts=amounts)
