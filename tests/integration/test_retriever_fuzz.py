"""Nothing that is sent to the retriever's server makes it answer 500: every operation of its own OpenAPI document, and bodies of any kind."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retriever.api import MSGPACK
from retriever.app import create_app
from retriever.corpus import read_corpus
from retriever.index import Index
from retriever.local import LocalService

ROOT = Path(__file__).parents[2]
ROWS = [{"id": f"{i}", "contents": f'"{city}"\n{city} lies somewhere .', "n": i} for i, city in enumerate(["Oslo", "Rome", "Zürich"])]
PACKED = {"content-type": MSGPACK, "accept": MSGPACK}
NAMES = ["queries", "query", "topk", "return_scores", "mode", "rerank", "fields", "max_chars", "urls", "x"]

pytestmark = pytest.mark.slow

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)
REQUESTS = st.fixed_dictionaries(
    {"queries": st.lists(st.text(max_size=30), max_size=5) | JSON},
    optional={
        "topk": st.integers(1, 100) | JSON,
        "return_scores": st.booleans() | JSON,
        "mode": st.sampled_from(["dense", "bm25", "hybrid"]) | JSON,
        "fields": st.lists(st.sampled_from(["id", "contents", "n"]), min_size=1) | JSON,
        "max_chars": st.integers(0, 50) | JSON,
        "rerank": JSON,
    },
)
PLAIN = st.binary(max_size=60) | (JSON | REQUESTS).map(lambda value: json.dumps(value).encode())
IN_MSGPACK = st.binary(max_size=60) | (JSON | REQUESTS).map(lambda value: packed(value))


def packed(value: Any) -> bytes:
    body: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return body


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzzed") / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture(scope="module")
def url(corpus: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "retriever", "serve", str(corpus)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[1]
        server.terminate()


def send(index: Index, path: str, bodies: list[bytes], headers: dict[str, str]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        app = create_app(LocalService(index))
        transport = httpx.ASGITransport(app=app)  # raises what the app raises
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://r") as client:
            return [await client.post(path, content=body, headers=headers) for body in bodies]

    return asyncio.run(main())


def check(path: str, answers: list[httpx.Response], bodies: list[bytes], loads: Any) -> None:
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.status_code in (200, 400, 413, 422), body
        if answer.status_code == 200:
            request = loads(body)
            wanted = request["urls"] if path == "/access" else [""] if request.get("queries") is None else request["queries"]
            assert len(loads(answer.content)["result"]) == len(wanted)
        else:
            assert answer.json()["detail"]


def fuzz(corpus: Path, *, examples: int) -> None:
    class Kept(Index):
        def close(self) -> None:
            """It is served again."""

    index = Kept.of(read_corpus(corpus))
    slow = [HealthCheck.too_slow]

    @settings(max_examples=examples, deadline=None, suppress_health_check=slow)
    @given(st.sampled_from(["/retrieve", "/access"]), st.lists(PLAIN, min_size=1, max_size=20))
    def plain(path: str, bodies: list[bytes]) -> None:
        check(path, send(index, path, bodies, {}), bodies, json.loads)

    @settings(max_examples=examples, deadline=None, suppress_health_check=slow)
    @given(st.sampled_from(["/retrieve", "/access"]), st.lists(IN_MSGPACK, min_size=1, max_size=20))
    def in_msgpack(path: str, bodies: list[bytes]) -> None:
        check(path, send(index, path, bodies, PACKED), bodies, msgpack.unpackb)

    plain()
    in_msgpack()


def test_no_body_breaks_the_server(corpus: Path):
    fuzz(corpus, examples=15)


@pytest.mark.soak
def test_no_body_of_thousands_breaks_the_server(corpus: Path):
    fuzz(corpus, examples=3000)


def schemathesis(url: str, directory: Path, *, examples: int, phases: str) -> None:
    """Runs every check: no 5xx, the documented statuses, media types and schemas, what is forbidden refused."""
    config = directory / "schemathesis.toml"
    config.write_text('[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", 504]\n')  # 504: of a millisecond's deadline
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{url}/openapi.json"]
    command += ["--max-examples", str(examples), "--phases", phases]
    ran = subprocess.run(
        [*command, "--generation-deterministic", "--no-color"], capture_output=True, text=True, cwd=directory
    )  # it keeps failures there
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


def test_the_openapi_document_is_true(url: str, tmp_path: Path):
    schemathesis(url, tmp_path, examples=1, phases="coverage")


@pytest.mark.soak
def test_the_openapi_document_is_true_of_thousands_of_requests(url: str, tmp_path: Path):
    schemathesis(url, tmp_path, examples=500, phases="examples,coverage,fuzzing,stateful")
