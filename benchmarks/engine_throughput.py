"""Tokens per second of the embedded engine: a loop of one request at a time, the scheduler alone, and over HTTP.

    python benchmarks/engine_throughput.py [--hidden 128 --layers 2 --heads 4 --vocabulary 853 --running 96 --episodes 384]

An episode is what a search agent does: a short prompt, then turns of about twenty tokens, each followed by a short observation. The model's
weights are random; its speed is that of a trained one. Prints a table with the hardware and the ratios to the naive loop.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import trio
import uvicorn
from safetensors.torch import save_file

from agentrl.engine.app import EngineServer
from agentrl.engine.architecture import ModelConfig
from agentrl.engine.request import GenerateRequest, SamplingParams
from agentrl.engine.runner import Chunk, ModelRunner
from agentrl.engine.sampling import sample
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sequence import Sequence
from agentrl.engine.weights import Weights
from agentrl.seeds import counter_uniform

CONTEXT_TOKENS = 256
PROMPT_TOKENS, TURN_TOKENS, OBSERVATION_TOKENS, TURNS = (10, 30), (12, 28), (20, 60), 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """New input tokens, then the number of tokens to generate."""

    input_ids: list[int]
    generate: int


Episode = list[Turn]


def main() -> None:
    """Measure and print."""
    options = parse()
    torch.set_num_threads(1)
    episodes = make_episodes(options.episodes, options.vocabulary)
    tokens = sum(turn.generate for episode in episodes for turn in episode)
    with tempfile.TemporaryDirectory() as directory:
        model_dir = write_model(Path(directory), options)
        some = episodes[: max(8, options.episodes // 16)]
        naive = sum(turn.generate for episode in some for turn in episode) / timed(lambda: run_naive(model_dir, some))
        slots = options.slots or options.running
        scheduler_s, scheduler_note = run_scheduler(model_dir, episodes, options.running, slots)
        http_s, http_note = run_http(model_dir, episodes, options.running, slots)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, engine on 1 thread, torch {torch.__version__}")
    print(f"hidden {options.hidden}, {options.layers} layers, vocabulary {options.vocabulary}; {len(episodes)} episodes, {tokens} tokens generated,")
    print(f"{options.running} episodes at once, {slots} slots\n")
    print(f"{'':34}{'tokens/s':>10}{'ratio':>8}")
    print(f"{'one request at a time, no batching':34}{naive:10.0f}{1.0:8.1f}")
    for name, rate, note in (("scheduler", tokens / scheduler_s, scheduler_note), ("over HTTP", tokens / http_s, http_note)):
        print(f"{name:34}{rate:10.0f}{rate / naive:8.1f}   {note}")


def run_naive(model_dir: Path, episodes: list[Episode]) -> None:
    """What a plain loop does: one sequence, its cache kept between turns, one token per forward."""
    config = ModelConfig.load(model_dir)
    runner = ModelRunner(Weights.load(model_dir, config), slots=1, context_tokens=CONTEXT_TOKENS)
    temperature = torch.ones(1)
    for number, episode in enumerate(episodes):
        position, draw = 0, 0
        pending: list[int] = []
        for turn in episode:
            ids = pending + turn.input_ids
            logits = runner.logits(runner.prefill([Chunk(slot=0, tokens=ids, start=position)])[-1:])
            position += len(ids)
            for left in range(turn.generate - 1, -1, -1):
                token, _ = sample(logits, temperature, torch.tensor([counter_uniform(number, draw)], dtype=torch.float64))
                draw += 1
                pending = token.tolist()
                if left:
                    logits = runner.decode(token, torch.tensor([position]), attend=position + 1)
                    position += 1


def run_scheduler(model_dir: Path, episodes: list[Episode], running: int, slots: int) -> tuple[float, str]:
    """The scheduler without HTTP, the same episodes."""
    config = ModelConfig.load(model_dir)
    runner = ModelRunner(Weights.load(model_dir, config), slots=slots, context_tokens=CONTEXT_TOKENS)
    scheduler = Scheduler(runner, None, version="0")
    waiting = list(enumerate(episodes))
    alive: dict[str, tuple[int, int, list[int]]] = {}

    def submit(number: int, turn: int, ids: list[int]) -> None:
        rid = f"{number}-{turn}"
        alive[rid] = (number, turn, ids)
        params = SamplingParams(max_new_tokens=episodes[number][turn].generate, seed=number)
        scheduler.submit(Sequence.of(GenerateRequest(rid=rid, input_ids=ids, params=params, return_logprob=True), None))

    started = time.perf_counter()
    while waiting or alive:
        while waiting and len(alive) < running:
            number, episode = waiting.pop()
            submit(number, 0, episode[0].input_ids)
        scheduler.step()
        for sequence in scheduler.take_finished():
            number, turn, ids = alive.pop(sequence.request.rid)
            if turn + 1 < len(episodes[number]):
                submit(number, turn + 1, ids + sequence.output + episodes[number][turn + 1].input_ids)
    elapsed = time.perf_counter() - started
    return elapsed, f"{scheduler.counters}"


def run_http(model_dir: Path, episodes: list[Episode], running: int, slots: int) -> tuple[float, str]:
    """The engine in its own process; clients in this one."""
    with served(model_dir, slots) as url:
        started = time.perf_counter()
        trio.run(play_all, url, episodes, running)
        elapsed = time.perf_counter() - started
        info = httpx.get(f"{url}/server_info").json()["embedded"]
    return elapsed, json.dumps({name: round(value, 2) for name, value in info.items()})


async def play_all(url: str, episodes: list[Episode], running: int) -> None:
    """All episodes, `running` at once, each over a connection of its own."""
    queue = list(enumerate(episodes))

    async def player() -> None:
        host, port = url.removeprefix("http://").split(":")
        stream = await trio.open_tcp_stream(host, int(port))
        async with stream:
            while queue:
                number, episode = queue.pop()
                ids: list[int] = []
                for index, turn in enumerate(episode):
                    ids = ids + turn.input_ids
                    sampling = {"max_new_tokens": turn.generate, "sampling_seed": number * 8 + index}
                    reply = await post(stream, "/generate", {"input_ids": ids, "sampling_params": sampling, "return_logprob": True})
                    ids = ids + reply["output_ids"]

    async with trio.open_nursery() as nursery:
        for _ in range(running):
            nursery.start_soon(player)


async def post(stream: trio.SocketStream, path: str, body: dict[str, Any]) -> Any:
    """A bare HTTP/1.1 exchange: the client must not be what is measured."""
    data = json.dumps(body).encode()
    await stream.send_all(f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    received = b""
    while b"\r\n\r\n" not in received:
        received += await stream.receive_some()
    head, _, rest = received.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(rest) < length:
        rest += await stream.receive_some()
    return json.loads(rest)


@contextmanager
def served(model_dir: Path, slots: int) -> Iterator[str]:
    """An engine in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(model_dir, port, slots))
    process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{url}/ready").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.join()


def serve(model_dir: Path, port: int, slots: int) -> None:
    """The process's main."""
    torch.set_num_threads(1)
    server = EngineServer(model_dir, slots=slots, context_tokens=CONTEXT_TOKENS)
    uvicorn.run(server.app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def make_episodes(count: int, vocabulary: int) -> list[Episode]:
    """Random ids of the lengths of a search agent's turns."""
    source = random.Random(0)

    def ids(bounds: tuple[int, int]) -> list[int]:
        return [source.randrange(vocabulary) for _ in range(source.randint(*bounds))]

    return [
        [Turn(input_ids=ids(PROMPT_TOKENS if index == 0 else OBSERVATION_TOKENS), generate=source.randint(*TURN_TOKENS)) for index in range(TURNS)]
        for _ in range(count)
    ]


def write_model(directory: Path, options: argparse.Namespace) -> Path:
    """A Qwen2 model of the given size with random weights."""
    config = {
        "model_type": "qwen2",
        "vocab_size": options.vocabulary,
        "hidden_size": options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "intermediate_size": 3 * options.hidden,
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT_TOKENS,
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = ModelConfig.load(directory).parameters()
    save_file({name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}, directory / "model.safetensors")
    return directory


def timed(work: Any) -> float:
    """Seconds that `work()` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"hidden": 128, "layers": 2, "heads": 4, "vocabulary": 853, "running": 96, "episodes": 384, "slots": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
