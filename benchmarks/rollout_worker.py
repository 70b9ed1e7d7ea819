"""Episodes a second of one rollout worker, when engines and environment cost nothing: what its Python costs per episode.

    python benchmarks/rollout_worker.py [--episodes 4000] [--concurrency 128]

One production `RolloutWorker` plays two-turn search episodes (a prompt of 60 tokens, two completions of 15, passages of 150). Engines are two
processes that answer at once over HTTP, so that the production client and transport are in the figure; the buffer is the in-process fake.
Printed: episodes and generation requests a second, CPU per episode, and the hardware.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import trio

from agentrl.config.recipe import RolloutRecipe
from agentrl.engine_api import EngineClient
from agentrl.env import Environment, Observation, StepResult
from agentrl.rollout.tokens import TokenEncoder
from agentrl.rollout.worker import RolloutWorker
from agentrl.testing.buffer import FakeBuffer
from agentrl.testing.engine import turns
from agentrl.testing.tokenizer import word_encoder
from agentrl.types import StopReason, Task

WORDS = [f"w{number}" for number in range(800)]
THOUGHT = " ".join(WORDS[:10])
EPISODE = (f"<think> {THOUGHT} </think> <search> w1 </search>", f"<think> {THOUGHT} </think> <answer> w2 </answer>")
PASSAGES = " ".join(WORDS[100:250])
ENGINES = 2


def main() -> None:
    """Measure, print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--episodes", type=int, default=4000)
    options.add_argument("--concurrency", type=int, default=128)
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        trio.run(_serve)
        return
    with ExitStack() as stack:
        urls = [_started(stack) for _ in range(ENGINES)]
        wall_s, cpu_s = trio.run(_measure, urls, arguments.episodes, arguments.concurrency)
    rate = arguments.episodes / wall_s
    print(f"{arguments.episodes} episodes of 2 turns, {arguments.concurrency} at a time, over HTTP to {ENGINES} engines that answer at once")
    print(f"{rate:.0f} episodes/s, {2 * rate:.0f} generation requests/s, {1e3 * cpu_s / arguments.episodes:.2f} ms of CPU per episode")
    print(f"{os.cpu_count()} x {platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")


async def _measure(urls: list[str], episodes: int, concurrency: int) -> tuple[float, float]:
    rng = random.Random(0)
    tasks = [Task(id=str(number), prompt=" ".join(rng.choices(WORDS, k=60)), answers=("w2",)) for number in range(episodes // 8)]
    buffer = FakeBuffer(tasks, samples=8)
    worker = RolloutWorker(
        client=buffer,
        engines=[EngineClient(url, index) for index, url in enumerate(urls)],
        environment=_Search,
        encoder=_encoder(),
        recipe=RolloutRecipe(concurrency=concurrency),
    )
    started_s, cpu_s = time.perf_counter(), time.process_time()
    await worker.run()
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    assert {trajectory.reward.total for trajectory in buffer.trajectories} == {1.0}
    return wall_s, cpu_s


def _encoder() -> TokenEncoder:
    return word_encoder(WORDS)


class _Search(Environment):
    stop_strings = ("</search>", "</answer>")

    async def start(self, task: Task) -> Observation:
        return Observation.user(task.prompt)

    async def step(self, completion: str) -> StepResult:
        match = re.search(r"<(search|answer)>(.*?)</\1>", completion)
        assert match is not None
        if match[1] == "answer":
            return StepResult(stop=StopReason.ANSWERED, parts={"em": float(match[2].strip() == "w2")}, action="answer")
        return StepResult(observation=Observation.framed("<information> ", PASSAGES, " </information>"), action="search", argument=match[2])


def _started(stack: ExitStack) -> str:
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    stack.callback(server.wait)
    stack.callback(server.kill)
    assert server.stdout is not None
    return server.stdout.readline().strip()


async def _serve() -> None:
    script = turns(_encoder(), *EPISODE)
    answers = {turn: _http(script({"rid": f"x/{turn}/0"})) for turn in range(len(EPISODE))}

    async def serve(stream: trio.SocketStream) -> None:
        buffered = b""
        try:
            while chunk := await stream.receive_some(65536):
                buffered += chunk
                head, found, body = buffered.partition(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                if found and len(body) >= int(length[1] if length else 0):
                    buffered = b""
                    rid = re.search(rb'"rid":"([^"]*)"', body)
                    await stream.send_all(answers[int(rid[1].split(b"/")[-2])] if rid else b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        except trio.BrokenResourceError:
            return  # the worker is done

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1024)
    print(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}", flush=True)
    await trio.serve_listeners(serve, listeners)


def _http(ids: Sequence[int]) -> bytes:
    meta = {
        "finish_reason": {"type": "stop", "matched": "</answer>"},
        "output_token_logprobs": [[-0.123456789, token, None] for token in ids],
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }
    body = json.dumps({"text": "", "output_ids": list(ids), "meta_info": meta}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


if __name__ == "__main__":
    main()
