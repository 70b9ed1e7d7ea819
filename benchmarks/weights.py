"""Publishing against a bare gloo broadcast of the same bytes, and the engine's pause against a copy of its weights in memory.

Claims: the publisher brings a version to 1, 2 and 4 engines at 0.85 or more of the rate of a bare broadcast to as many processes, in buckets of
the same size; and an engine that generates rests for at most 1.2 times as long as copying its weights takes.

    python benchmarks/weights.py                 # 130 MB of fp32 weights; some 2 GB of memory
    python benchmarks/weights.py --large         # 1 GB besides; some 14 GB of memory

Engines are embedded engines in processes of their own, over HTTP, one thread each, and so are the receivers of the bare broadcast, which receive
into one buffer over and over and do nothing else. A publishing is everything: sessions, checksums on both sides, the commit, each engine's word that
it has the version. The two are timed in turns; medians, and the range of the ratio from one turn to the next. "rest" is the engine's own word for
how long it generated nothing, with requests running; computing their keys and values anew under the new weights comes after it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import trio
from safetensors.torch import load_file, save_file

from agentrl.collective import broadcast, join_update_group, leave_update_group
from agentrl.config.weights import WeightsRecipe
from agentrl.engine.architecture import ModelConfig
from agentrl.engine_api import EngineClient, GenerateRequest
from agentrl.weights import Publisher, Snapshot

SMALL = {"hidden": 512, "layers": 10, "intermediate": 1408}  # 130 MB
LARGE = {"hidden": 1280, "layers": 13, "intermediate": 3520}  # 1.04 GB
VOCABULARY, CONTEXT_TOKENS, SLOTS = 512, 512, 16
WARM_UP = 2  # rounds that are not counted: the first one finds no memory to use again
LOADED_ROUNDS, LOADED_REQUESTS = 3, 8
DEADLINE_S = 300.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true", help="1 GB of weights besides")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--bucket-mb", type=int, default=WeightsRecipe().bucket_mb)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--fan-out", choices=["auto", "each", "one"], default="auto")
    parser.add_argument("--engine", metavar="MODEL_DIR", help=argparse.SUPPRESS)
    parser.add_argument("--receive", nargs=5, metavar=("RANK", "WORLD", "PORT", "NAME", "SIZES"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.engine:
        return serve(Path(given.engine))
    if given.receive:
        return receive(*given.receive)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ", end="")
    print(f"Python {platform.python_version()}, torch {torch.__version__}; buckets of {given.bucket_mb} MB, fan_out {given.fan_out}")
    print("weights   engines  bare GB/s  publish GB/s  ratio (range)         begin-end GB/s  rest ms  copy ms  rest / copy")
    for shape in (SMALL, LARGE)[: 1 + given.large]:
        with tempfile.TemporaryDirectory() as directory:
            model_dir = write_model(Path(directory) / "model", **shape)
            for engines in given.engines:
                print(measured(model_dir, engines, given), flush=True)


@dataclass(frozen=True, kw_only=True)
class Round:
    """One turn of both."""

    bare_s: float
    publish_s: float
    broadcast_s: float


def measured(model_dir: Path, engines: int, given: argparse.Namespace) -> str:
    """A line of the table."""
    tensors = list(load_file(model_dir / "model.safetensors").items())
    lists = in_lists(tensors, given.bucket_mb * 2**20)
    whole = Snapshot.of(0, 0, lists)
    with ExitStack() as stack:
        urls = [stack.enter_context(engine_process(model_dir)) for _ in range(engines)]
        total = given.rounds + WARM_UP
        bare = stack.enter_context(bare_broadcast(whole, engines, total))
        rounds, rests = trio.run(measure, urls, lists, bare, total, given, model_dir)
    nbytes, copy_s = whole.nbytes, copied_s([tensor for _, tensor in tensors])
    ratios = [round.bare_s / round.publish_s for round in rounds]
    bare_s, publish_s, broadcast_s = (statistics.median(getattr(round, name) for round in rounds) for name in ("bare_s", "publish_s", "broadcast_s"))
    rest_s = statistics.median(rests)
    return (
        f"{nbytes / 1e6:6.0f} MB {engines:8} {nbytes / bare_s / 1e9:10.2f} {nbytes / publish_s / 1e9:13.2f}  {bare_s / publish_s:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) {nbytes / broadcast_s / 1e9:18.2f} {rest_s * 1e3:9.2f} {copy_s * 1e3:8.1f} {rest_s / copy_s:12.3f}"
    )


async def measure(
    urls: Sequence[str], lists: list[list[tuple[str, torch.Tensor]]], bare: partial[None], total: int, given: argparse.Namespace, model_dir: Path
) -> tuple[list[Round], list[float]]:
    """Rounds without requests, and the rests of rounds with requests running."""
    clients = [EngineClient(url, index) for index, url in enumerate(urls)]
    recipe = WeightsRecipe(bucket_mb=given.bucket_mb, fan_out=given.fan_out, bucket_deadline_s=60.0)
    publisher = Publisher(recipe, model_dir=model_dir, directory=model_dir)
    publisher.set_engines(clients)
    rounds: list[Round] = []
    rests: list[float] = []
    for version in range(1, total + 1):
        snapshot = Snapshot.of(version, version, lists)
        started = time.perf_counter()
        await trio.to_thread.run_sync(bare)
        bare_s = time.perf_counter() - started
        started = time.perf_counter()
        published = await publisher.publish(snapshot)
        rounds.append(Round(bare_s=bare_s, publish_s=time.perf_counter() - started, broadcast_s=published.broadcast_s))
    for version in range(total + 1, total + 1 + LOADED_ROUNDS):
        rests += await rests_under_load(publisher, clients, Snapshot.of(version, version, lists))
    await publisher.aclose()
    for client in clients:
        await client.aclose()
    return rounds[WARM_UP:], rests


async def rests_under_load(publisher: Publisher, clients: Sequence[EngineClient], snapshot: Snapshot) -> list[float]:
    """How long each engine rested for `snapshot` while it had requests."""
    rests: list[float] = []
    async with trio.open_nursery() as nursery:
        for client in clients:
            for number in range(LOADED_REQUESTS):
                request = GenerateRequest(rid=f"{snapshot.version}/{number}", input_ids=[5, 6, 7, 8 + number], max_new_tokens=CONTEXT_TOKENS - 8)
                nursery.start_soon(client.generate, request)
        for client in clients:
            await some_running(client)
        rests += (await publisher.publish(snapshot)).pause_s.values()
        for client in clients:
            await client.abort_all()
    return rests


async def some_running(client: EngineClient) -> None:
    """Return when its requests are: not one by one, for the first may have ended by then."""
    with trio.fail_after(DEADLINE_S):
        while not (await client.loads()).running:
            await trio.lowlevel.checkpoint()


@contextmanager
def bare_broadcast(snapshot: Snapshot, receivers: int, times: int) -> Iterator[partial[None]]:
    """Sends the snapshot's buckets in one gloo group, so many times; each call returns when the last one has left."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    name, sizes = f"bare-{port}", ",".join(str(bucket.flat.numel()) for bucket in snapshot.buckets)
    command = [sys.executable, __file__, "--receive"]
    arguments = [[str(rank), str(receivers + 1), str(port), name, f"{times}x{sizes}"] for rank in range(1, receivers + 1)]
    with ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen([*command, *given])) for given in arguments]
        group = join_update_group(
            master_address="127.0.0.1", master_port=port, rank=0, world_size=receivers + 1, group_name=name, timeout_s=DEADLINE_S
        )

        def send() -> None:
            for bucket in snapshot.buckets:
                broadcast(bucket.flat, group)
            broadcast(torch.zeros(1, dtype=torch.uint8), group)

        try:
            yield partial(send)
        finally:
            leave_update_group(group)
            for process in processes:
                process.kill()


def receive(rank: str, world: str, port: str, name: str, told: str) -> None:
    """One process of the bare broadcast."""
    times, _, sizes = told.partition("x")
    buffers = {int(size): torch.zeros(int(size), dtype=torch.uint8) for size in sizes.split(",")}
    group = join_update_group(
        master_address="127.0.0.1", master_port=int(port), rank=int(rank), world_size=int(world), group_name=name, timeout_s=DEADLINE_S
    )
    end = torch.zeros(1, dtype=torch.uint8)
    for _ in range(int(times)):
        for size in sizes.split(","):
            broadcast(buffers[int(size)], group)
        broadcast(end, group)
    time.sleep(DEADLINE_S)  # it is killed


@contextmanager
def engine_process(model_dir: Path) -> Iterator[str]:
    """The URL of a running engine."""
    with subprocess.Popen([sys.executable, __file__, "--engine", str(model_dir)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def serve(model_dir: Path) -> None:
    """An engine; its URL is printed when it answers."""
    import uvicorn

    from agentrl.engine.app import EngineServer

    server = EngineServer(model_dir, slots=SLOTS, context_tokens=CONTEXT_TOKENS)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio does not set TCP_NODELAY
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(server.app, log_level="warning", access_log=False)).run(sockets=[listener])


def in_lists(tensors: list[tuple[str, torch.Tensor]], bucket_bytes: int) -> list[list[tuple[str, torch.Tensor]]]:
    """As a learner gathers them: a list is closed when it has at least so many bytes."""
    lists: list[list[tuple[str, torch.Tensor]]] = [[]]
    for name, tensor in tensors:
        if sum(other.nbytes for _, other in lists[-1]) >= bucket_bytes:
            lists.append([])
        lists[-1].append((name, tensor))
    return lists


def copied_s(tensors: list[torch.Tensor]) -> float:
    """Median time of copying tensors into others that have been written before."""
    others = [tensor.clone() for tensor in tensors]
    times: list[float] = []
    for _ in range(5):
        started = time.perf_counter()
        for tensor, other in zip(tensors, others, strict=True):
            other.copy_(tensor)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def write_model(directory: Path, *, hidden: int, layers: int, intermediate: int) -> Path:
    """A random Qwen2 without a tokenizer."""
    directory.mkdir()
    heads = hidden // 64
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": True,
        "eos_token_id": VOCABULARY - 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    parameters = ModelConfig.load(directory).parameters()
    save_file({name: torch.randn(shape) * 0.02 for name, shape in parameters.items()}, directory / "model.safetensors")
    return directory


if __name__ == "__main__":
    main()
