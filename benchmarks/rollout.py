"""What one rollout worker and one replay buffer can do, everything else made so fast that it is not what is measured.

    python benchmarks/rollout.py [--only worker|buffer] [--seconds 8]

**A worker** plays two-turn episodes of the search environment (search, then answer) against engines of fixed latency: real HTTP servers with
SGLang's `/generate` and log-probs, in two processes of their own, and a retriever over HTTP that answers after 5 ms, each time with other
passages. Tickets come from a real buffer process and go back to it. The worker has one core to itself (sched_setaffinity), everything else the
other cores. An episode without any overhead takes two turns and one search, so

    ideal episodes/s = slots / (2 x turn + 5 ms)        slot efficiency = time that the servers held requests / (slots x wall time)

counted from the third episode on: the rest of a slot's time is the worker's, the buffer's and the machine's. What the machine takes is measured
just before, on the same core with the same servers: a bare client, which sends as many bytes and parses nothing. Where the ideal is beyond what
a core can do, the episodes/s reached are the worker's ceiling. Sizes are those of Search-R1's questions: about 190 tokens of prompt, 70 per
completion and 400 of passages, by a byte-level BPE of 6,000 tokens. No two searches find the same passages: the worst case, in which the
tokenizer has never seen them.

**The buffer** is one process over HTTP with a journal, acknowledging what is in the file (`wal`), before 1,000 simulated workers: each has its
own index and its own connection, and asks for 8 tickets, plays them for a while, and closes them with 8 trajectories of the same sizes. A decision is
a ticket granted or closed. First all of them go as fast as they can, then with episodes as long as gives half that rate. There is no learner: groups
stay in the buffer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import itertools
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import psutil
import trio
from fixed_latency import CONTEXT, Server, Words, ask, connected, serve_buffer, serve_engine, serve_retriever, started

from agentrl.buffer_api import BufferClient
from agentrl.config.recipe import RolloutRecipe
from agentrl.engine_api import EngineClient
from agentrl.env import StepResult
from agentrl.rollout.tokens import TokenEncoder
from agentrl.rollout.worker import RolloutWorker
from agentrl.types import Purpose, Reward, StopReason, Ticket, ToolCall, Trajectory, Turn
from agentrl.wire import encode_trajectory, pack, unpack
from envs.search import SearchEnv
from retriever.transport import trio_client

ENGINES = 2
TURNS_S = (0.05, 0.5)
SLOTS = (32, 64, 256)
SEARCH_S = 0.005
SETTLE_S = 1.0  # connections are opened, caches filled
REQUEST_BYTES = 2000
WORKERS, GENERATORS, WANT = 1000, 3, 8
GENERATORS_START_S = 4.0


def main() -> None:
    """Measure, print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", choices=("worker", "buffer"))
    options.add_argument("--seconds", type=float, default=8.0, help="of each row")
    options.add_argument("--turns", type=float, nargs="*", default=TURNS_S, help="latencies in seconds")
    options.add_argument("--slots", type=int, nargs="*", default=SLOTS)
    arguments = options.parse_args()
    own, others = _split(os.sched_getaffinity(0))
    if arguments.only != "buffer":
        measure_worker(arguments.turns, arguments.slots, arguments.seconds, own, others)
    if arguments.only != "worker":
        measure_buffer(arguments.seconds, own, others)
    print(f"{os.cpu_count()} x {platform.machine()}, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")


# -- one worker -------------------------------------------------------------------------------------------------------------------


def measure_worker(turns_s: Sequence[float], slots: Sequence[int], seconds: float, own: set[int], others: set[int]) -> None:
    """A row per turn latency and number of slots."""
    words = Words.make()
    encoder = words.encoder()
    print("turn ms | slots | ideal episodes/s | reached | slot efficiency | of a bare client | CPU ms per episode: worker | buffer | busiest other")
    for turn_s in turns_s:
        for count in slots:
            with ExitStack() as stack:
                engines = [started(stack, others, serve_engine, words.replies(encoder, seed), turn_s) for seed in range(ENGINES)]
                retriever = started(stack, others, serve_retriever, words.passages(), SEARCH_S)
                buffer = started(stack, others, serve_buffer, words.tasks(), stack.enter_context(tempfile.TemporaryDirectory()))
                os.sched_setaffinity(0, own)
                settle_s = SETTLE_S + 4 * turn_s
                bare = asyncio.run(_bare(engines, retriever, count, settle_s, seconds / 2))
                row = trio.run(_play, engines, retriever, buffer, encoder, count, settle_s, seconds)
            ideal, efficiency = count / (2 * turn_s + SEARCH_S), row.held_s / (count * row.wall_s)
            others_ms, busiest = row.others_s[buffer.pid] / row.episodes, max(row.others_s.values()) / row.wall_s
            print(
                f"{1e3 * turn_s:7.0f} | {count:5d} | {ideal:16.0f} | {row.rate:7.0f} | {efficiency:15.3f} | {bare:16.3f} |"
                f" {1e3 * row.cpu_s / row.episodes:26.2f} | {1e3 * others_ms:6.2f} | {busiest:6.0%}",
                flush=True,
            )


@dataclass(kw_only=True, slots=True)
class Counted:
    """What happened between two moments."""

    episodes: int
    wall_s: float
    cpu_s: float  # of this process
    others_s: dict[int, float]  # CPU of the other processes, by pid
    held_s: float  # that engines and retriever held requests

    @property
    def rate(self) -> float:
        """Episodes per second."""
        return self.episodes / self.wall_s

    def __sub__(self, before: Counted) -> Counted:
        others_s = {pid: seconds - before.others_s[pid] for pid, seconds in self.others_s.items()}
        return Counted(
            episodes=self.episodes - before.episodes,
            wall_s=self.wall_s - before.wall_s,
            cpu_s=self.cpu_s - before.cpu_s,
            others_s=others_s,
            held_s=self.held_s - before.held_s,
        )


async def _bare(engines: Sequence[Server], retriever: Server, slots: int, settle_s: float, seconds: float) -> float:
    """The slot efficiency of nothing but requests and answers."""
    held_s, moments = [], []
    async with asyncio.TaskGroup() as tasks:
        playing = [tasks.create_task(_ask_in_turn(engines[slot % len(engines)], retriever, engines[slot % len(engines)])) for slot in range(slots)]
        for pause_s in (settle_s, seconds):
            await asyncio.sleep(pause_s)
            moments.append(time.perf_counter())
            held_s.append(sum([float(await ask(await connected(server), b"/", b"")) for server in (*engines, retriever)]))
        for task in playing:
            task.cancel()
    return (held_s[1] - held_s[0]) / (slots * (moments[1] - moments[0]))


async def _ask_in_turn(*servers: Server) -> None:
    streams = [await connected(server) for server in servers]
    while True:
        for stream in streams:
            await ask(stream, b"/", b'{"rid":"train/0/0/0/0/0"}'.ljust(REQUEST_BYTES))


async def _play(
    engines: list[Server], retriever: Server, buffer: Server, encoder: TokenEncoder, slots: int, settle_s: float, seconds: float
) -> Counted:
    ended = Ended()
    count = partial(_count, ended, [*engines, retriever], buffer)
    async with BufferClient(buffer.url, role="worker", index=0, incarnation=0) as client, trio.open_nursery() as nursery:
        worker = RolloutWorker(
            client=client,
            engines=[EngineClient(engine.url, index) for index, engine in enumerate(engines)],
            environment=partial(CountedSearch, ended, retriever_url=retriever.url),
            encoder=encoder,
            recipe=RolloutRecipe(concurrency=slots),
        )
        nursery.start_soon(worker.run)
        await trio.sleep(settle_s)
        gc.collect()
        before = await count()
        await trio.sleep(seconds)
        counted = await count() - before
        nursery.cancel_scope.cancel()
    assert not ended.otherwise, f"{ended.otherwise} episodes ended without an answer"
    return counted


async def _count(ended: Ended, holding: Sequence[Server], buffer: Server) -> Counted:
    async with trio_client() as http:
        held_s = sum([float((await http.exchange("GET", server.url)).content) for server in holding])
    others_s = {server.pid: _cpu_s(server) for server in (*holding, buffer)}
    return Counted(episodes=ended.answered, wall_s=time.perf_counter(), cpu_s=time.process_time(), others_s=others_s, held_s=held_s)


def _cpu_s(server: Server) -> float:
    user_s, system_s, *_ = psutil.Process(server.pid).cpu_times()
    return user_s + system_s


@dataclass(slots=True)
class Ended:
    """Episodes that ended."""

    answered: int = 0
    otherwise: int = 0


class CountedSearch(SearchEnv):
    """The search environment, counting the episodes that ended."""

    def __init__(self, ended: Ended, **options: Any) -> None:
        super().__init__(**options)
        self._ended = ended

    async def step(self, completion: str) -> StepResult:
        result = await super().step(completion)
        if result.stop is not None:
            self._ended.answered += result.stop is StopReason.ANSWERED
            self._ended.otherwise += result.stop is not StopReason.ANSWERED
        return result


# -- one buffer -------------------------------------------------------------------------------------------------------------------


def measure_buffer(seconds: float, own: set[int], others: set[int]) -> None:
    """A row at full speed, and one at half of it."""
    os.sched_setaffinity(0, own | others)
    print("simulated workers | episode s | decisions/s | calls/s | call p50 ms | p99 ms | buffer CPU ms per decision | buffer, % of a core")
    play_s = 0.0
    for _ in range(2):
        with ExitStack() as stack:
            buffer = started(stack, own, serve_buffer, Words.make().tasks(), stack.enter_context(tempfile.TemporaryDirectory()))
            calls, cpu_s = _load(buffer, others, play_s, seconds)
        rate = WANT * len(calls) / seconds
        percentiles = statistics.quantiles(calls, n=100)
        print(
            f"{WORKERS:17d} | {play_s:9.1f} | {rate:11.0f} | {rate / WANT:7.0f} | {1e3 * percentiles[49]:11.0f} | {1e3 * percentiles[98]:6.0f} |"
            f" {1e3 * cpu_s / (WANT * len(calls)):26.3f} | {cpu_s / seconds:6.0%}",
            flush=True,
        )
        play_s = 4 * WORKERS * WANT / rate  # two decisions a ticket at half the rate


def _load(buffer: Server, cores: set[int], play_s: float, seconds: float) -> tuple[list[float], float]:
    """Latencies of the calls that end within `seconds`, made by processes on these cores, and the buffer's CPU in that time."""
    with CONTEXT.Pool(GENERATORS, os.sched_setaffinity, (0, cores)) as pool:
        begins = time.perf_counter() + GENERATORS_START_S + SETTLE_S + play_s  # one clock for all processes
        parts = [range(first, WORKERS, GENERATORS) for first in range(GENERATORS)]
        found = pool.starmap_async(be_workers, [(buffer, part, play_s, begins, begins + seconds) for part in parts])
        time.sleep(begins - time.perf_counter())
        before_s = _cpu_s(buffer)
        time.sleep(begins + seconds - time.perf_counter())
        cpu_s = _cpu_s(buffer) - before_s
        return [latency for latencies in found.get() for latency in latencies], cpu_s


def be_workers(buffer: Server, workers: Sequence[int], play_s: float, begins: float, ends: float) -> list[float]:
    """Be these workers until `ends`; the latencies of the calls that were answered after `begins`."""
    return asyncio.run(_be_workers(buffer, workers, play_s, begins, ends))


async def _be_workers(buffer: Server, workers: Sequence[int], play_s: float, begins: float, ends: float) -> list[float]:
    latencies: list[float] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(ends - time.perf_counter()), asyncio.TaskGroup() as tasks:
            for index in workers:
                tasks.create_task(Simulated(buffer, index, begins, latencies).run(play_s))
    return latencies


class Simulated:
    """A worker that plays nothing: a connection, an index, and the calls of `RolloutWorker`."""

    def __init__(self, buffer: Server, index: int, begins: float, latencies: list[float]) -> None:
        self._buffer = buffer
        self._caller = {"role": "worker", "index": index, "incarnation": 0, "wait_s": 10.0}
        self._begins, self._latencies = begins, latencies
        self._rng = random.Random(index)

    async def run(self, play_s: float) -> None:
        """Take tickets, let time pass, close them; again."""
        self._streams = await connected(self._buffer)
        await asyncio.sleep(play_s * self._rng.random())
        for request in itertools.count():
            granted = await self._call("take_tickets", {"request": request, "want": WANT})
            await asyncio.sleep(play_s * self._rng.uniform(0.5, 1.5))
            outcomes = [[ticket, _trajectory(ticket), "trajectory", ""] for ticket, *_ in granted["grants"]]
            accepted = await self._call("close_tickets", {"outcomes": outcomes})
            assert accepted == [True] * WANT

    async def _call(self, name: str, body: dict[str, Any]) -> Any:
        content = pack(self._caller | body)
        asked = time.perf_counter()
        answer = await ask(self._streams, b"/" + name.encode(), content)
        answered = time.perf_counter()
        if answered >= self._begins:
            self._latencies.append(answered - asked)
        return unpack(answer)


@cache
def _plain_trajectory() -> dict[str, Any]:
    """The map of a trajectory like those of the worker's episodes."""
    prompt, completion, observation = 190, 70, 400
    starts = (prompt, prompt + completion + observation)
    length = starts[1] + completion
    mask = np.zeros(length, dtype=np.uint8)
    for start in starts:
        mask[start : start + completion] = 1
    trajectory = Trajectory(
        ticket=Ticket(purpose=Purpose.TRAIN, ordinal=0, k=0, attempt=0),
        task_id="17",
        source="default",
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -0.7, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turns=tuple(_turn(start, completion, observation) for start in starts),
        reward=Reward(total=1.0, parts={"exact_match": 1.0}, tokens=(length - 1,), amounts=(1.0,)),
        stop=StopReason.ANSWERED,
        dispatched_s=1.7e9,
        finished_s=1.7e9,
        worker=0,
        incarnation=0,
    )
    return {name: value for name, value in unpack(encode_trajectory(trajectory)).items() if name != "hash"}


def _turn(start: int, completion: int, observation: int) -> Turn:
    end = start + completion
    return Turn(
        completion=(start, end),
        observation=(end, end + observation),
        action="search",
        argument="the words that are searched for",
        stop="</search>",
        engine="http://127.0.0.1:30000",
        started_s=1.7e9,
        generated_s=1.7e9,
        ended_s=1.7e9,
        tool_calls=(ToolCall(tool="search", arguments_hash="0" * 32, result_ids=("17", "170", "250"), latency_s=0.005),),
    )


def _trajectory(ticket: list[Any]) -> bytes:
    """A whole trajectory for a ticket, made at a fraction of what it costs to take it in."""
    body = _plain_trajectory() | {"ticket": ticket}
    return pack(body | {"hash": hashlib.blake2b(pack(body), digest_size=16).digest()})


def _split(cores: set[int]) -> tuple[set[int], set[int]]:
    """One core, and the others; the same one where there is only one."""
    own = {max(cores)}
    return own, (cores - own) or own


if __name__ == "__main__":
    main()
