"""The embedded engine's decoding against transformers, against its own bare forward, and over HTTP against in process; and what a second turn costs.

    python benchmarks/engine.py [--repeats 9] [--json FILE]

The model has the quick start's sizes (2 layers, hidden 128, 4 heads) with 2,048 tokens and random weights; prompts of 64 random tokens, 64 new
tokens each, sampled at temperature 1, with log-probs. One thread of torch. All that is compared is measured in turn, again and again; a ratio
is the median of the ratios within each turn:

    engine       the scheduler, in process: prefill, decoding, drawing, log-probs, stops
    generate     transformers' generate on the same prompts as one static batch, which computes no log-probs
    continuous   transformers' continuous batching (sdpa, a cache of just the right size: the fastest of its settings tried), without log-probs
    bare         the engine's own forward alone, decoding as many rows with a cache made before: no drawing, no scheduling
    decode steps the part of `engine` that `bare` does the forward of
    HTTP         64 clients that ask again as soon as they are answered, of an engine in a process of its own; and the same requests in process.
                 Each wants 32 to 96 new tokens, so that requests end and begin one by one, as turns do

In process, tokens are counted per second of CPU, which other work on the machine disturbs least; over HTTP, where clients and engine run beside
each other on two cores, per second of the clock, and per second of the engine process's CPU to tell the cost of HTTP from a busy machine (Linux).
The last lines count tokens, exactly: of a second turn only what is new is computed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
import trio
import uvicorn
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from agentrl.engine.app import EngineServer
from agentrl.engine.architecture import ModelConfig
from agentrl.engine.request import GenerateRequest, SamplingParams
from agentrl.engine.runner import ModelRunner
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sequence import Sequence
from agentrl.engine.weights import Weights

VOCABULARY, CONTEXT_TOKENS = 2048, 256
PROMPT_TOKENS, NEW_TOKENS, OBSERVATION_TOKENS = 64, 64, 40
CLIENTS, REQUESTS_PER_CLIENT = 64, 4
TARGETS: dict[str, float | None] = {
    "engine / generate, 16": 1.0,
    "engine / generate, 64": 1.05,
    "engine / continuous, 64": 3.5,
    "decode steps / bare, 16": 0.8,
    "decode steps / bare, 64": 0.8,
    "HTTP / in process, 64": 0.9,
    "HTTP / in process, 64 by CPU": None,  # the engine's whole process: what HTTP costs where no core is free for it
}

Job = tuple[list[int], int]  # prompt, and how many new tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What one arm did in each repeat, in tokens per second."""

    name: str
    values: list[float]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)


def main() -> None:
    """Measure and print."""
    options = parse()
    torch.set_num_threads(1)
    disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        model_dir = write_model(Path(directory))
        rates = {**in_process(model_dir, 16, options.repeats), **in_process(model_dir, 64, options.repeats), **over_http(model_dir, options.repeats)}
        ratios = compare(rates)
        turns = second_turn(model_dir)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; one thread; Python "
          f"{platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}; {options.repeats} repeats")  # fmt: skip
    for name, rate in rates.items():
        print(f"{name:28}{rate.median:10.0f} tokens/s   from {min(rate.values):.0f} to {max(rate.values):.0f}")
    for name, ratio in ratios.items():
        target = TARGETS[name]
        print(f"{name:28}{ratio:10.2f}" + ("" if target is None else f"   target {target:.2f}   {'reached' if ratio >= target else 'MISSED'}"))
    for name, (computed, found, new) in turns.items():
        print(f"{name:28}{computed:10} tokens computed, {found} found in the cache, {new} could not have been there")
    if options.json is not None:
        measured = {"rates": {name: rate.values for name, rate in rates.items()}, "ratios": ratios, "second turn": turns}
        options.json.write_text(json.dumps(measured, indent=1) + "\n")


def compare(rates: dict[str, Rate]) -> dict[str, float]:
    """Medians of the ratios within each repeat."""
    ratios = {}
    for name in TARGETS:
        arms, number = name.split(", ")
        above, below = (rates[f"{arm}, {number}"] for arm in arms.split(" / "))
        ratios[name] = statistics.median(a / b for a, b in zip(above.values, below.values, strict=True))
    return ratios


def in_process(model_dir: Path, running: int, repeats: int) -> dict[str, Rate]:
    """All arms without HTTP at `running` sequences, interleaved."""
    prompts = random_prompts(running)
    runner = load_runner(model_dir, slots=running)
    causal = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    arms: dict[str, Callable[[], list[float]]] = {
        "engine": lambda: play_engine(runner, prompts),
        "bare": lambda: [play_bare(runner, running)],
        "generate": lambda: [play_generate(causal, prompts)],
    }
    if running == CLIENTS:
        arms["continuous"] = lambda: [play_continuous(causal, prompts)]
    measured: dict[str, list[list[float]]] = {name: [] for name in arms}
    for repeat in range(repeats + 1):  # the first is for warming up
        for name, arm in arms.items():
            causal.set_attn_implementation("sdpa")  # continuous batching sets its own
            values = arm()
            if repeat:
                measured[name].append(values)
    rates = {f"{name}, {running}": [values[0] for values in each] for name, each in measured.items()}
    rates[f"decode steps, {running}"] = [values[1] for values in measured["engine"]]
    return {name: Rate(name=name, values=values) for name, values in rates.items()}


def play_engine(runner: ModelRunner, prompts: list[list[int]]) -> list[float]:
    """Tokens per CPU second of the scheduler, and of its decode steps alone."""
    scheduler = Scheduler(runner, None, version="0")
    started = time.process_time()
    sequences = [request(str(number), prompt) for number, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.step()  # prefill, which draws the first token, and a decode step
    decoding, before = time.process_time(), scheduler.counters.generated_tokens
    while scheduler.busy:
        scheduler.step()
    ended = time.process_time()
    assert all(len(sequence.logprobs) == NEW_TOKENS for sequence in sequences)
    generated = scheduler.counters.generated_tokens
    return [generated / (ended - started), (generated - before) / (ended - decoding)]


def play_bare(runner: ModelRunner, running: int) -> float:
    """Tokens per CPU second of the forward alone, the lengths those of the engine's decode steps."""
    tokens = torch.arange(running) % VOCABULARY
    started = time.process_time()
    for place in range(PROMPT_TOKENS + 1, PROMPT_TOKENS + NEW_TOKENS - 1):
        runner.decode(tokens, torch.full((running,), place), attend=-(-(place + 1) // 16) * 16)
    return running * (NEW_TOKENS - 2) / (time.process_time() - started)


def play_generate(causal: Any, prompts: list[list[int]]) -> float:
    """Tokens per CPU second of transformers' generate."""
    ids = torch.tensor(prompts)
    started = time.process_time()
    out = causal.generate(ids, attention_mask=torch.ones_like(ids), generation_config=sampling())
    elapsed = time.process_time() - started
    assert out.shape == (len(prompts), PROMPT_TOKENS + NEW_TOKENS)
    return len(prompts) * NEW_TOKENS / elapsed


def play_continuous(causal: Any, prompts: list[list[int]]) -> float:
    """Tokens per CPU second of transformers' continuous batching, its cache made anew as its own entry point does."""
    pages = len(prompts) * (PROMPT_TOKENS + NEW_TOKENS) // 32 + 4
    cache = ContinuousBatchingConfig(page_size=32, num_blocks=pages, max_batch_tokens=512, use_async_batching=False, allow_block_sharing=False)
    started = time.process_time()
    out = causal.generate_batch(prompts, generation_config=sampling(), continuous_batching_config=cache, warmup=False)
    elapsed = time.process_time() - started
    assert [len(each.generated_tokens) for each in out.values()] == [NEW_TOKENS] * len(prompts)
    return len(prompts) * NEW_TOKENS / elapsed


def sampling() -> GenerationConfig:
    """Temperature 1, no filters, no end token."""
    return GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0)


def over_http(model_dir: Path, repeats: int) -> dict[str, Rate]:
    """Requests that follow each other, over HTTP and in process, interleaved."""
    runner = load_runner(model_dir, slots=CLIENTS)
    rates: dict[str, list[float]] = {f"{arm}, {CLIENTS}{measure}": [] for measure in ("", " by CPU") for arm in ("HTTP", "in process")}
    with served(model_dir) as (port, pid):
        for repeat in range(repeats + 1):
            jobs = random_jobs(seed=repeat)
            before = cpu_seconds(pid)
            asked = timed(partial(trio.run, ask_all, port, jobs))
            served_cpu, own_cpu = cpu_seconds(pid) - before, time.process_time()
            followed = timed(partial(follow_all, runner, jobs))
            seconds = [asked, followed, served_cpu, time.process_time() - own_cpu]
            if repeat:
                for each, took in zip(rates.values(), seconds, strict=True):
                    each.append(sum(new for _, new in jobs) / took)
    return {name: Rate(name=name, values=values) for name, values in rates.items()}


def follow_all(runner: ModelRunner, jobs: list[Job]) -> None:
    """All jobs through a scheduler, CLIENTS at once."""
    scheduler = Scheduler(runner, None, version="0")
    waiting = [request(str(number), prompt, new=new) for number, (prompt, new) in enumerate(jobs)]
    alive = 0
    while waiting or alive:
        while waiting and alive < CLIENTS:
            scheduler.submit(waiting.pop())
            alive += 1
        scheduler.step()
        alive -= len(scheduler.take_finished())


async def ask_all(port: int, jobs: list[Job]) -> None:
    """All jobs over CLIENTS connections. A bare client: it must not be what is measured."""
    waiting = list(enumerate(jobs))

    async def client() -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            while waiting:
                number, (prompt, new) = waiting.pop()
                params = {"max_new_tokens": new, "temperature": 1.0, "sampling_seed": number}
                reply = await post(stream, {"input_ids": prompt, "sampling_params": params, "return_logprob": True})
                assert len(reply["meta_info"]["output_token_logprobs"]) == new

    async with trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
            nursery.start_soon(client)


async def post(stream: trio.SocketStream, body: dict[str, Any]) -> Any:
    """One HTTP/1.1 exchange."""
    data = json.dumps(body).encode()
    await stream.send_all(b"POST /generate HTTP/1.1\r\nHost: engine\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    received = b""
    while b"\r\n\r\n" not in received:
        received += await stream.receive_some()
    head, _, rest = received.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(rest) < length:
        rest += await stream.receive_some()
    return json.loads(rest)


@contextmanager
def served(model_dir: Path) -> Iterator[tuple[int, int]]:
    """Port and process id of an engine in a process of its own."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(model_dir, there))
    process.start()
    try:
        assert process.pid is not None
        yield here.recv(), process.pid
    finally:
        process.terminate()
        process.join()


def serve(model_dir: Path, ready: Connection) -> None:
    """The engine process: serve, and say on which port."""
    torch.set_num_threads(1)
    server = EngineServer(model_dir, slots=CLIENTS, context_tokens=CONTEXT_TOKENS)
    config = uvicorn.Config(server.app, host="127.0.0.1", port=0, log_level="warning", access_log=False)
    with config.bind_socket() as bound:
        bound.listen(CLIENTS)  # from here on clients can connect, if only to wait
        ready.send(bound.getsockname()[1])
        uvicorn.Server(config).run([bound])


def second_turn(model_dir: Path) -> dict[str, tuple[int, int, int]]:
    """Of the second turns of 64 episodes: tokens computed before the first new one, found in the cache, and new since the first turn.

    The last token of a turn has not been computed when the turn ends, since nothing followed it: it is new as well.

    Raises:
        RuntimeError: the engine computed something that it had.
    """
    counted = {}
    for name, updated in (("second turns", False), ("... after a new version", True)):
        scheduler = Scheduler(load_runner(model_dir, slots=CLIENTS), None, version="0")
        first = finished(scheduler, [request(str(number), prompt) for number, prompt in enumerate(random_prompts(CLIENTS))])
        if updated:
            scheduler.commit({}, "1")
        before = scheduler.counted()
        observations = random_prompts(CLIENTS, tokens=OBSERVATION_TOKENS, seed=1)
        finished(scheduler, [request(str(CLIENTS + n), [*sequence.tokens, *observations[n]]) for n, sequence in enumerate(first)])
        computed, found = (int(scheduler.counted()[key] - before[key]) for key in ("prefill_tokens", "cached_tokens"))
        everything = CLIENTS * (PROMPT_TOKENS + NEW_TOKENS + OBSERVATION_TOKENS)
        new = everything if updated else CLIENTS * (OBSERVATION_TOKENS + 1)
        if (computed, found) != (new, everything - new):
            raise RuntimeError(f"{name}: {computed} tokens were computed and {found} found, where {new} were new")
        counted[name] = computed, found, new
    return counted


def finished(scheduler: Scheduler, sequences: list[Sequence]) -> list[Sequence]:
    """Run sequences to their ends."""
    for sequence in sequences:
        scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
    return sequences


def request(rid: str, prompt: list[int], *, new: int = NEW_TOKENS) -> Sequence:
    """A prompt to complete by `new` tokens."""
    params = SamplingParams(max_new_tokens=new, seed=int(rid))
    return Sequence.of(GenerateRequest(rid=rid, input_ids=prompt, params=params, return_logprob=True), None)


def random_prompts(count: int, *, tokens: int = PROMPT_TOKENS, seed: int = 0) -> list[list[int]]:
    """Random ids."""
    source = random.Random(seed)
    return [[source.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def random_jobs(seed: int) -> list[Job]:
    """What the clients ask for: prompts, and how many new tokens each."""
    source = random.Random(seed)
    prompts = random_prompts(CLIENTS * REQUESTS_PER_CLIENT, seed=seed)
    return [(prompt, source.randint(NEW_TOKENS // 2, NEW_TOKENS * 3 // 2)) for prompt in prompts]


def load_runner(model_dir: Path, *, slots: int) -> ModelRunner:
    """The engine's model."""
    return ModelRunner(Weights.load(model_dir, ModelConfig.load(model_dir)), slots=slots, context_tokens=CONTEXT_TOKENS)


def write_model(directory: Path) -> Path:
    """A Qwen2 of the quick start's sizes with random weights."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 384,
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT_TOKENS,
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = ModelConfig.load(directory).parameters()
    tensors = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used, by Linux's account."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(work: Callable[[], Any]) -> float:
    """Seconds of the clock that `work()` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
