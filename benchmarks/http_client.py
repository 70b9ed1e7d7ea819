"""Requests a second of the project's HTTP client against a plain `httpx.AsyncClient`, many requests in flight at a time.

    python benchmarks/http_client.py [--concurrency 256] [--seconds 5]

`exchange` is the short way for whole bytes in and out; `post` is httpx's own, over the same transport. All run in one process under trio, one
after the other, against one small HTTP/1.1 server in another process, with bodies of a generation request's size. Printed: requests a second,
CPU per request of the client, latencies, the ratio and the hardware.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import trio

from retriever.transport import TrioClient, trio_client

REQUEST = json.dumps({"rid": "train/12/3/0-1", "input_ids": list(range(300)), "return_logprob": True}).encode()
ANSWER = json.dumps({"output_ids": list(range(30)), "meta_info": {"output_token_logprobs": [[-0.5, token, None] for token in range(30)]}}).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def main() -> None:
    """Measure them all, print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--concurrency", type=int, default=256)
    options.add_argument("--seconds", type=float, default=5.0)
    options.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        trio.run(_serve)
        return
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        rows = [
            ("exchange (retriever.transport)", trio.run(_measure, lambda: _ours(arguments), _exchange, url, arguments)),
            ("post (retriever.transport)", trio.run(_measure, lambda: _ours(arguments), _post, url, arguments)),
            ("plain httpx.AsyncClient", trio.run(_measure, _plain, _post, url, arguments)),
        ]
    finally:
        server.kill()
        server.wait()
    _print(rows, arguments)


Ask = Callable[[Any, str], Awaitable[bytes]]


async def _exchange(client: TrioClient, url: str) -> bytes:
    return (await client.exchange("POST", url, REQUEST)).content


async def _post(client: httpx.AsyncClient, url: str) -> bytes:
    return (await client.post(url, content=REQUEST)).content


def _ours(arguments: argparse.Namespace) -> TrioClient:
    return trio_client(max_connections=arguments.concurrency)


def _plain() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, timeout=None, limits=httpx.Limits(max_connections=None, max_keepalive_connections=None))


async def _measure(make: Callable[[], httpx.AsyncClient], ask: Ask, url: str, arguments: argparse.Namespace) -> dict[str, float]:
    latencies: list[float] = []
    async with make() as client:
        async with trio.open_nursery() as nursery:  # connections are made before the clock starts
            for _ in range(arguments.concurrency):
                nursery.start_soon(client.post, url)
        started, cpu = time.perf_counter(), time.process_time()
        with trio.move_on_after(arguments.seconds):
            async with trio.open_nursery() as nursery:
                for _ in range(arguments.concurrency):
                    nursery.start_soon(_ask_forever, partial(ask, client, url), latencies)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    latencies.sort()
    count = len(latencies)
    return {
        "req/s": count / wall,
        "cpu ms/req": 1e3 * cpu / max(count, 1),
        "p50 ms": 1e3 * latencies[count // 2] if count else float("nan"),
        "p99 ms": 1e3 * latencies[count * 99 // 100] if count else float("nan"),
    }


async def _ask_forever(ask: Callable[[], Awaitable[bytes]], latencies: list[float]) -> None:
    while True:
        started = time.perf_counter()
        assert len(json.loads(await ask())["output_ids"]) == 30
        latencies.append(time.perf_counter() - started)


async def _serve() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1024)
    port = listeners[0].socket.getsockname()[1]
    print(f"http://127.0.0.1:{port}/generate", flush=True)
    await trio.serve_listeners(_answer_forever, listeners)


async def _answer_forever(stream: trio.SocketStream) -> None:
    answer = HEAD % len(ANSWER) + ANSWER
    buffered = b""
    try:
        while chunk := await stream.receive_some(65536):
            buffered += chunk
            head, found, body = buffered.partition(b"\r\n\r\n")
            if found and len(body) >= _content_length(head):
                buffered = b""
                await stream.send_all(answer)
    except trio.BrokenResourceError:
        return  # the client is done


def _content_length(head: bytes) -> int:
    return next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)


def _print(rows: list[tuple[str, dict[str, float]]], arguments: argparse.Namespace) -> None:
    print(f"{arguments.concurrency} requests in flight, {arguments.seconds:g} s each; {os.cpu_count()} x {platform.machine()} ({_cpu()}), ", end="")
    print(f"Python {platform.python_version()}, httpx {httpx.__version__}, load {os.getloadavg()[0]:.1f}")
    names = list(rows[0][1])
    print(f"{'client':32}" + "".join(f"{name:>12}" for name in names))
    for title, values in rows:
        print(f"{title:32}" + "".join(f"{values[name]:12.2f}" for name in names))
    print(f"ratio of req/s, first to last: {rows[0][1]['req/s'] / max(rows[-1][1]['req/s'], 1e-9):.1f}")


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


if __name__ == "__main__":
    main()
