import pytest
import trio

from agentrl.types import Task
from envs.search import SearchEnv
from envs.shared_retriever import give_back, lease

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
