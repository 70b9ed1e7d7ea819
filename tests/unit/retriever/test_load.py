import asyncio
import json
import math
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice

import httptools
import msgpack
import pytest

from retriever.load import Load, LoadError, LoadReport, body_of, load, percentile, text_stream

SHORT = {"seconds": 0.08, "warmup_s": 0.02}
OK = b"HTTP/1.1 200 OK\r\n"


class Answers(asyncio.Protocol):
    """A server's end: `answer` makes the bytes for a request's body, or None for none."""

    def __init__(self, answer: Callable[[bytes], bytes | None], heads: list[str]) -> None:
        self._answer, self._heads = answer, heads
        self._body, self._head = b"", ""
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._head, self._body = url.decode(), b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += f" {name.decode()}={value.decode()}"

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._heads.append(self._head)
        answer = self._answer(self._body)
        if answer == b"":
            self._transport.abort()
        elif answer is not None:
            self._transport.write(answer)


LOOPS = {"asyncio": None}
with suppress(ImportError):
    import uvloop

    LOOPS["uvloop"] = uvloop.new_event_loop


def asked_of(answer: Callable[[bytes], bytes | None], asked: Load, *, path: str = "", loop: str = "asyncio") -> tuple[LoadReport, list[str]]:
    heads: list[str] = []

    async def main() -> LoadReport:
        server = await asyncio.get_running_loop().create_server(lambda: Answers(answer, heads), "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            return await load(f"http://{host}:{port}{path}", ["first", "second"], asked, pid=os.getpid())

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(main()), heads


def with_length(body: bytes, status: bytes = OK) -> bytes:
    return b"%scontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def chunked(body: bytes) -> bytes:
    return OK + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def hits(body: bytes) -> bytes:
    return json.dumps({"result": [[{"document": {"id": "1"}, "score": 1.0}] for _ in json.loads(body)["queries"]]}).encode()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("framed", [with_length, chunked])
def test_requests_follow_one_another_and_are_counted(framed: Callable[[bytes], bytes], loop: str):
    report, heads = asked_of(lambda body: framed(hits(body)), Load(clients=3, per_request=2, **SHORT), loop=loop)
    assert report.errors == {}
    assert report.queries == 2 * report.requests > 20
    assert report.qps == pytest.approx(report.queries / report.seconds)
    assert 0 < report.p50_ms <= report.p90_ms <= report.p99_ms <= report.max_ms < 1e3 * report.seconds
    assert report.bytes_per_answer == len(hits(json.dumps({"queries": ["", ""]}).encode()))
    assert report.server_cpu_ms_per_query is not None  # this process is the server, too
    assert heads[0].startswith("/retrieve host=127.0.0.1:")
    assert len(heads) >= report.requests


def test_a_path_of_the_url_and_a_token_are_sent():
    _, heads = asked_of(lambda body: with_length(hits(body)), Load(clients=1, token="secret", **SHORT), path="/v2/search")
    assert heads[0].startswith("/v2/search ")
    assert "authorization=Bearer secret" in heads[0]


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        (lambda body: with_length(b'{"detail": "too much\\nwaits"}', b"HTTP/1.1 503 Busy\r\n"), "503", "too much waits"),
        (lambda body: b"", "closed", ""),
        (lambda body: b"nonsense\r\n\r\n", "not an answer", ""),
        (lambda body: with_length(b"not JSON"), "not an answer", "not JSON"),
        (lambda body: with_length(b'{"result": [[], []]}'), "not an answer", '{"result": [[], []]}'),  # two lists for one query
        (lambda body: None, "timeout", ""),
    ],
)
def test_errors_are_counted_by_kind_and_are_no_answers(answer: Callable[[bytes], bytes | None], kind: str, reason: str):
    report, _ = asked_of(answer, Load(clients=2, timeout_s=0.03, **SHORT))
    assert set(report.errors) == {kind}
    assert report.errors[kind] > 0
    assert report.reasons.get(kind, "") == reason
    assert (report.requests, report.qps) == (0, 0)
    assert math.isnan(report.p50_ms)


def test_a_connection_that_the_server_closes_after_an_answer_is_followed_by_another_at_once():
    report, _ = asked_of(lambda body: with_length(hits(body), OK + b"connection: close\r\n"), Load(clients=1, **SHORT))
    assert report.errors == {}
    assert report.requests > 5, "with a pause as after an error there would be 2"


def test_a_server_whose_process_ends_while_it_is_measured_is_told():
    async def main() -> None:
        process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
        server = await asyncio.get_running_loop().create_server(lambda: Answers(lambda body: with_length(hits(body)), []), "127.0.0.1", 0)
        async with server, asyncio.timeout(10.0):
            host, port = server.sockets[0].getsockname()
            loading = asyncio.ensure_future(load(f"http://{host}:{port}", ["q"], Load(clients=1, **SHORT), pid=process.pid))
            await asyncio.sleep(0)  # it has seen the process
            await process.communicate(b"")
            await loading

    with pytest.raises(LoadError, match=r"the server's process \d+ ended"):
        asyncio.run(main())


def test_a_server_that_is_not_there_is_told_at_once():
    async def main() -> int:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
        async with server:
            return server.sockets[0].getsockname()[1]

    port = asyncio.run(main())
    with pytest.raises(LoadError, match=f"http://127.0.0.1:{port} cannot be reached"):
        asyncio.run(load(f"http://127.0.0.1:{port}", ["q"], Load()))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: load("ftp://host", ["q"], Load()), "expected http://HOST:PORT"),
        (lambda: load("http://127.0.0.1:1", [], Load()), "no questions to ask"),
        (lambda: load("http://127.0.0.1:1", ["q"], Load(), pid=2**30), "no process 1073741824"),
    ],
)
def test_a_load_that_cannot_be_made_is_refused(call: Callable[[], Awaitable[LoadReport]], complaint: str):
    async def main() -> None:
        await call()

    with pytest.raises(LoadError, match=complaint):
        asyncio.run(main())


def test_settings_that_make_no_load_are_refused():
    with pytest.raises(LoadError, match="clients, seconds must be positive, got 0, -1"):
        Load(clients=0, seconds=-1)
    with pytest.raises(LoadError, match="carries one query"):
        Load(form="skyrl", per_request=4)


def test_texts_repeat_as_asked_and_unique_ones_never():
    assert list(islice(text_stream(["a"], Load(repeat=2)), 3)) == ["a", "a", "a"]
    texts = list(islice(text_stream(["a", "b", "c"], Load(repeat=2, unique=True)), 10))
    assert texts[::2] == texts[1::2]  # each twice in a row
    assert len(set(texts)) == 5
    assert sorted(text.split()[0] for text in texts[:6:2]) == ["a", "b", "c"]
    assert list(islice(text_stream(["a", "b", "c"], Load(seed=1)), 3)) == list(islice(text_stream(["a", "b", "c"], Load(seed=1)), 3))


def test_bodies_have_search_r1s_and_skyrls_shape():
    assert json.loads(body_of(["a", "b"], Load(per_request=2, topk=5))) == {"queries": ["a", "b"], "topk": 5, "return_scores": True}
    assert json.loads(body_of(["a"], Load(form="skyrl", options={"mode": "bm25"}))) == {
        "query": "a",
        "topk": 3,
        "return_scores": True,
        "mode": "bm25",
    }
    assert msgpack.unpackb(body_of(["a"], Load(msgpack=True))) == {"queries": ["a"], "topk": 3, "return_scores": True}


def test_percentiles_are_by_nearest_rank():
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert math.isnan(percentile([], 0.5))
