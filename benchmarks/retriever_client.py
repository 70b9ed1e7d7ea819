"""The retriever's client under many callers: a request per query, and queries of concurrent callers in one request (`coalesce`).

    python benchmarks/retriever_client.py [--callers 64 256] [--coalesce 0 1 2 4] [--repeat 1 8] [--encoder hashed] [--seconds 3]

One process with one client, whose callers ask one query each and the next when it is answered, as episodes do; our server in another process,
each on a core of its own. By default the server's encoder is the hashed one, which costs next to nothing, so that what is measured is what a
query costs beside encoding and search. With `--repeat 8` each query is asked eight times in a row, as a group's episodes ask the first one. With
`--think` a caller waits that long, on average, between queries, so that the server is not full. Printed: queries a second, latencies, CPU per query
of both sides.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import trio
from passages import write_passages
from retriever_processes import Server, server

from retriever.client import RetrieverClient

WARM_UP_S = 1.0
TOPK = 3
CLIENT_CORE, SERVER_CORE = 0, 1


def main() -> None:
    """Measure every combination, print a line for each."""
    arguments = _arguments()
    os.sched_setaffinity(0, {CLIENT_CORE})
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "passages.jsonl"
        write_passages(corpus, arguments.passages)
        words, numbers = corpus.read_text(encoding="utf-8").split(), count()
        command = [sys.executable, "-m", "retriever", "serve", str(corpus), "--encoder", arguments.encoder, "--cache", folder]
        with server(command, SERVER_CORE) as serving:
            print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {arguments.passages} passages, encoder {arguments.encoder}, top {TOPK}")
            print(f"{'callers':>8}{'repeat':>8}{'coalesce':>10}{'queries/s':>11}{'p50 ms':>9}{'p99 ms':>9}{'client CPU ms':>15}{'server CPU ms':>15}")
            for callers in arguments.callers:
                for repeat in arguments.repeat:
                    for coalesce in arguments.coalesce:
                        told = trio.run(_measure, serving, _queries(words, repeat, numbers), callers, coalesce, arguments)
                        print(f"{callers:8}{repeat:8}{coalesce:10}" + told, flush=True)


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--callers", type=int, nargs="+", default=[64, 256])
    options.add_argument("--coalesce", type=int, nargs="+", default=[0, 1, 2, 4], help="requests in flight at once; 0 is one per query")
    options.add_argument("--repeat", type=int, nargs="+", default=[1, 8])
    options.add_argument("--encoder", default="hashed")
    options.add_argument("--passages", type=int, default=5000)
    options.add_argument("--think", type=float, default=0.0, metavar="SECONDS")
    options.add_argument("--seconds", type=float, default=3.0)
    return options.parse_args()


def _queries(words: list[str], repeat: int, numbers: Iterator[int]) -> Iterator[str]:
    """Twelve words each, as questions have; a number makes every one new to the server's cache."""
    for number in numbers:
        place = number * 7919 % (len(words) - 12)
        query = " ".join([*words[place : place + 12], str(number)])
        for _ in range(repeat):
            yield query


async def _measure(serving: Server, queries: Iterator[str], callers: int, coalesce: int, arguments: argparse.Namespace) -> str:
    latencies: list[float] = []
    async with RetrieverClient(serving.url, max_connections=callers, coalesce=coalesce) as client:

        async def call() -> None:
            while True:
                started = time.perf_counter()
                [passages] = await client.retrieve([next(queries)], topk=TOPK)
                assert len(passages) == TOPK
                latencies.append(time.perf_counter() - started)
                if arguments.think:
                    await trio.sleep(random.uniform(0.0, 2 * arguments.think))

        async def load(seconds: float) -> None:
            with trio.move_on_after(seconds):
                async with trio.open_nursery() as nursery:
                    for _ in range(callers):
                        nursery.start_soon(call)

        await load(WARM_UP_S)
        latencies.clear()
        wall, own, others = time.perf_counter(), time.process_time(), sum(serving.thread_seconds().values())
        await load(arguments.seconds)
        wall, own, others = time.perf_counter() - wall, time.process_time() - own, sum(serving.thread_seconds().values()) - others
    latencies.sort()
    done = len(latencies)
    figures = (1e3 * latencies[done // 2], 1e3 * latencies[done * 99 // 100])
    return f"{done / wall:11.0f}{figures[0]:9.1f}{figures[1]:9.1f}{1e3 * own / done:15.3f}{1e3 * others / done:15.3f}"


if __name__ == "__main__":
    main()
