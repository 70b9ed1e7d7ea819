"""A closed-loop load generator for retriever servers: how many queries a second they answer, and how long each request takes.

    report = measure("http://127.0.0.1:8000", texts, Load(clients=64, seconds=10))
    report.qps, report.p50_ms, report.errors

Each client sends a request, waits for its answer and sends the next one at once, as a trainer's episodes do; so the load adapts to the server, and
the latencies are those at full load. Requests are Search-R1's (`queries`) or SkyRL's (`query`), as JSON or msgpack. A request costs this process a
few hundredths of a millisecond (no tasks or timers of its own, httptools reads the answer), so that one core loads any server; give it a core of
its own. Counted is what was answered between the clock's start and stop, whenever it was sent.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import httptools
import psutil

__all__ = ["Form", "Load", "LoadError", "LoadReport", "body_of", "load", "measure", "percentile", "text_stream"]

Form = Literal["search-r1", "skyrl"]

PAUSE_S = 0.05  # after an error, so that a server that refuses everything is not asked in a busy loop
SWEEPS_PER_TIMEOUT = 4  # how exactly `timeout_s` is kept, in place of a timer per request
PATH = "/retrieve"
REASON_CHARACTERS = 300


class LoadError(ValueError):
    """The load cannot be made, or no server answers it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is asked, by how many, for how long.

    Args:
        clients: requests under way at any time.
        per_request: queries in one request. SkyRL's form carries one.
        repeat: how often each text is sent, by neighbouring requests, as a group of episodes asks the same first question.
        unique: add a number to each text, so that a cache can answer repetitions within `repeat` only.
        warmup_s: before the clock starts.
        timeout_s: after which a request is given up and counted as an error.
        options: further keys of every request, e.g. {"mode": "hybrid"}.
    """

    clients: int = 64
    per_request: int = 1
    topk: int = 3
    repeat: int = 1
    unique: bool = False
    seconds: float = 10.0
    warmup_s: float = 2.0
    timeout_s: float = 60.0
    form: Form = "search-r1"
    msgpack: bool = False
    return_scores: bool = True
    seed: int = 0
    token: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = [name for name in ("clients", "per_request", "topk", "repeat") if getattr(self, name) < 1]
        wrong += [name for name in ("seconds", "timeout_s") if not 0 < getattr(self, name) < math.inf] + (["warmup_s"] if self.warmup_s < 0 else [])
        if wrong:
            raise LoadError(f"{', '.join(wrong)} must be positive, got {', '.join(str(getattr(self, name)) for name in wrong)}")
        if self.form == "skyrl" and self.per_request != 1:
            raise LoadError(f"SkyRL's request carries one query, so per_request is 1 and not {self.per_request}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What was measured between the clock's start and stop. Milliseconds are of whole requests, NaN where none was answered."""

    requests: int
    queries: int
    seconds: float
    qps: float  # queries answered a second
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    errors: Mapping[str, int]  # by kind: a status, "timeout", "closed", "cannot connect", "not an answer"
    reasons: Mapping[str, str]  # by kind: what the first of them said, where it said something
    bytes_per_answer: float
    client_cores: float  # CPU seconds a second of this process: near 1 it was the generator that was measured
    server_cores: float | None = None
    server_cpu_ms_per_query: float | None = None


def measure(url: str, texts: Sequence[str], asked: Load, *, pid: int | None = None) -> LoadReport:
    """`load` in an event loop of its own: uvloop's, at half the cost of a request, where it is installed.

    Raises:
        LoadError: as `load`.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(load(url, texts, asked, pid=pid))


async def load(url: str, texts: Sequence[str], asked: Load, *, pid: int | None = None) -> LoadReport:
    """Load the server for `asked.warmup_s + asked.seconds`.

    Args:
        url: of the server; /retrieve is added where the URL has no path.
        texts: queries, sent in an order drawn by `asked.seed`, from the start again when they are used up.
        pid: of the server's process on this machine, for its CPU time.

    Raises:
        LoadError: there are no texts, the URL is none of HTTP, there is no process `pid`, it ended, or nothing listens there.
    """
    run = _Run(url, text_stream(texts, asked), asked)
    process = _process(pid)
    await run.check()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(asked.clients):
                group.create_task(run.client())
            sweeper = group.create_task(run.sweep())
            await asyncio.sleep(asked.warmup_s)
            before = _cpu_s(process), time.process_time()
            run.start()
            await asyncio.sleep(asked.seconds)
            run.stop()
            after = _cpu_s(process), time.process_time()
            sweeper.cancel()
    except ExceptionGroup as errors:
        run.stop()  # connections go on by themselves
        raise errors.exceptions[0] from None
    return _report(run, server_s=after[0] - before[0] if process else None, client_s=after[1] - before[1])


def text_stream(texts: Sequence[str], asked: Load) -> Iterator[str]:
    """The texts of one query after the other, without end.

    Raises:
        LoadError: there is none.
    """
    if not texts:
        raise LoadError("there are no questions to ask")
    order = list(texts)
    random.Random(asked.seed).shuffle(order)
    numbers = count()
    return (sent for _ in count() for text in order for sent in [f"{text} {next(numbers)}" if asked.unique else text] for _ in range(asked.repeat))


def body_of(texts: Sequence[str], asked: Load) -> bytes:
    """The body of a request."""
    said: dict[str, Any] = {"query": texts[0]} if asked.form == "skyrl" else {"queries": list(texts)}
    said |= {"topk": asked.topk, "return_scores": asked.return_scores, **asked.options}
    if asked.msgpack:
        import msgpack

        packed: bytes = msgpack.packb(said)
        return packed
    return json.dumps(said).encode()


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value at `share` of an ascending list, by nearest rank; NaN of an empty one."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


class _Run:
    """One measurement: where to, what is sent, what came."""

    def __init__(self, url: str, texts: Iterator[str], asked: Load) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LoadError(f"expected http://HOST:PORT or https://HOST:PORT, got {url!r}")
        self.url = url
        self.tls = parts.scheme == "https"
        self.host, self.port = parts.hostname, parts.port or (443 if self.tls else 80)
        self.texts, self.asked = texts, asked
        kind = "application/msgpack" if asked.msgpack else "application/json"
        authority = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        lines = [f"POST {parts.path.rstrip('/') or PATH} HTTP/1.1", f"host: {authority}", f"content-type: {kind}", f"accept: {kind}"]
        lines += [f"authorization: Bearer {asked.token}"] if asked.token else []
        self._head = "\r\n".join([*lines, "content-length: "]).encode()
        self.latencies: list[float] = []
        self.errors: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self.bytes = 0
        self.counting = self.stopped = False
        self.started = self.ended = 0.0
        self.connections: set[_Connection] = set()

    async def check(self) -> None:
        """Whether anything listens there at all."""
        try:
            transport, _ = await self._connect(asyncio.Protocol)
        except OSError as error:
            raise LoadError(f"{self.url} cannot be reached: {error}") from error
        transport.close()

    async def client(self) -> None:
        """Send requests over one connection after the other.

        consumes      texts
        produces      latencies and errors
        waits for     the end of its connection, which sends and receives by itself
        unblocked by  `stop`, which closes the connection
        """
        while not self.stopped:
            try:
                _, connection = await self._connect(lambda: _Connection(self))
            except OSError as error:
                self.failed("cannot connect", str(error))
                well = False
            else:
                well = await connection.ended
            if not self.stopped and not well:
                await asyncio.sleep(PAUSE_S)

    async def sweep(self) -> None:
        """Give up requests that are too old.

        consumes      nothing
        produces      errors of the kind timeout
        waits for     a quarter of the timeout, again and again
        unblocked by  cancellation, when the clock has stopped
        """
        while True:
            await asyncio.sleep(self.asked.timeout_s / SWEEPS_PER_TIMEOUT)
            oldest = time.perf_counter() - self.asked.timeout_s
            for connection in list(self.connections):
                if connection.sent_at < oldest:
                    connection.give_up("timeout")

    def start(self) -> None:
        """Count from here."""
        self.counting, self.started = True, time.perf_counter()

    def stop(self) -> None:
        """Count no more; connections end."""
        self.counting, self.stopped, self.ended = False, True, time.perf_counter()
        for connection in list(self.connections):
            connection.give_up("")

    def request(self) -> bytes:
        """The next request, whole."""
        body = body_of([next(self.texts) for _ in range(self.asked.per_request)], self.asked)
        return b"%s%d\r\n\r\n%s" % (self._head, len(body), body)

    def answered(self, sent_at: float, size: int) -> None:
        """A request was answered."""
        if self.counting:
            self.latencies.append(time.perf_counter() - sent_at)
            self.bytes += size

    def failed(self, kind: str, reason: str = "") -> None:
        """A request was not answered, for a reason that may have been told."""
        if self.counting:
            self.errors[kind] += 1
            if reason:
                self.reasons.setdefault(kind, reason)

    async def _connect(self, make: Any) -> tuple[asyncio.BaseTransport, Any]:
        return await asyncio.get_running_loop().create_connection(make, self.host, self.port, ssl=self.tls or None)


class _Connection(asyncio.Protocol):
    """A connection that sends a request whenever the last one was answered. Called by the loop and by httptools."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._parser = httptools.HttpResponseParser(self)
        self._size = 0
        self._looked_at = True  # the first answer of a connection is, and what is no answer
        self._parts: list[bytes] = []
        self.sent_at = math.inf
        self._well = False  # it was closed after an answer, as a server that keeps none open asks
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # whether so

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it
        self._run.connections.add(self)
        self._send()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.give_up("not an answer")

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._run.connections:
            self._run.connections.discard(self)
            self._run.failed("closed")
        if not self.ended.done():
            self.ended.set_result(self._well)

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._looked_at or self._parser.get_status_code() != HTTPStatus.OK:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        status, body = self._parser.get_status_code(), b"".join(self._parts)
        if status != HTTPStatus.OK:
            self.give_up(str(status), _reason(body))
        elif self._looked_at and not _is_answer(body, self._run.asked):
            self.give_up("not an answer", _reason(body))
        else:
            self._looked_at = False
            self._parts.clear()
            self._run.answered(self.sent_at, self._size)
            if self._parser.should_keep_alive():
                self._send()
            else:
                self._well = True
                self.give_up("")

    def give_up(self, kind: str, reason: str = "") -> None:
        """Close; what is under way is an error of this kind, or none."""
        self._run.connections.discard(self)
        if kind:
            self._run.failed(kind, reason)
        self._transport.abort()

    def _send(self) -> None:
        if self._run.stopped:
            self.give_up("")
            return
        self._size = 0
        self.sent_at = time.perf_counter()
        self._transport.write(self._run.request())


def _is_answer(body: bytes, asked: Load) -> bool:
    """Whether it is what the API answers: as many lists of hits as queries."""
    try:
        if asked.msgpack:
            import msgpack

            value = msgpack.unpackb(body)
        else:
            value = json.loads(body)
    except (ValueError, RecursionError):
        return False
    result = value.get("result") if isinstance(value, dict) else None
    return isinstance(result, list) and len(result) == asked.per_request and all(isinstance(hits, list) for hits in result)


def _reason(body: bytes) -> str:
    """What a server says of a request that it did not answer: its `detail`, or else the beginning of the body."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    told = value.get("detail") if isinstance(value, dict) else None
    text = body.decode(errors="replace") if told is None else told if isinstance(told, str) else json.dumps(told)
    return "".join(letter if letter.isprintable() else " " for letter in text[:REASON_CHARACTERS]).strip()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _process(pid: int | None) -> psutil.Process | None:
    try:
        return None if pid is None else psutil.Process(pid)
    except psutil.Error as error:
        raise LoadError(f"there is no process {pid} on this machine whose CPU time can be read: {error}") from error


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    try:
        times = process.cpu_times()
    except psutil.Error as error:
        raise LoadError(f"the server's process {process.pid} ended: {error}") from error
    return float(times.user + times.system)


def _report(run: _Run, *, server_s: float | None, client_s: float) -> LoadReport:
    seconds = run.ended - run.started
    ordered = sorted(run.latencies)
    requests, queries = len(ordered), len(ordered) * run.asked.per_request
    return LoadReport(
        requests=requests,
        queries=queries,
        seconds=seconds,
        qps=queries / seconds,
        p50_ms=1e3 * percentile(ordered, 0.5),
        p90_ms=1e3 * percentile(ordered, 0.9),
        p99_ms=1e3 * percentile(ordered, 0.99),
        max_ms=1e3 * percentile(ordered, 1.0),
        errors=dict(run.errors),
        reasons=dict(run.reasons),
        bytes_per_answer=run.bytes / requests if requests else math.nan,
        client_cores=client_s / seconds,
        server_cores=None if server_s is None else server_s / seconds,
        server_cpu_ms_per_query=None if server_s is None or not queries else 1e3 * server_s / queries,
    )
