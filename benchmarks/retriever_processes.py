"""The processes that benchmarks/retriever.py measures: servers, and the components of one without a server around them.

python benchmarks/retriever_processes.py INDEX_DIR fp32|bf16     answers {"texts", "batch", "seconds"} lines on standard input
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import IO, Any

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
TOPK = 3
ENDS_WITHIN_S = 20
NANOSECONDS = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A server that answers."""

    url: str
    pid: int

    def counters(self) -> dict[str, float]:
        """What its /metrics say, by name and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def thread_seconds(self) -> dict[str, float]:
        """CPU time of each of its threads."""
        tasks = Path(f"/proc/{self.pid}/task")
        return {task.name: float((task / "schedstat").read_text().split()[0]) * NANOSECONDS for task in tasks.iterdir()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """A process that encodes and searches when it is told to."""

    asks: IO[str]
    answers: IO[str]

    def measure(self, texts: Sequence[str], *, batch: int, seconds: float) -> dict[str, float]:
        """Medians of calls: {"encode_ms", "search_ms", "call_ms", "qps"}."""
        self.asks.write(json.dumps({"texts": list(texts), "batch": batch, "seconds": seconds}) + "\n")
        self.asks.flush()
        told: dict[str, float] = json.loads(self.answers.readline())
        return told


@contextmanager
def server(command: Sequence[str], core: int) -> Iterator[Server]:
    """A server on one core, from its line `ready URL` to its end."""
    with _process(command, core) as process:
        assert process.stdout is not None
        said, _, url = process.stdout.readline().strip().partition(" ")
        if said != "ready":
            sys.exit(f"{' '.join(command)} did not start: see above")
        yield Server(url=url, pid=process.pid)


@contextmanager
def components(index: Path, precision: str, core: int) -> Iterator[Components]:
    """An index's encoder and search on one core."""
    with _process([sys.executable, __file__, str(index), precision], core, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            sys.exit("the components did not start: see above")
        yield Components(asks=process.stdin, answers=process.stdout)


@contextmanager
def _process(command: Sequence[str], core: int, **options: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, **ENVIRONMENT}
    pinned = ["taskset", "-c", str(core), *command]
    process = subprocess.Popen(pinned, stdout=subprocess.PIPE, text=True, env=environment, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Answer lines until standard input ends."""
    from retriever.encoders.settings import Runtime
    from retriever.index import Index, Serving

    index = Index.open(Path(sys.argv[1]), Serving(runtime=Runtime(precision=sys.argv[2])))  # type: ignore[arg-type]
    print("ready", flush=True)
    numbers = count()
    for line in sys.stdin:
        asked = json.loads(line)
        batches = [asked["texts"][start : start + asked["batch"]] for start in range(0, len(asked["texts"]), asked["batch"])]
        encode_s, search_s = [], []
        ends = time.perf_counter() + asked["seconds"]
        while time.perf_counter() < ends:
            number = next(numbers)
            batch = [f"{text} {number}" for text in batches[number % len(batches)]]
            if len(batch) < asked["batch"]:
                continue
            started = time.perf_counter()
            vectors = index.encoder.encode_queries(batch)
            encoded = time.perf_counter()
            index.dense.search(vectors, TOPK)
            encode_s.append(encoded - started)
            search_s.append(time.perf_counter() - encoded)
        call_s = [first + second for first, second in zip(encode_s, search_s, strict=True)]
        told = {"encode_ms": 1e3 * median(encode_s), "search_ms": 1e3 * median(search_s), "call_ms": 1e3 * median(call_s)}
        print(json.dumps({**told, "qps": asked["batch"] * len(call_s) / sum(call_s)}), flush=True)


if __name__ == "__main__":
    main()
