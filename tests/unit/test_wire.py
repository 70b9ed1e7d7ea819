"""The codec: what comes out is what went in, and what was altered is refused."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import WireError
from agentrl.types import Purpose, Reward, StopReason, Task, Ticket, ToolCall, Trajectory, Turn
from agentrl.wire import decode_task, decode_ticket, decode_trajectory, encode_task, encode_ticket, encode_trajectory, pack, unpack

texts = st.text(max_size=20)
tickets = st.builds(
    Ticket, purpose=st.sampled_from(Purpose), ordinal=st.integers(0, 2**40), k=st.integers(0, 99), attempt=st.integers(0, 9), evaluation=texts
)
tasks = st.builds(
    Task,
    id=texts,
    prompt=texts,
    answers=st.lists(texts, max_size=3).map(tuple),
    source=texts,
    messages=st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=2).map(tuple),
    extra=st.dictionaries(
        texts, st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.lists(texts, max_size=2), max_size=3
    ),
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    mask = np.array([0, *draw(st.lists(st.integers(0, 1), max_size=30))], np.uint8)
    written = mask == 1
    numbers = np.arange(len(mask))
    call = ToolCall(
        tool=draw(texts), arguments_hash="00", result_ids=tuple(draw(st.lists(texts, max_size=2))), latency_s=draw(st.floats(0, 9)), error=""
    )
    turn = Turn(
        completion=(1, 2), observation=(2, 3), action=draw(texts), argument=draw(texts), stop="eos", engine="1", started_s=0.5, generated_s=1.5,
        ended_s=2.5, tool_calls=(call,), truncated=draw(st.booleans()), neutralised=draw(st.integers(0, 5)),
    )  # fmt: skip
    tokens = tuple(int(t) for t in np.flatnonzero(written)[-1:])
    return Trajectory(
        ticket=draw(tickets), task_id=draw(texts), source=draw(texts), turns=(turn,), stop=draw(st.sampled_from(StopReason)),
        token_ids=(numbers * 7).astype(np.int32), loss_mask=mask, versions=np.where(written, numbers, -1).astype(np.int32),
        behaviour_logprobs=np.where(written, -0.1 * numbers, 0).astype(np.float32),
        reward=Reward(total=float(len(tokens)), parts={"em": 1.0}, tokens=tokens, amounts=(1.0,) * len(tokens)),
        dispatched_s=draw(st.floats(0, 1e10)), finished_s=2.0, worker=3, incarnation=4, temperature=0.7,
    )  # fmt: skip


def sample() -> Trajectory:
    ticket = Ticket(purpose=Purpose.TRAIN, ordinal=1, k=2, attempt=0)
    return Trajectory(
        ticket=ticket, task_id="t", source="s", turns=(), stop=StopReason.ANSWERED, token_ids=np.array([1, 2], np.int32),
        loss_mask=np.array([0, 1], np.uint8), versions=np.array([-1, 5], np.int32), behaviour_logprobs=np.array([0, -0.5], np.float32),
        reward=Reward(total=1.0, tokens=(1,), amounts=(1.0,)), dispatched_s=0.0, finished_s=1.0, worker=0, incarnation=0,
    )  # fmt: skip


@settings(max_examples=40)
@given(tickets)
def test_a_ticket_comes_back_as_it_was(ticket: Ticket):
    assert decode_ticket(unpack(pack(encode_ticket(ticket)))) == ticket


@settings(max_examples=40)
@given(tasks)
def test_a_task_comes_back_as_it_was(task: Task):
    assert decode_task(unpack(pack(encode_task(task)))) == task


@settings(max_examples=40)
@given(trajectories())
def test_a_trajectory_comes_back_byte_for_byte(trajectory: Trajectory):
    data = encode_trajectory(trajectory)
    back = decode_trajectory(data)
    assert encode_trajectory(back) == data
    assert (back.ticket, back.turns, back.reward, back.stop) == (trajectory.ticket, trajectory.turns, trajectory.reward, trajectory.stop)
    for name in ("token_ids", "loss_mask", "behaviour_logprobs", "versions"):
        assert np.array_equal(getattr(back, name), getattr(trajectory, name))
        assert getattr(back, name).dtype == getattr(trajectory, name).dtype


def test_arrays_travel_as_little_endian_bytes_whatever_they_were():
    body = unpack(encode_trajectory(sample()))
    assert body["token_ids"] == b"\x01\x00\x00\x00\x02\x00\x00\x00"
    assert body["loss_mask"] == b"\x00\x01"
    assert body["versions"] == b"\xff\xff\xff\xff\x05\x00\x00\x00"


def test_any_flipped_bit_is_noticed():
    data = encode_trajectory(sample())
    for position in range(0, len(data), 3):
        altered = bytearray(data)
        altered[position] ^= 1
        with pytest.raises(WireError):
            decode_trajectory(bytes(altered))


def rehashed(**changes: Any) -> bytes:
    """A well-formed message with other content, as another release would send it."""
    body = unpack(encode_trajectory(sample()))
    del body["hash"]
    body |= changes
    body["hash"] = hashlib.blake2b(pack(body), digest_size=16).digest()
    return pack(body)


def test_fields_of_a_later_minor_format_are_ignored():
    assert decode_trajectory(rehashed(format=[1, 9], mood="good")).task_id == "t"


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (rehashed(format=[2, 0]), r"trajectory format \[2, 0\]: this version reads major 1 only"),
        (rehashed(stop="bored"), "not a trajectory"),
        (rehashed(token_ids=b"123"), "not a trajectory"),
        (pack({"format": []}), "no format"),
        (pack([1, 2]), "no format"),
        (encode_trajectory(sample())[:-1], "not a msgpack value"),
        (encode_trajectory(sample()) + b"\x00", "not a msgpack value"),
        (b"", "not a msgpack value"),
        (b"\xc1", "not a msgpack value"),
        (b"\xdd\xff\xff\xff\xff", "not a msgpack value"),
    ],
)
def test_bytes_that_are_no_trajectory_are_refused(data: bytes, told: str):
    with pytest.raises(WireError, match=told):
        decode_trajectory(data)


@given(st.binary(max_size=200))
def test_no_bytes_from_outside_raise_anything_else(data: bytes):
    for decode in (decode_trajectory, unpack):
        with contextlib.suppress(WireError):
            decode(data)


@pytest.mark.parametrize(
    "value", [None, 5, [], ["train", 1, 2, 3], ["nap", 1, 2, 3, ""], ["train", "x", 2, 3, ""], ["train", float("inf"), 2, 3, ""], [[], 1, 2, 3, ""]]
)
def test_what_is_no_ticket_is_refused(value: Any):
    with pytest.raises(WireError, match="not a ticket"):
        decode_ticket(value)


@pytest.mark.parametrize("value", [{}, {"id": "x"}, None, []])
def test_what_is_no_task_is_refused(value: Any):
    with pytest.raises(WireError, match="not a task"):
        decode_task(value)
