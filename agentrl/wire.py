"""The msgpack codec: what travels between processes and, byte for byte, what the journal keeps.

A trajectory is a map of plain values; its token arrays are raw little-endian bytes. `format` is (major, minor): another major is
refused, unknown fields are ignored. `hash` is blake2b-128 over the packed map without it: a trajectory that was altered on the way, or
on the disk, is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import msgpack
import numpy as np

from agentrl.errors import WireError
from agentrl.types import Purpose, Reward, StopReason, Task, Ticket, ToolCall, Trajectory, Turn

__all__ = [
    "MAX_MESSAGE_BYTES",
    "TRAJECTORY_FORMAT",
    "decode_task",
    "decode_ticket",
    "decode_trajectory",
    "encode_task",
    "encode_ticket",
    "encode_trajectory",
    "pack",
    "unpack",
]

TRAJECTORY_FORMAT = (1, 0)
MAX_MESSAGE_BYTES = 1 << 30  # a batch of thousands of long trajectories stays well below
_DTYPES = {"token_ids": "<i4", "loss_mask": "|u1", "behaviour_logprobs": "<f4", "versions": "<i4"}


def pack(value: object) -> bytes:
    """Msgpack bytes of a plain value (maps, lists, str, bytes, int, float, bool, None)."""
    return cast(bytes, msgpack.packb(value, use_bin_type=True))


def unpack(data: bytes) -> Any:
    """The value of msgpack bytes.

    Raises:
        WireError: the bytes are not one whole msgpack value, or exceed `MAX_MESSAGE_BYTES`.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:  # TypeError: a key that cannot be one, such as a list
        raise WireError(f"not a msgpack value: {error}") from error


def encode_ticket(ticket: Ticket) -> list[Any]:
    """A ticket as [purpose, ordinal, k, attempt, evaluation]."""
    return [str(ticket.purpose), ticket.ordinal, ticket.k, ticket.attempt, ticket.evaluation]


def decode_ticket(value: Any) -> Ticket:
    """The ticket of `encode_ticket`."""
    try:
        purpose, ordinal, k, attempt, evaluation = value
        return Ticket(purpose=Purpose(purpose), ordinal=int(ordinal), k=int(k), attempt=int(attempt), evaluation=str(evaluation))
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"not a ticket: {value!r}") from error


def encode_task(task: Task) -> dict[str, Any]:
    """A task as a plain map."""
    return {
        "id": task.id,
        "prompt": task.prompt,
        "answers": list(task.answers),
        "source": task.source,
        "messages": [dict(message) for message in task.messages],
        "extra": dict(task.extra),
    }


def decode_task(value: Mapping[str, Any]) -> Task:
    """The task of `encode_task`."""
    try:
        return Task(
            id=value["id"],
            prompt=value["prompt"],
            answers=tuple(value["answers"]),
            source=value["source"],
            messages=tuple(value["messages"]),
            extra=value["extra"],
        )
    except (KeyError, TypeError) as error:
        raise WireError(f"not a task: {error!r}") from error


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """The bytes of a trajectory: what a worker sends and the journal keeps."""
    body: dict[str, Any] = {
        "format": list(TRAJECTORY_FORMAT),
        "ticket": encode_ticket(trajectory.ticket),
        "task_id": trajectory.task_id,
        "source": trajectory.source,
        "turns": [_plain(turn) | {"tool_calls": [_plain(call) for call in turn.tool_calls]} for turn in trajectory.turns],
        "reward": {
            "total": trajectory.reward.total,
            "parts": dict(trajectory.reward.parts),
            "tokens": list(trajectory.reward.tokens),
            "amounts": list(trajectory.reward.amounts),
        },
        "stop": str(trajectory.stop),
        "dispatched_s": trajectory.dispatched_s,
        "finished_s": trajectory.finished_s,
        "worker": trajectory.worker,
        "incarnation": trajectory.incarnation,
        "temperature": trajectory.temperature,
    }
    for name, dtype in _DTYPES.items():
        body[name] = np.ascontiguousarray(getattr(trajectory, name), dtype=dtype).tobytes()
    packed = pack(body)
    body["hash"] = hashlib.blake2b(packed, digest_size=16).digest()
    return pack(body)


def _plain(record: Turn | ToolCall) -> dict[str, Any]:
    """The fields of a record by name, one level deep: `dataclasses.asdict` copies every value and takes as long as all the rest."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def decode_trajectory(data: bytes) -> Trajectory:
    """The trajectory of `encode_trajectory`.

    Raises:
        WireError: another major format, a missing field, or content that does not match its hash.
        TrajectoryError: fields that contradict each other.
    """
    body = unpack(data)
    if not isinstance(body, dict) or not isinstance(body.get("format"), list) or not body["format"]:
        raise WireError("not a trajectory: no format")
    if body["format"][0] != TRAJECTORY_FORMAT[0]:
        raise WireError(f"trajectory format {body['format']}: this version reads major {TRAJECTORY_FORMAT[0]} only")
    told = body.pop("hash", None)
    if hashlib.blake2b(pack(body), digest_size=16).digest() != told:
        raise WireError(f"the content of trajectory {body.get('ticket')} does not match its hash: it was altered")
    try:
        return _trajectory(body)
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"not a trajectory: {error!r}") from error


def _trajectory(body: dict[str, Any]) -> Trajectory:
    arrays: dict[str, Any] = {name: np.frombuffer(body[name], dtype=dtype) for name, dtype in _DTYPES.items()}
    reward = body["reward"]
    return Trajectory(
        ticket=decode_ticket(body["ticket"]),
        task_id=body["task_id"],
        source=body["source"],
        turns=tuple(_turn(turn) for turn in body["turns"]),
        reward=Reward(total=reward["total"], parts=reward["parts"], tokens=tuple(reward["tokens"]), amounts=tuple(reward["amounts"])),
        stop=StopReason(body["stop"]),
        dispatched_s=body["dispatched_s"],
        finished_s=body["finished_s"],
        worker=body["worker"],
        incarnation=body["incarnation"],
        temperature=body["temperature"],
        **arrays,
    )


def _turn(value: dict[str, Any]) -> Turn:
    known: dict[str, Any] = {name: value[name] for name in Turn.__dataclass_fields__}
    known["completion"], known["observation"] = tuple(value["completion"]), tuple(value["observation"])
    known["tool_calls"] = tuple(_tool_call(call) for call in value["tool_calls"])
    return Turn(**known)


def _tool_call(value: dict[str, Any]) -> ToolCall:
    known: dict[str, Any] = {name: value[name] for name in ToolCall.__dataclass_fields__}
    return ToolCall(**(known | {"result_ids": tuple(value["result_ids"])}))
