"""Trajectories for the tests of metrics, made from the words of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agentrl.types import Purpose, Reward, StopReason, Ticket, ToolCall, Trajectory, Turn

PROMPT = 3  # tokens of every prompt
INFO = 2  # tokens of every observation


def episode(
    *turns: tuple[str, Sequence[int]],
    reward: float = 0.0,
    parts: Mapping[str, float] | None = None,
    stop: StopReason = StopReason.ANSWERED,
    sample: tuple[int, int] = (0, 0),
    source: str = "nq",
    seconds: float = 1.0,
) -> Trajectory:
    """P C0 O0 C1 ...: each turn is its action and the version of each of its tokens; an observation follows all but the last.

    Token ids count up from 1000 * ordinal + 100 * k.
    """
    versions, spans = [-1] * PROMPT, []
    for number, (action, written) in enumerate(turns):
        start = len(versions)
        versions += list(written)
        end = len(versions)
        if number < len(turns) - 1:
            versions += [-1] * INFO
        spans.append((action, (start, end), (end, len(versions))))
    array = np.array(versions, dtype=np.int32)
    mask = (array >= 0).astype(np.uint8)
    first_token = 1000 * sample[0] + 100 * sample[1]
    return Trajectory(
        ticket=Ticket(purpose=Purpose.TRAIN, ordinal=sample[0], k=sample[1], attempt=0),
        task_id=f"task-{sample[0]}",
        source=source,
        token_ids=np.arange(first_token, first_token + len(array), dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask == 1, -0.5, 0.0).astype(np.float32),
        versions=array,
        turns=tuple(_turn(*span) for span in spans),
        reward=Reward(total=reward, parts=parts or {}),
        stop=stop,
        dispatched_s=100.0,
        finished_s=100.0 + seconds,
        worker=0,
        incarnation=1,
    )


def _turn(action: str, completion: tuple[int, int], observation: tuple[int, int]) -> Turn:
    calls = (ToolCall(tool="search", arguments_hash="00", result_ids=("d1", "d2")),) if action == "search" else ()
    return Turn(
        completion=completion,
        observation=observation,
        action=action,
        argument="x",
        stop="eos",
        engine="0",
        started_s=100.0,
        generated_s=100.5,
        ended_s=100.6,
        tool_calls=calls,
    )
