"""The publisher against real engines: two processes, real gloo groups, real HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import torch
import trio
from engine_process import engine_process
from safetensors.torch import load_file
from tiny_qwen2 import write_tiny_qwen2

from agentrl.config.recipe import WeightsRecipe
from agentrl.engine_api import EngineClient
from agentrl.errors import PublishError
from agentrl.weights import Published, Publisher, Snapshot

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(model_dir) -> Iterator[list[httpx.Client]]:
    with engine_process(model_dir) as first, engine_process(model_dir) as second:
        yield [first, second]


def snapshot(model_dir: Path, version: int) -> Snapshot:
    """The model with every weight moved, gathered in three lists."""
    moved = [(name, tensor + 0.01 * version) for name, tensor in load_file(model_dir / "model.safetensors").items()]
    return Snapshot.of(version, version, [moved[:3], moved[3:7], moved[7:]])


def publish(engines: list[httpx.Client], model_dir: Path, tmp_path: Path, act: Callable[[Publisher], Awaitable[Published]], **recipe) -> Published:
    async def main() -> Published:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(EngineClient(str(engine.base_url), index)) for index, engine in enumerate(engines)]
            publisher = Publisher(WeightsRecipe(**{"deadline_s": 20.0} | recipe), model_dir=model_dir, directory=tmp_path)
            publisher.set_engines(clients)
            try:
                return await act(publisher)
            finally:
                await publisher.aclose()

    return trio.run(main)


def held(engine: httpx.Client) -> tuple[str, str]:
    """(version, checksum of all weights) of an engine, as it tells them."""
    checksum = engine.post("/weights_checker", json={"action": "checksum"}).json()["per_engine_checksum"]
    return engine.get("/model_info").json()["weight_version"], checksum


@pytest.mark.parametrize("transport", ["group", "disk"])
def test_every_engine_holds_exactly_the_bytes_of_the_version_and_generates_on(engines, model_dir, tmp_path, transport):
    first, second = snapshot(model_dir, 1 if transport == "group" else 11), snapshot(model_dir, 2 if transport == "group" else 12)

    async def both(publisher: Publisher) -> Published:
        await publisher.publish(first)
        return await publisher.publish(second)  # the group is used again

    published = publish(engines, model_dir, tmp_path, both, transport=transport)
    assert (published.version, published.engines, published.nbytes) == (second.version, (0, 1), second.nbytes)
    assert [held(engine) for engine in engines] == [(str(second.version), second.checksum)] * 2
    body = {"input_ids": [7, 8, 9], "sampling_params": {"max_new_tokens": 3, "temperature": 0}, "return_logprob": True}
    assert engines[0].post("/generate", json=body).json()["meta_info"]["weight_version"] == str(second.version)


def test_a_refused_update_is_sent_once_more_over_a_new_group(engines, model_dir, tmp_path):
    engines[1].post("/begin_weight_update", json={}).raise_for_status()  # left open by somebody: the next begin is refused
    wanted = snapshot(model_dir, 21)
    published = publish(engines, model_dir, tmp_path, lambda publisher: publisher.publish(wanted))
    assert published.engines == (0, 1)
    assert [held(engine) for engine in engines] == [("21", wanted.checksum)] * 2


def test_weights_that_do_not_fit_are_an_error_and_no_engine_takes_half_of_them(engines, model_dir, tmp_path):
    before = [held(engine) for engine in engines]
    name = "model.norm.weight"
    wrong = Snapshot.of(31, 31, [[(name, torch.zeros(5))]])
    with pytest.raises(PublishError, match=r"version 31 could not be brought to every engine"):
        publish(engines, model_dir, tmp_path, lambda publisher: publisher.publish(wrong), deadline_s=3.0)
    assert [held(engine) for engine in engines] == before
    assert [engine.get("/ready").status_code for engine in engines] == [200, 200]  # nobody was left paused
