"""Servers of fixed latency, each in a process of its own, and what they say: an engine, a retriever, and a real buffer that is never full.

Engine and retriever hold every request for the same time and cost next to nothing: HTTP as far as it is needed here, answers made beforehand. A
request without content asks how many seconds they have held requests in all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from agentrl.buffer.app import create_app, spare_the_held
from agentrl.buffer.buffer import BufferSettings, Caller, ReplayBuffer
from agentrl.env import Observation
from agentrl.rollout.tokens import TokenEncoder
from agentrl.system.http import serve_app
from agentrl.system.process import StopSignal
from agentrl.testing.tokenizer import byte_encoder
from agentrl.types import Task

LATE_S = 0.0005  # asyncio's timers are late by this on average: epoll counts in milliseconds
WORDS, VOCABULARY = 3000, 6000
QUESTION_WORDS, THOUGHT_WORDS, PASSAGE_WORDS = 16, 50, 120
SCRIPTS, PASSAGES, TASKS = 256, 400, 512
GROUP = 8
CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs in a process of its own."""

    url: str
    pid: int


def started(stack: ExitStack, cores: set[int], serve: Callable[..., None], *arguments: Any) -> Server:
    """A server on these cores, for as long as the stack is open. `serve` is given a function that it tells its URL."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_serve, args=(theirs, cores, serve, arguments), daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.kill)
    assert process.pid is not None
    return Server(ours.recv(), process.pid)


def _serve(pipe: Connection, cores: set[int], serve: Callable[..., None], arguments: Sequence[Any]) -> None:
    os.sched_setaffinity(0, cores)
    serve(*arguments, pipe.send)


def serve_buffer(tasks: list[Task], directory: str, tell: Callable[[str], None]) -> None:
    """A buffer with one version published, that is never full."""
    settings = BufferSettings(group_size=GROUP, groups_per_batch=10**6, total_steps=10)
    buffer = ReplayBuffer(Path(directory), settings, tasks=Endless(tasks), incarnation=0, run=0)
    buffer.reserve_version(Caller(role="learner", index=0, incarnation=0), reason="initial")
    buffer.version_published(version=0, engines=range(2), seconds=0.0, bytes=0)
    spare_the_held()
    serve_app(create_app(buffer), on_ready=lambda told: tell(told["url"]), stop=StopSignal())


@dataclass(frozen=True, slots=True)
class Endless:
    """The same tasks over and over."""

    tasks: list[Task]

    @property
    def size(self) -> int:
        """Tasks per epoch."""
        return len(self.tasks)

    def task(self, ordinal: int) -> Task:
        """The task at a place of the order."""
        return self.tasks[ordinal % len(self.tasks)]


def serve_engine(replies: list[list[bytes]], turn_s: float, tell: Callable[[str], None]) -> None:
    """An engine whose every turn takes the same time. The turn is the second last number of the request's id."""

    def answer(body: bytes, count: int) -> bytes:
        rid = _RID.search(body)
        return replies[int(rid[1].split(b"/")[-2])][count % SCRIPTS] if rid else _http({})

    asyncio.run(_answer_late(answer, turn_s, tell))


def serve_retriever(passages: list[dict[str, Any]], search_s: float, tell: Callable[[str], None]) -> None:
    """A retriever that finds three passages of its own choice."""
    rng, texts = random.Random(0), [json.dumps(passage) for passage in passages]

    def answer(body: bytes, count: int) -> bytes:
        return _http_bytes(('{"result": [[' + ", ".join(rng.sample(texts, 3)) + "]]}").encode())

    asyncio.run(_answer_late(answer, search_s, tell))


async def _answer_late(answer: Callable[[bytes, int], bytes], after_s: float, tell: Callable[[str], None]) -> None:
    loop, count = asyncio.get_running_loop(), itertools.count()
    asked = 0  # requests that wait
    held_s = 0.0  # of all requests, less the moments at which those that wait were asked

    class Answering(asyncio.Protocol):
        """One connection: a request, its answer, the next request. One without content asks for how long requests were held in all."""

        buffered = b""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast(asyncio.WriteTransport, transport)

        def data_received(self, data: bytes) -> None:
            self.buffered += data
            head, found, body = self.buffered.partition(b"\r\n\r\n")
            length = _LENGTH.search(head)
            if found and len(body) >= int(length[1] if length else 0):
                self.buffered = b""
                self._ask(body)

        def _ask(self, body: bytes) -> None:
            nonlocal asked, held_s
            if not body:
                self.transport.write(_http_bytes(str(held_s + asked * loop.time()).encode()))
                return
            asked, held_s = asked + 1, held_s - loop.time()
            loop.call_later(after_s - LATE_S, self._answer, answer(body, next(count)))

        def _answer(self, content: bytes) -> None:
            nonlocal asked, held_s
            self.transport.write(content)
            asked, held_s = asked - 1, held_s + loop.time()

    server = await loop.create_server(Answering, "127.0.0.1", 0, backlog=2048)
    tell(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await server.serve_forever()


def _http(value: Any) -> bytes:
    return _http_bytes(json.dumps(value, separators=(",", ":")).encode())


def _http_bytes(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_RID = re.compile(rb'"rid": ?"([^"]*)"')


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected(server: Server) -> Streams:
    """A connection to a server."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def ask(streams: Streams, target: bytes, content: bytes) -> bytes:
    """The content of the answer to a request."""
    reader, writer = streams
    writer.write(b"POST %b HTTP/1.1\r\nhost: bench\r\ncontent-length: %d\r\n\r\n%b" % (target, len(content), content))
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    assert head.startswith(b"HTTP/1.1 200"), head
    assert length is not None
    return await reader.readexactly(int(length[1]))


@dataclass(slots=True)
class Words:
    """A made-up language: what tasks, replies and passages are written in."""

    words: list[str]
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def make(cls) -> Words:
        """Words of two to four syllables."""
        rng = random.Random(0)
        syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
        return cls(sorted({"".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(WORDS)}))

    def text(self, count: int) -> str:
        """So many words."""
        return " ".join(self.rng.choices(self.words, k=count))

    def encoder(self) -> TokenEncoder:
        """A byte-level BPE for it, with Qwen's chat template."""
        return byte_encoder([" " + word for word in self.words], vocab_size=VOCABULARY)

    def tasks(self) -> list[Task]:
        """Questions."""
        return [Task(id=str(number), prompt=self.text(QUESTION_WORDS), answers=(self.text(2),)) for number in range(TASKS)]

    def passages(self) -> list[dict[str, Any]]:
        """Hits of a search."""
        return [
            {"document": {"id": str(number), "contents": f'"{self.text(3)}"\n{self.text(PASSAGE_WORDS)}'}, "score": 0.5} for number in range(PASSAGES)
        ]

    def replies(self, encoder: TokenEncoder, seed: int) -> list[list[bytes]]:
        """Whole HTTP answers to `/generate`, by turn: those that search, and those that answer."""
        self.rng.seed(seed)
        endings = ("<search> {} </search>", "<answer> {} </answer>")
        return [[self._reply(encoder, ending) for _ in range(SCRIPTS)] for ending in endings]

    def _reply(self, encoder: TokenEncoder, ending: str) -> bytes:
        text = f"<think> {self.text(THOUGHT_WORDS)} </think> {ending.format(self.text(6))}"
        ids = encoder.encode_observation(Observation.frame(text)).ids.tolist()
        meta = {
            "id": "0123456789abcdef0123456789abcdef",
            "finish_reason": {"type": "stop", "matched": ending[-9:]},
            "prompt_tokens": 640,
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[-self.rng.expovariate(1.0), token, None] for token in ids],
            "output_token_logprobs_length": len(ids),
            "reasoning_tokens": 0,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "e2e_latency": 0.05,
        }
        return _http({"text": text, "output_ids": ids, "meta_info": meta})
