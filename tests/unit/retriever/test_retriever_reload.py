import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from retriever_served import FOREVER_S, ROWS, Held, client_of, index_of, served

from retriever.app import create_app
from retriever.local import Limits, LocalService
from retriever.query import Mode
from retriever.reload import Opener, Stopped

MOVED = [row | {"contents": row["contents"].replace("lies in", "was moved to")} for row in ROWS]


class Shelf:
    """Indexes that are opened one after another."""

    def __init__(self, *indexes: Held | Exception) -> None:
        self.left = list(indexes)

    def __call__(self, progress: Any) -> Held:
        index = self.left.pop(0)
        if isinstance(index, Exception):
            raise index
        return index


def reloading(play: Callable[[httpx.AsyncClient], Any], *indexes: Held | Exception) -> Any:
    return served(play, index=Shelf(*indexes))


def test_a_reload_serves_the_new_index_and_closes_the_old_one():
    old, new = Held(held=False), Held(index_of(MOVED), held=False)

    async def play(client: httpx.AsyncClient) -> None:
        before = (await client.post("/retrieve", json={"query": "Oslo"})).json()
        answer = await client.post("/admin/reload")
        assert answer.status_code == 200
        assert answer.json()["identity"] == new.identity
        assert answer.json()["changed"] is True
        assert answer.json()["modes"] == ["dense"]
        assert (old.closed, new.closed) == (True, False)
        after = (await client.post("/retrieve", json={"query": "Oslo"})).json()  # not from the cache of the old one
        assert [result["result"][0][0]["contents"] for result in (before, after)] == [ROWS[0]["contents"], MOVED[0]["contents"]]
        assert 'retriever_reloads_total{outcome="done"} 1.0' in (await client.get("/metrics")).text

    reloading(play, old, new)
    assert new.closed


def test_the_same_index_again_keeps_its_cache():
    old, new = Held(held=False), Held(held=False)

    async def play(client: httpx.AsyncClient) -> None:
        await client.post("/retrieve", json={"query": "Oslo"})
        assert (await client.post("/admin/reload")).json()["changed"] is False
        assert (await client.post("/retrieve", json={"query": "Oslo"})).status_code == 200

    reloading(play, old, new)
    assert "Oslo" not in new.searched


def test_a_reload_of_the_same_index_goes_on_counting_where_nothing_is_kept():
    async def play(client: httpx.AsyncClient) -> None:
        await client.post("/retrieve", json={"query": "Oslo"})
        await client.post("/admin/reload")
        assert "retriever_cache_misses_total 1.0" in (await client.get("/metrics")).text

    served(play, index=Shelf(Held(held=False), Held(held=False)), limits=Limits(cache_entries=0))


def test_an_index_that_cannot_be_served_leaves_the_old_one_and_is_told_of():
    class Mute(Held):
        def find(self, queries: Any, vectors: Any) -> Any:
            raise ArithmeticError("it answers nothing")

    old = Held(held=False)

    async def play(client: httpx.AsyncClient) -> None:
        for reason in ("vectors.faiss is missing", "it answers nothing"):
            answer = await client.post("/admin/reload")
            assert answer.status_code == 409
            assert answer.json()["detail"] == f"the index cannot be served: {reason}. The one opened before goes on"
            assert (await client.post("/retrieve", json={"query": reason})).status_code == 200
        assert 'retriever_reloads_total{outcome="failed"} 2.0' in (await client.get("/metrics")).text
        assert not old.closed

    reloading(play, old, ValueError("vectors.faiss is missing"), Mute())


def test_an_index_that_is_not_searched_by_the_mode_of_those_who_name_none_is_refused():
    class OfWords(Held):
        def find(self, queries: Any, vectors: Any) -> Any:
            return [[] for _ in queries]

    old, new = Held(held=False), OfWords(held=False)
    new.modes, new.encode = (Mode.BM25,), lambda queries: np.zeros((len(queries), 0), np.float32)

    async def play(client: httpx.AsyncClient) -> None:
        answer = await client.post("/admin/reload")
        assert answer.status_code == 409
        assert "searched by bm25, and not by dense" in answer.json()["detail"]
        assert (await client.post("/retrieve", json={"query": "Oslo"})).status_code == 200
        assert (old.closed, new.closed) == (False, True)

    reloading(play, old, new)


def test_no_request_is_lost_while_indexes_are_swapped():
    held = Held()
    others = [Held(index_of(MOVED if i % 2 else ROWS), held=False) for i in range(3)]

    async def play(client: httpx.AsyncClient) -> None:
        async def ask(number: int) -> str:
            answer = await client.post("/retrieve", json={"queries": ["Oslo", f"Oslo {number}"], "topk": 1})
            assert answer.status_code == 200, answer.text
            assert [len(hits) for hits in answer.json()["result"]] == [1, 1]
            return str(answer.json()["result"][0][0]["contents"])

        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(ask(number)) for number in range(20)]  # 2 batches, in the old index's queue
            await asyncio.to_thread(held.busy.wait, FOREVER_S)
            first = group.create_task(client.post("/admin/reload"))
            while 'outcome="done"} 1.0' not in (await client.get("/metrics")).text:  # noqa: ASYNC110  the server has no event to wait for
                await asyncio.sleep(0)
            assert not held.closed
            during = [group.create_task(ask(number)) for number in range(20)]
            await asyncio.wait(during)
            held.go.set()
            await first
            assert held.closed
            for _ in range(2):
                during += [group.create_task(ask(number)) for number in range(25)]
                assert (await client.post("/admin/reload")).status_code == 200
        assert {task.result() for task in waiting} == {ROWS[0]["contents"]}
        assert {task.result() for task in during} == {ROWS[0]["contents"], MOVED[0]["contents"]}

    class WarmAtOnce(Held):
        """Held only after it has been warmed up."""

        def __init__(self) -> None:
            super().__init__()
            self.warm = False

        def find(self, queries: Any, vectors: Any) -> Any:
            if not self.warm:
                self.warm = True
                return self.index.find(queries, vectors)
            return super().find(queries, vectors)

    held = WarmAtOnce()
    reloading(play, held, *others)


def test_an_index_in_memory_cannot_be_opened_again():
    async def play(client: httpx.AsyncClient) -> None:
        answer = await client.post("/admin/reload")
        assert answer.status_code == 422
        assert "in memory" in answer.json()["detail"]

    served(play)


def test_a_server_without_reload_says_so():
    async def main() -> None:
        app = create_app(LocalService(Held(held=False)))
        async with app.router.lifespan_context(app), client_of(app) as client:
            answer = await client.post("/admin/reload")
            assert (answer.status_code, answer.json()["detail"][:26]) == (404, "there is nothing to reload")

    asyncio.run(main())


def test_what_the_first_opening_raises_is_raised_to_who_waits_for_it():
    async def main() -> None:
        async with LocalService(Shelf(ValueError("no index"))) as service:
            with pytest.raises(ValueError, match="no index"):
                await service.opened()

    asyncio.run(main())


def test_an_opening_is_stopped_at_its_next_word_of_progress():
    begun, stopped = threading.Event(), threading.Event()

    def opens(progress: Any) -> Any:
        begun.set()
        assert stopped.wait(FOREVER_S)
        progress("reading", 1, 2)
        raise AssertionError("it went on")

    opener = Opener(opens, lambda what, done, of: None)
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            opener.open()
        except Stopped as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(FOREVER_S)
    opener.stop()
    stopped.set()
    thread.join(FOREVER_S)
    assert len(outcome) == 1
