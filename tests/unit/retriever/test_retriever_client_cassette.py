"""Answers recorded to a file, and replayed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from retriever.cassette import Recorded
from retriever.client import Cassette, CassetteError, Passage, RetrieverClient, RetrieverError


class Server(httpx.AsyncBaseTransport):
    """Answers each query with itself, times topk."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.asked += body["queries"]
        hits = [
            [{"document": {"id": str(rank), "contents": f'"{query}"\nä'}, "score": 0.5} for rank in range(body["topk"])] for query in body["queries"]
        ]
        return httpx.Response(200, json={"result": hits})


class Nobody(httpx.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise AssertionError("a replayed cassette asks nobody")


def ask(cassette: Cassette, *queries: str, topk: int = 2, transport: httpx.AsyncBaseTransport | None = None, **options: Any) -> Any:
    async def main() -> Any:
        async with RetrieverClient("http://r", cassette=cassette, transport=transport or Nobody(), **options) as client:
            return await client.retrieve(list(queries), topk=topk)

    return trio.run(main)


def test_what_was_recorded_is_replayed_for_any_server_and_in_any_order(tmp_path: Path):
    server = Server()
    recorded = ask(Cassette.record(tmp_path / "c.jsonl"), "a", "b", "a", transport=server)
    assert recorded[0] == [Passage(id="0", contents='"a"\nä', score=0.5), Passage(id="1", contents='"a"\nä', score=0.5)]
    assert server.asked == ["a", "b"]
    assert ask(Cassette.replay(tmp_path / "c.jsonl"), "b", "a") == [recorded[1], recorded[0]]
    lines = (tmp_path / "c.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert len(lines) == 2
    assert (first["query"], first["topk"], sorted(first)) == ("a", 2, ["passages", "query", "topk"])


def test_a_recording_asks_for_what_it_lacks_only(tmp_path: Path):
    server = Server()
    ask(Cassette.record(tmp_path / "c.jsonl"), "a", transport=server)
    ask(Cassette.record(tmp_path / "c.jsonl"), "b", "a", transport=server)
    ask(Cassette.record(tmp_path / "c.jsonl"), "a", topk=3, transport=server)
    ask(Cassette.record(tmp_path / "c.jsonl"), "a", transport=server, mode="bm25")
    ask(Cassette.record(tmp_path / "c.jsonl"), "a", transport=server, mode="bm25", rerank=True)
    assert server.asked == ["a", "b", "a", "a", "a"]
    replayed = Cassette.replay(tmp_path / "c.jsonl")
    assert len(replayed) == 5
    assert len(ask(replayed, "a", topk=3)[0]) == 3
    assert ask(replayed, "a", mode="bm25", rerank=True)


@pytest.mark.parametrize("options", [{"topk": 3}, {"mode": "hybrid"}, {"rerank": True}, {}])
def test_an_unknown_query_is_an_error_that_names_the_cassette_and_the_query(tmp_path: Path, options: dict[str, Any]):
    ask(Cassette.record(tmp_path / "c.jsonl"), "known", transport=Server())
    query = "known" if options else "unknown " + "x" * 1000
    with pytest.raises(CassetteError) as caught:
        ask(Cassette.replay(tmp_path / "c.jsonl"), query, **options)
    assert isinstance(caught.value, RetrieverError)
    assert f"the cassette {tmp_path / 'c.jsonl'} holds no answer to '{query[:100]}" in str(caught.value)
    assert "it holds 1 queries: record it again" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_line_that_a_crash_cut_off_is_skipped_and_ended(tmp_path: Path):
    path = tmp_path / "c.jsonl"
    ask(Cassette.record(path), "a", "b", transport=Server())
    whole = path.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole) - 1, 11):
        path.write_bytes(whole[:length])
        assert len(Cassette.replay(path)) == 1
    server = Server()
    ask(Cassette.record(path), "a", "b", transport=server)
    assert server.asked == ["b"]
    assert len(Cassette.replay(path)) == 2


@pytest.mark.parametrize(
    "line",
    [
        b"text",
        b"[]",
        b'{"query": 1, "topk": 2, "passages": []}',
        b'{"query": "a", "topk": true, "passages": []}',
        b'{"query": "a", "topk": 2, "passages": [{"id": 1, "contents": "x", "score": 1}]}',
        b'{"query": "a", "topk": 2, "passages": [{"id": "1"}]}',
        b'{"id": "0", "contents": "a corpus"}',
        b"[" * 100_000,
    ],
)
def test_another_file_is_no_cassette(tmp_path: Path, line: bytes):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"query": "a", "topk": 2, "passages": []}\n' + line + b"\n")
    for open_it in (Cassette.replay, Cassette.record):
        with pytest.raises(CassetteError, match=r"c\.jsonl:2: expected"):
            open_it(path)


def test_a_cassette_that_is_not_there_is_said_to_be_missing(tmp_path: Path):
    with pytest.raises(CassetteError, match=r"cannot be read: .*No such file.* Record it first"):
        Cassette.replay(tmp_path / "c.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(CassetteError, match="cannot be written"):
        Cassette.record(tmp_path / "file" / "c.jsonl")


def test_the_first_answer_counts(tmp_path: Path):
    path = tmp_path / "c.jsonl"
    one, two = Cassette.record(path), Cassette.record(path)  # two workers
    asked = Recorded(query="a", topk=1)
    one.add([(asked, [Passage(id="1", contents="x")])])
    two.add([(asked, [Passage(id="2", contents="x")])])
    one.add([(asked, [Passage(id="3", contents="x")])])
    assert path.read_bytes().count(b"\n") == 2
    assert Cassette.replay(path).find(asked) == [Passage(id="1", contents="x")]


RECORDING = """
import sys
from retriever.cassette import Cassette, Passage, Recorded
cassette = Cassette.record(sys.argv[1])
for number in range(50):
    cassette.add([(Recorded(query=f"{sys.argv[2]}.{number}", topk=1), [Passage(id="1", contents="x" * 5000)])])
"""


@pytest.mark.slow
def test_several_processes_record_to_one_file(tmp_path: Path):
    path = str(tmp_path / "c.jsonl")
    workers = [subprocess.Popen([sys.executable, "-c", RECORDING, path, str(worker)]) for worker in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert len(Cassette.replay(path)) == 150
