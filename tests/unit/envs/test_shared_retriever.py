from pathlib import Path
from typing import Any

import pytest
import trio

from agentrl.errors import EnvironmentFailure
from agentrl.types import Task
from envs.search import SearchEnv
from envs.shared_retriever import Leased, give_back, lease
from retriever.cassette import Recorded
from retriever.client import Cassette, Passage

URL = "http://127.0.0.1:9"
TASK = Task(id="t", prompt="q", answers=("a",))


def test_episodes_share_one_client_per_retriever():
    async def main() -> None:
        one, two, other = lease(URL), lease(URL), lease("http://127.0.0.1:10")
        assert one is two
        assert one is not other
        await give_back(URL)
        assert lease(URL) is one
        for url in (URL, URL, "http://127.0.0.1:10"):
            await give_back(url)
        assert lease(URL) is not one  # the last one closed it
        await give_back(URL)

    trio.run(main)


def test_a_lease_ends_when_its_episode_is_closed_and_only_then():
    async def main() -> None:
        never_started = SearchEnv(retriever_url=URL)
        await never_started.close()
        first, second = SearchEnv(retriever_url=URL), SearchEnv(retriever_url=URL)
        await first.start(TASK)
        await second.start(TASK)
        client = lease(URL)
        await first.close()
        await first.close()
        await second.close()
        assert lease(URL) is client
        await give_back(URL)
        await give_back(URL)
        with pytest.raises(KeyError):
            await give_back(URL)

    trio.run(main)


def test_every_run_of_trio_has_clients_of_its_own():
    async def main() -> object:
        client = lease(URL)
        await give_back(URL)
        return client

    assert trio.run(main) is not trio.run(main)


def test_episodes_that_ask_alike_share_a_client():
    async def main() -> None:
        hybrid, same, dense = Leased(url=URL, mode="hybrid"), Leased.of(URL, {"mode": "hybrid"}), Leased(url=URL)
        assert lease(hybrid) is lease(same)
        assert lease(dense) is lease(URL)
        assert lease(dense) is not lease(hybrid)
        for leased in (hybrid, same, hybrid, dense, URL, dense):
            await give_back(leased)
        with pytest.raises(KeyError):
            await give_back(hybrid)

    trio.run(main)


def search(environment: SearchEnv) -> str:
    """What the first search of an episode finds."""

    async def main() -> str:
        await environment.start(TASK)
        try:
            result = await environment.step("<search> q </search>")
        finally:
            await environment.close()
        assert result.observation is not None
        return "".join(segment.text for segment in result.observation.segments)

    return trio.run(main)


def test_a_cassette_is_replayed_without_a_server(tmp_path: Path):
    path = tmp_path / "c.jsonl"
    Cassette.record(path).add([(Recorded(query="q", topk=3), [Passage(id="7", contents='"Oslo"\nOslo is old.')])])
    assert 'Doc 1(Title: "Oslo") Oslo is old.' in search(SearchEnv(retriever_options={"cassette": str(path)}))
    with pytest.raises(EnvironmentFailure, match="holds no answer to 'q' with topk 5"):
        search(SearchEnv(retriever_options={"cassette": str(path)}, topk=5))
    with pytest.raises(EnvironmentFailure, match="cannot be read"):
        search(SearchEnv(retriever_options={"cassette": str(tmp_path / "none.jsonl")}))


def test_a_token_that_is_none_is_an_error_that_does_not_show_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AGENTRL_RETRIEVER_TOKEN", "two words")
    with pytest.raises(EnvironmentFailure, match="token must be printable") as caught:
        search(SearchEnv(retriever_url=URL))
    assert "two words" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"retriever_url": URL, "retriever_options": {"modus": "dense"}},
            "retriever_options has mode, rerank, coalesce, cassette, record, got 'modus'",
        ),
        ({"retriever_url": URL, "retriever_options": {"rerank": 1}}, "rerank must be of type bool, got 1"),
        ({"retriever_url": URL, "retriever_options": {"mode": "sparse"}}, "mode must be one of dense, bm25, hybrid, got 'sparse'"),
        ({"retriever_url": URL, "retriever_options": {"coalesce": -1}}, "coalesce must be 0 or more"),
        ({"retriever_url": URL, "retriever_options": {"record": True}}, "record needs a cassette"),
        ({"retriever_options": {"cassette": "c", "record": True}}, "and a retriever_url to record from"),
        ({"retriever_options": {"cassette": "c", "coalesce": 2}}, "coalesce would have no effect"),
        ({"retriever_options": {"mode": "dense"}}, "give it a retriever_url"),
        (
            {"retriever_url": URL, "search": False, "retriever_options": {"mode": "dense"}},
            r"\(mode\) of SearchEnv would have no effect: nothing is searched",
        ),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], complaint: str):
    with pytest.raises(ValueError, match=complaint):
        SearchEnv(**options)
