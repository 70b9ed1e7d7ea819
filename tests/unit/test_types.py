"""The records of a run check themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.errors import TrajectoryError
from agentrl.types import INFRASTRUCTURE_CAUSES, CloseCause, Purpose, Reward, StopReason, Ticket, Trajectory, Turn

# P P C C O C, the last token written by a newer version
TOKENS = {
    "token_ids": np.array([5, 6, 7, 8, 9, 10], np.int32),
    "loss_mask": np.array([0, 0, 1, 1, 0, 1], np.uint8),
    "behaviour_logprobs": np.array([0, 0, -0.5, -0.25, 0, -1.0], np.float32),
    "versions": np.array([-1, -1, 3, 3, -1, 4], np.int32),
}


def turn(completion: tuple[int, int], observation: tuple[int, int]) -> Turn:
    return Turn(
        completion=completion,
        observation=observation,
        action="search",
        argument="q",
        stop="</search>",
        engine="0",
        started_s=1,
        generated_s=2,
        ended_s=3,
    )


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "ticket": Ticket(purpose=Purpose.TRAIN, ordinal=12, k=3, attempt=0),
        "task_id": "q12",
        "source": "nq",
        "turns": (turn((2, 4), (4, 5)), turn((5, 6), (6, 6))),
        "reward": Reward(total=1.0, parts={"em": 1.0}, tokens=(5,), amounts=(1.0,)),
        "stop": StopReason.ANSWERED,
        "dispatched_s": 1.0,
        "finished_s": 3.0,
        "worker": 0,
        "incarnation": 0,
    }
    return Trajectory(**(fields | TOKENS | changes))


def test_a_trajectory_knows_its_prompt_its_writers_and_its_length():
    made = trajectory()
    assert (len(made), made.prompt_length, made.generated, made.first_version, made.version_count) == (6, 2, 3, 3, 2)


def test_a_trajectory_without_turns_is_all_prompt():
    nothing = {"loss_mask": np.zeros(6, np.uint8), "behaviour_logprobs": np.zeros(6, np.float32), "versions": np.full(6, -1, np.int32)}
    made = trajectory(turns=(), reward=Reward(total=0.0), stop=StopReason.CONTEXT_LIMIT, **nothing)
    assert (made.prompt_length, made.generated, made.first_version, made.version_count) == (6, 0, -1, 0)


def changed(name: str, index: int, value: float) -> dict[str, Any]:
    array = TOKENS[name].copy()
    array[index] = value
    return {name: array}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"versions": TOKENS["versions"][:5]}, "differ in length"),
        (changed("behaviour_logprobs", 0, -1.0), "outside the loss mask carries a log-prob or a version"),
        (changed("versions", 4, 3), "outside the loss mask carries a log-prob or a version"),
        (changed("versions", 2, -1), "a generated token carries no version"),
        ({"reward": Reward(total=1.0, tokens=(4,), amounts=(1.0,))}, "a reward lands on a token the policy did not write"),
        ({"reward": Reward(total=1.0, tokens=(6,), amounts=(1.0,))}, "a reward lands on a token the policy did not write"),
        ({"reward": Reward(total=1.0, tokens=(-1,), amounts=(1.0,))}, "a reward lands on a token the policy did not write"),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused(changes: dict[str, Any], told: str):
    with pytest.raises(TrajectoryError, match=told):
        trajectory(**changes)


def test_a_ticket_is_named_the_same_everywhere():
    assert Ticket(purpose=Purpose.TRAIN, ordinal=12, k=3, attempt=0).name == "train/12/3/0"
    assert Ticket(purpose=Purpose.EVAL, ordinal=7, k=0, attempt=1, evaluation="heldout@20").name == "eval:heldout@20/7/0/1"


def test_tickets_sort_by_ordinal_then_k():
    first = Ticket(purpose=Purpose.TRAIN, ordinal=2, k=1, attempt=5)
    assert sorted([replace(first, ordinal=10), replace(first, k=3), first])[:2] == [first, replace(first, k=3)]
    assert first.sample == (2, 1)


def test_losses_of_our_own_processes_are_no_failures_of_the_infrastructure():
    assert INFRASTRUCTURE_CAUSES.isdisjoint({CloseCause.TRAJECTORY, CloseCause.LOST, CloseCause.GROUP_CLOSED, CloseCause.RUN_END})
