"""Talking to an engine over plain HTTP: requests that are watched as they run, and the learner's end of a weight update."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import torch
import torch.distributed as dist

from agentrl.collective import broadcast, flatten_bucket, join_update_group, leave_update_group

__all__ = [
    "DEADLINE_S",
    "LONG",
    "PROMPT",
    "Group",
    "Reply",
    "Running",
    "announcement",
    "generate",
    "generate_body",
    "group",
    "halves",
    "load",
    "wait_until",
]

Reply = dict[str, Any]
Tensors = Mapping[str, torch.Tensor]

PROMPT = [68, 80, 41, 90]
LONG = 1900  # tokens of a request that is still running whenever something happens to it: no test waits for its end
TOLD_EVERY = 8  # tokens: a stream's chunks are cumulative, so telling each token would be quadratic
DEADLINE_S = 30.0


def generate_body(ids: list[int] | None = None, *, new: int = 8, **fields: Any) -> dict[str, Any]:
    """The body of `POST /generate`: fields of the body by name, any other name is a sampling parameter."""
    top = ("rid", "return_logprob", "logprob_start_len", "extra_key", "cache_salt", "stream", "return_text_in_logprobs")
    body = {"input_ids": PROMPT if ids is None else ids, "return_logprob": True} | {name: fields.pop(name) for name in top if name in fields}
    return body | {"sampling_params": {"max_new_tokens": new, "ignore_eos": True} | fields}


def generate(http: httpx.Client, ids: list[int] | None = None, *, new: int = 8, **fields: Any) -> Reply:
    """A reply that must be one."""
    reply = http.post("/generate", json=generate_body(ids, new=new, **fields))
    assert reply.status_code == 200, reply.text
    result: Reply = reply.json()
    return result


class Running:
    """A streamed request, followed by a thread of `pool`, that tells how far it has come."""

    def __init__(self, http: httpx.Client, pool: ThreadPoolExecutor, ids: list[int] | None = None, *, new: int = LONG, **fields: Any) -> None:
        self._newest: Reply = {"output_ids": []}
        self._grew = threading.Condition()
        body = generate_body(ids, new=new, stream=True, **{"stream_interval": TOLD_EVERY} | fields)
        self.future: Future[Reply] = pool.submit(self._follow, http, body)

    @property
    def tokens(self) -> int:
        """Made so far, as far as is known."""
        return len(self._newest["output_ids"])

    def wait(self, tokens: int) -> Running:
        """Return when it has so many tokens."""
        with self._grew:
            assert self._grew.wait_for(lambda: self.tokens >= tokens or self.future.done(), DEADLINE_S), f"{self.tokens} of {tokens} tokens"
        assert self.tokens >= tokens, f"it ended before: {self._newest}"
        return self

    def result(self) -> Reply:
        """The last chunk."""
        return self.future.result(DEADLINE_S)

    def _follow(self, http: httpx.Client, body: dict[str, Any]) -> Reply:
        with http.stream("POST", "/generate", json=body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    with self._grew:
                        self._newest = {"output_ids": []} | json.loads(line.removeprefix("data: "))
                        self._grew.notify_all()
        return self._newest


def wait_until(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> None:
    """Ask again until it is so."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"


def load(http: httpx.Client, name: str) -> int:
    """One of the numbers of `/v1/loads`."""
    return int(http.get("/v1/loads?include=core").json()["loads"][0][name])


def announcement(tensors: Tensors, **more: Any) -> dict[str, Any]:
    """The body that announces a bucket."""
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        **more,
    }


def halves(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Two buckets of them."""
    names = list(tensors)
    middle = len(names) // 2
    return {name: tensors[name] for name in names[:middle]}, {name: tensors[name] for name in names[middle:]}


@dataclass
class Group:
    """Rank 0 of a gloo group with one engine."""

    http: httpx.Client
    pool: ThreadPoolExecutor
    name: str
    process_group: dist.ProcessGroup

    def announce(self, tensors: Tensors, *, flat: bool = True, **more: Any) -> Future[httpx.Response]:
        """The engine's end of a bucket alone."""
        body = announcement(tensors, group_name=self.name, load_format="flattened_bucket" if flat else None, **more)
        return self.pool.submit(self.http.post, "/update_weights_from_distributed", json=body)

    def send(self, tensors: Tensors, *, flat: bool = True, **more: Any) -> httpx.Response:
        """Both ends of a bucket."""
        posted = self.announce(tensors, flat=flat, **more)
        for tensor in [flatten_bucket(tensors.values())] if flat else tensors.values():
            broadcast(tensor, self.process_group)
        return posted.result(DEADLINE_S)


@contextmanager
def group(http: httpx.Client, pool: ThreadPoolExecutor, name: str, *, timeout_s: float = 20) -> Iterator[Group]:
    """A group, formed and destroyed at both ends."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": name, "backend": "gloo"}
    joining = pool.submit(http.post, "/init_weights_update_group", json=body | {"timeout_s": timeout_s})
    ours = join_update_group(master_address="127.0.0.1", master_port=port, rank=0, world_size=2, group_name=name, timeout_s=timeout_s)
    assert joining.result(DEADLINE_S).json() == {"success": True, "message": "Succeeded to initialize custom process group."}
    try:
        yield Group(http, pool, name, ours)
    finally:
        http.post("/destroy_weights_update_group", json={"group_name": name})
        leave_update_group(ours)
