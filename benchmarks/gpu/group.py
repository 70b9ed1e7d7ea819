"""The weight-update group between two processes: NCCL between two GPUs, gloo on a CPU. A receiver is killed in mid-broadcast and comes back."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from agentrl.collective import broadcast, join_update_group, leave_update_group, tensor_checksum
from agentrl.errors import PublishError
from agentrl.ports import free_port
from gpu.shapes import Shape, verdict

__all__ = ["check"]

BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
DEADLINE_S = 20.0  # of the group: what a broadcast to a dead receiver costs at most
REPEATS = 5


def check(shape: Shape, device: str) -> dict[str, Any]:
    """Published to a receiver, which is then killed while it receives; a new receiver joins a new group and gets the same bytes."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        return {"verdict": "has not run", "why": "NCCL needs two GPUs, and there is one: it has not run"}
    payload = torch.arange(BYTES[device] // 4, dtype=torch.int32, device=device).view(torch.uint8)
    expected = tensor_checksum(payload)
    numbers: dict[str, Any] = {"backend": "nccl" if device == "cuda" else "gloo", "bytes": payload.numel()}
    numbers["first_differs"], seconds = _published(payload, expected, device, "first")
    numbers["gigabytes_per_s"] = payload.numel() / seconds / 1e9
    numbers["seconds_to_notice_a_death"] = _killed(payload, device)
    numbers["second_differs"], _ = _published(payload, expected, device, "second")
    return verdict(numbers, {"first_differs": 0.0, "second_differs": 0.0, "seconds_to_notice_a_death": DEADLINE_S + 5})


def _published(payload: torch.Tensor, expected: str, device: str, name: str) -> tuple[int, float]:
    """(1 where the receiver's bytes differ, seconds of a broadcast)."""
    with _receiver(device, payload.numel(), name) as (process, pipe, group):
        times = []
        for _ in range(REPEATS):
            pipe.send("receive")
            started = time.monotonic()
            broadcast(payload, group)
            _settle(device)
            times.append(time.monotonic() - started)
            told = pipe.recv()
        pipe.send("end")
        process.join(DEADLINE_S)
        return int(told != expected), sorted(times)[REPEATS // 2]


def _killed(payload: torch.Tensor, device: str) -> float:
    """Seconds until a stream of broadcasts has failed here, after its receiver was killed in the middle of one."""
    with _receiver(device, payload.numel(), "killed") as (process, pipe, group):
        failed, sent = threading.Event(), threading.Event()

        def send() -> None:
            try:
                while True:
                    broadcast(payload, group)
                    _settle(device)
                    sent.set()
            except (PublishError, RuntimeError):
                failed.set()

        pipe.send("receive without end")
        threading.Thread(target=send, daemon=True).start()  # NCCL may wait in the kernel: then the group is aborted from here
        assert sent.wait(DEADLINE_S)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        started = time.monotonic()
        if device == "cuda" and not failed.wait(1.0):
            group.abort()
        failed.wait(DEADLINE_S + 5)
        return time.monotonic() - started


@contextlib.contextmanager
def _receiver(device: str, nbytes: int, name: str) -> Any:
    """A process on the second device, in a group with this one."""
    ours, theirs = mp.Pipe()
    port = free_port("127.0.0.1")
    process = mp.get_context("spawn").Process(target=_receive, args=(theirs, device, nbytes, name, port))
    process.start()
    group = _join(0, name, port, device)
    try:
        yield process, ours, group
    finally:
        with contextlib.suppress(RuntimeError):
            leave_update_group(group)
        if process.is_alive():
            process.kill()
        process.join()


def _receive(pipe: Connection, device: str, nbytes: int, name: str, port: int) -> None:
    place = torch.device("cuda", 1) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    group = _join(1, name, port, device)
    buffer = torch.empty(nbytes, dtype=torch.uint8, device=place)
    while (wish := pipe.recv()) != "end":
        while wish == "receive without end":
            broadcast(buffer, group)
        buffer.zero_()
        broadcast(buffer, group)
        _settle(device)
        pipe.send(tensor_checksum(buffer))
    leave_update_group(group)
    os._exit(0)  # without the interpreter's tear-down, in which gloo's threads may abort


def _join(rank: int, name: str, port: int, device: str) -> Any:
    return join_update_group(
        master_address="127.0.0.1",
        master_port=port,
        rank=rank,
        world_size=2,
        group_name=name,
        backend="nccl" if device == "cuda" else "gloo",
        timeout_s=DEADLINE_S,
    )


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
