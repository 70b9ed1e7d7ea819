import asyncio
from typing import Any

import httpx
import pytest
from retriever_served import FOREVER_S, INDEX, Held, ask, client_of, served

from retriever.app import create_app
from retriever.local import Limits, LocalService

TOKEN = "a-token-nobody-guesses"


def test_health_readiness_and_what_is_served():
    async def play(client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).json() == {"status": "ok"}
        ready = (await client.get("/ready")).json()
        assert ready == {"status": "ready", "documents": 4, "modes": ["dense"], "identity": INDEX.identity, "waiting": 0}
        info = (await client.get("/info")).json()
        assert (info["encoder"]["kind"], info["encoder"]["dim"], info["batching"]["max_batch"]) == ("hashed", 64, 64)
        assert (await client.get("/retrieve")).status_code == 405
        assert (await client.get("/elsewhere")).json() == {"detail": "Not Found"}

    served(play)


def test_an_index_that_is_being_opened_is_told_of_and_nothing_is_lost():
    told = asyncio.Event()

    async def main() -> None:
        loop, held = asyncio.get_running_loop(), Held()

        def opens(progress: Any) -> Held:
            progress("reading pages", 3, 7)
            loop.call_soon_threadsafe(told.set)
            assert held.go.wait(FOREVER_S)
            return held

        service = LocalService(opens)
        app = create_app(service)
        async with app.router.lifespan_context(app), client_of(app) as client:
            await told.wait()
            assert (await client.get("/health")).status_code == 200
            loading = await client.get("/ready")
            assert (loading.status_code, loading.headers["retry-after"]) == (503, "1")
            assert loading.json()["progress"] == {"doing": "reading pages", "done": 3, "of": 7}
            for answer in (await client.post("/retrieve", json={"queries": ["Oslo"]}), await client.get("/info"), await client.get("/documents/0")):
                assert (answer.status_code, answer.json()) == (503, {"detail": "not ready: reading pages 3 of 7"})
            held.go.set()
            await service.opened()
            assert (await client.get("/ready")).json()["documents"] == 4
            assert (await client.post("/retrieve", json={"queries": ["Oslo"]})).status_code == 200

    asyncio.run(main())


def test_an_overloaded_server_answers_503_with_retry_after():
    index = Held()

    async def play(client: httpx.AsyncClient) -> None:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(client.post("/retrieve", json={"queries": ["Oslo"]}))
            await asyncio.to_thread(index.busy.wait, FOREVER_S)
            second = group.create_task(client.post("/retrieve", json={"queries": ["Rome", "Italy"]}))
            while (await client.get("/ready")).json()["waiting"] < 2:  # noqa: ASYNC110  the server has no event to wait for
                await asyncio.sleep(0)  # nothing else in this loop lets the other request run
            refused = await client.post("/retrieve", json={"queries": ["Paris"]})
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert "2 items are waiting" in refused.json()["detail"]
            index.go.set()
        assert first.result().status_code == second.result().status_code == 200

    served(play, index=index, limits=Limits(max_waiting=2))


@pytest.mark.parametrize("header", [None, "10"])
def test_a_passed_deadline_is_504(header: str | None):
    index = Held()

    async def play(client: httpx.AsyncClient) -> None:
        answer = await client.post("/retrieve", json={"queries": ["Oslo"]}, headers={"x-deadline-ms": header} if header else {})
        index.go.set()
        assert answer.status_code == 504
        assert answer.json()["detail"] == "not served within 0.01 s"

    served(play, index=index, deadline_s=FOREVER_S if header else 0.01)


def test_a_deadline_is_a_number_and_never_longer_than_the_servers():
    for header in ("soon", "-1", "1.5", "1" * 10):
        [wrong] = ask({"queries": ["Oslo"]}, headers={"x-deadline-ms": header})
        assert wrong.status_code == 422
        assert "milliseconds" in wrong.json()["detail"]
    index = Held()

    async def play(client: httpx.AsyncClient) -> None:
        answer = await client.post("/retrieve", json={"queries": ["Oslo"]}, headers={"x-deadline-ms": "999999999"})
        index.go.set()
        assert answer.status_code == 504

    served(play, index=index, deadline_s=0.01)


async def left_early(app: Any, body: bytes) -> list[int]:
    """The statuses of a request whose client leaves as soon as it is sent."""
    messages = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def send(message: dict[str, Any]) -> None:
        statuses.append(message.get("status", 0))

    await app({"type": "http", "method": "POST", "path": "/retrieve", "headers": [], "query_string": b"", "http_version": "1.1"}, receive, send)
    return statuses


def test_the_queries_of_a_client_that_left_are_not_searched():
    index = Held()

    async def main() -> None:
        app = create_app(LocalService(index))
        async with app.router.lifespan_context(app), client_of(app) as client:
            async with asyncio.TaskGroup() as group:
                group.create_task(client.post("/retrieve", json={"queries": ["Oslo"]}))
                await asyncio.to_thread(index.busy.wait, FOREVER_S)
                assert (await left_early(app, b'{"queries": ["abandoned"]}'))[0] == 499
                index.go.set()
            assert (await client.post("/retrieve", json={"queries": ["Rome"]})).status_code == 200

    asyncio.run(main())
    assert index.searched == ["Oslo", "Rome"]


def test_an_answer_from_the_cache_needs_no_search_and_knows_its_question():
    index = Held(held=False)

    async def play(client: httpx.AsyncClient) -> None:
        async def ids(**request: Any) -> list[list[str]]:
            answer = await client.post("/retrieve", json=request)
            return [[document["id"] for document in documents] for documents in answer.json()["result"]]

        assert await ids(queries=["Oslo", "Rome"], topk=1) == [["0"], ["1"]]
        assert await ids(queries=["Rome", "Paris", "Oslo"], topk=1) == [["1"], ["2"], ["0"]]
        assert len((await ids(query="Oslo", topk=2))[0]) == 2
        metrics = (await client.get("/metrics")).text
        assert "retriever_cache_hits_total 2.0" in metrics
        assert "retriever_cache_misses_total 4.0" in metrics

    served(play, index=index)
    assert index.searched == ["Oslo", "Rome", "Paris", "Oslo"]


def test_metrics_are_prometheus_text():
    async def play(client: httpx.AsyncClient) -> None:
        await client.post("/retrieve", json={"queries": ["Oslo", "Rome"]})
        await client.post("/retrieve", content=b"{")
        await client.get("/nowhere/at/all")
        text = (await client.get("/metrics")).text
        for line in (
            'retriever_requests_total{route="/retrieve",status="200"} 1.0',
            'retriever_requests_total{route="/retrieve",status="400"} 1.0',
            'retriever_requests_total{route="other",status="404"} 1.0',
            "retriever_queries_total 2.0",
            'retriever_batch_queries_bucket{le="1"} 0.0',
            'retriever_batch_queries_bucket{le="2"} 1.0',
            'retriever_batch_queries_bucket{le="+Inf"} 1.0',
            "retriever_batch_queries_sum 2.0",
            'retriever_stage_seconds_count{stage="encode"} 1.0',
            'retriever_stage_seconds_count{stage="search"} 1.0',
            'retriever_stage_seconds_count{stage="queue"} 1.0',
            "retriever_request_seconds_count 1.0",
            "retriever_queue_depth 0.0",
            "retriever_cache_entries 2.0",
        ):
            assert line + "\n" in text, line
        assert "retriever_faiss_blas_threshold 256.0\n" in text  # 4 queries of 64 dimensions
        resident = next(line for line in text.splitlines() if line.startswith("retriever_resident_memory_bytes "))
        assert 2e7 < float(resident.split()[1]) < 2e10

    served(play)


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", f"Basic {TOKEN}", TOKEN, "Bearer ü"])
def test_without_the_token_nothing_but_health_and_readiness_is_answered(header: str | None):
    headers = [] if header is None else [(b"authorization", header.encode())]

    async def play(client: httpx.AsyncClient) -> None:
        for method, path in [
            ("POST", "/retrieve"),
            ("GET", "/documents/0"),
            ("POST", "/access"),
            ("GET", "/info"),
            ("GET", "/metrics"),
            ("GET", "/x"),
        ]:
            answer = await client.request(method, path, headers=headers, content=b"" if method == "GET" else b'{"queries": [], "urls": []}')
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert TOKEN not in answer.text
        for path in ("/health", "/ready"):
            assert (await client.get(path, headers=headers)).status_code == 200

    served(play, token=TOKEN)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_token_everything_is(scheme: str):
    [answer] = ask({"queries": ["Oslo"]}, headers={"authorization": f"{scheme} {TOKEN}"}, token=TOKEN)
    assert answer.status_code == 200


def test_a_failure_inside_is_told_without_its_inside():
    class Broken(Held):
        def find(self, queries: Any, vectors: Any) -> Any:
            raise ZeroDivisionError("secret")

    async def main() -> None:
        app = create_app(LocalService(Broken()))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://r") as client:
            answer = await client.post("/retrieve", json={"queries": ["Oslo"]})
            assert (answer.status_code, answer.json()) == (500, {"detail": "the server failed: its log says how"})

    asyncio.run(main())
