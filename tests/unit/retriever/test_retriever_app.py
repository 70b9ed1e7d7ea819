import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retriever.app import MAX_BODY_BYTES, MAX_QUERIES, MAX_TOPK, create_app
from retriever.corpus import Document
from retriever.encoders.hashed import HashedSettings
from retriever.index import Hit, Index

TEXTS = {"Oslo": "Norway", "Rome": "Italy", "Paris": "France", "Zürich": "Schweiz"}
ROWS = [{"id": str(i), "contents": f'"{city}"\n{city} lies in {land} .', "n": i} for i, (city, land) in enumerate(TEXTS.items())]


def documents() -> list[Document]:
    return [
        Document(id=row["id"], contents=row["contents"], json=json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()) for row in ROWS
    ]


INDEX = Index.of(documents(), HashedSettings(dim=64))


def search_r1(result: Any) -> bytes:
    """The bytes that FastAPI makes of an answer."""
    return json.dumps({"result": result}, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def ask(*bodies: Any, index: Index = INDEX, **options: Any) -> list[httpx.Response]:
    """The answers to POST /retrieve, one after another."""

    async def play(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.post("/retrieve", content=body if isinstance(body, bytes) else json.dumps(body)) for body in bodies]

    return served(play, index=index, **options)


def served(play: Callable[[httpx.AsyncClient], Awaitable[Any]], *, index: Index = INDEX, **options: Any) -> Any:
    async def main() -> Any:
        app = create_app(index, **options)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://r") as client:
            return await play(client)

    return asyncio.run(main())


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("with_scores", [True, False])
def test_answers_are_search_r1s_byte_for_byte(count: int, with_scores: bool):
    queries = ["Oslo Norway", "Rome Italy", "Zürich"][:count]
    [answer] = ask({"queries": queries, "topk": 2, "return_scores": with_scores})
    hits = INDEX.search(queries, 2)
    expected = [[{"document": ROWS[hit.row], "score": hit.score} if with_scores else ROWS[hit.row] for hit in some] for some in hits]
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == search_r1(expected)
    assert [some[0].row for some in hits] == [0, 1, 3][:count]


def test_what_a_request_leaves_out_has_search_r1s_defaults():
    plain, null, extra = ask(
        {"queries": ["Oslo"]}, {"queries": ["Oslo"], "topk": None, "return_scores": None}, {"queries": ["Oslo"], "more": 1}, topk=2
    )
    assert plain.content == null.content == extra.content
    assert len(plain.json()["result"][0]) == 2
    assert "document" not in plain.json()["result"][0][0]


def test_no_queries_and_queries_without_a_word_have_no_hits():
    none, empty = ask({"queries": []}, {"queries": ["", "??", "Oslo"], "topk": 1})
    assert none.content == b'{"result":[]}'
    assert [len(hits) for hits in empty.json()["result"]] == [0, 0, 1]


def test_more_hits_than_documents_are_all_documents():
    [answer] = ask({"queries": ["lies"], "topk": MAX_TOPK})
    assert sorted(document["id"] for document in answer.json()["result"][0]) == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("body", "status", "complaint"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"queries": ["a"], "topk": ' + b"9" * 5000 + b"}", 400, "not JSON"),
        ([], 422, "expected"),
        ({}, 422, "queries must be a list of strings"),
        ({"queries": "Oslo"}, 422, "queries must be a list of strings"),
        ({"queries": ["Oslo", 1]}, 422, "queries must be a list of strings"),
        ({"queries": ["Oslo"], "topk": 0}, 422, "topk must be an integer from 1 to 100"),
        ({"queries": ["Oslo"], "topk": MAX_TOPK + 1}, 422, "topk"),
        ({"queries": ["Oslo"], "topk": True}, 422, "topk"),
        ({"queries": ["Oslo"], "topk": 1.5}, 422, "topk"),
        ({"queries": ["Oslo"], "return_scores": "yes"}, 422, "return_scores must be true or false"),
        ({"queries": ["Oslo"] * (MAX_QUERIES + 1)}, 413, f"at most {MAX_QUERIES}"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "exceeds"),
    ],
)
def test_a_wrong_request_is_told_what_was_expected(body: Any, status: int, complaint: str):
    wrong, right = ask(body, {"queries": ["Oslo"]})
    assert wrong.status_code == status
    assert complaint in wrong.json()["detail"]
    assert right.status_code == 200


def test_a_long_query_and_a_lone_surrogate_are_searched_for():
    long, surrogate = ask({"queries": ["Oslo " * 100_000], "topk": 1}, b'{"queries": ["Oslo \\ud800"], "topk": 1}')
    assert [answer.json()["result"][0][0]["id"] for answer in (long, surrogate)] == ["0", "0"]


def test_health_and_readiness():
    async def play(client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/ready")).json() == {"status": "ready", "documents": 4, "dim": 64, "waiting": 0}
        assert (await client.get("/retrieve")).status_code == 405
        assert (await client.get("/elsewhere")).json() == {"detail": "Not Found"}

    served(play)


class Held(Index):
    """An index whose searches wait until they are let go."""

    def __init__(self) -> None:
        super().__init__(INDEX.documents, INDEX.vectors, INDEX.encoder)
        self.busy, self.go = threading.Event(), threading.Event()
        self.searched: list[str] = []

    def search(self, queries: Any, topk: int) -> list[list[Hit]]:
        self.busy.set()
        assert self.go.wait(60.0)
        self.searched += queries
        return super().search(queries, topk)


def test_an_overloaded_server_answers_503_with_retry_after():
    index = Held()

    async def play(client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(client.post("/retrieve", json={"queries": ["Oslo"]}))
            await asyncio.to_thread(index.busy.wait, 60.0)
            second = group.create_task(client.post("/retrieve", json={"queries": ["Rome"] * 2}))
            while (await client.get("/ready")).json()["waiting"] < 2:  # noqa: ASYNC110  the server has no event to wait for
                await asyncio.sleep(0)  # nothing else in this loop lets the other request run
            refused = await client.post("/retrieve", json={"queries": ["Paris"]})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert "2 items are waiting" in refused.json()["detail"]
            index.go.set()
        assert first.result().status_code == second.result().status_code == 200

    served(play, index=index, max_waiting=2)


def test_a_passed_deadline_is_504():
    index = Held()

    async def play(client: httpx.AsyncClient) -> None:
        answer = await client.post("/retrieve", json={"queries": ["Oslo"]})
        index.go.set()
        assert answer.status_code == 504
        assert "not served within" in answer.json()["detail"]

    served(play, index=index, deadline_s=0.01)


def test_the_queries_of_a_client_that_left_are_not_searched():
    index = Held()

    async def leave_early(app: Any) -> None:
        messages = iter([{"type": "http.request", "body": b'{"queries": ["abandoned"]}'}, {"type": "http.disconnect"}])
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return next(messages)

        async def send(message: dict[str, Any]) -> None:
            statuses.append(message.get("status", 0))

        scope = {"type": "http", "method": "POST", "path": "/retrieve", "headers": [], "query_string": b"", "http_version": "1.1"}
        await app(scope, receive, send)
        assert statuses[0] == 499

    async def main() -> None:
        app = create_app(index)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://r") as client:
            async with asyncio.TaskGroup() as group:
                group.create_task(client.post("/retrieve", json={"queries": ["Oslo"]}))
                await asyncio.to_thread(index.busy.wait, 60.0)
                await leave_early(app)
                index.go.set()
            assert (await client.post("/retrieve", json={"queries": ["Rome"]})).status_code == 200

    asyncio.run(main())
    assert index.searched == ["Oslo", "Rome"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["queries", "topk", "return_scores", "x"]), inner, max_size=4),
    max_leaves=12,
)
REQUESTS = st.fixed_dictionaries({"queries": st.lists(st.text(max_size=30), max_size=5) | JSON}, optional={"topk": JSON, "return_scores": JSON})


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()) | REQUESTS.map(lambda v: json.dumps(v).encode()), min_size=1, max_size=20
    )
)
def test_no_body_breaks_the_server(bodies: list[bytes]):
    for body, answer in zip(bodies, ask(*bodies), strict=True):
        assert answer.status_code in (200, 400, 413, 422), body
        if answer.status_code == 200:
            assert len(answer.json()["result"]) == len(json.loads(body)["queries"])
        else:
            assert answer.json()["detail"]
