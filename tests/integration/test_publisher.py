"""The publisher against real engines: two processes, real gloo groups, real HTTP."""

from __future__ import annotations

import re
import time
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
from agentrl.weights import Published, Publisher, Snapshot, save_snapshot

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
    wrong = Snapshot.of(31, 31, [[("model.norm.weight", torch.zeros(5))]])
    with pytest.raises(PublishError, match=r"version 31 could not be brought to any engine"):
        publish(engines, model_dir, tmp_path, lambda publisher: publisher.publish(wrong), deadline_s=3.0, bucket_deadline_s=2.0)
    assert [held(engine) for engine in engines] == before
    assert [engine.get("/ready").status_code for engine in engines] == [200, 200]  # nobody was left paused


KILLED, FROZEN, REFUSING = ("kill", "cannot be reached"), ("stop", "did not answer"), ("raise", "500 Internal Server Error")
# Of a bucket. Whoever answers nothing is waited for so long, once; whoever is gone or refuses, not at all.
FROZEN_DEADLINE_S, DEADLINE_S = 10.0, 60.0


@pytest.mark.parametrize(
    ("fault", "told", "fan_out"),
    [
        pytest.param(*KILLED, "each"),
        pytest.param(*REFUSING, "one"),
        pytest.param(*FROZEN, "one", marks=pytest.mark.soak),
        pytest.param(*FROZEN, "each", marks=pytest.mark.soak),
        pytest.param(*KILLED, "one", marks=pytest.mark.soak),
        pytest.param(*REFUSING, "each", marks=pytest.mark.soak),
    ],
)
def test_an_engine_that_fails_in_mid_broadcast_is_fenced_and_the_others_go_on(engines, model_dir, tmp_path, fault, told, fan_out):
    deadline_s = FROZEN_DEADLINE_S if fault == "stop" else DEADLINE_S
    number = 41 + 10 * ("kill", "stop", "raise").index(fault) + 5 * (fan_out == "one")
    first, second, third = (snapshot(model_dir, number + step) for step in range(3))

    async def main(publisher: Publisher) -> list[Published]:
        return [await publisher.publish(version) for version in (first, second)]

    # each snapshot has three buckets: it fails at the second version's second one
    with engine_process(model_dir, faults=f"engine.receive={fault}@5") as failing:
        all_engines = [engines[0], failing, engines[1]]
        before, after = publish(all_engines, model_dir, tmp_path, main, fan_out=fan_out, bucket_deadline_s=deadline_s)
        assert (before.engines, after.engines, list(after.fenced)) == ((0, 1, 2), (0, 2), [1])
        assert re.search(told, after.fenced[1])
        assert after.seconds < (2 * deadline_s if fault == "stop" else deadline_s / 2)
        assert [held(engine) for engine in engines] == [(str(second.version), second.checksum)] * 2
        if fault == "raise":  # it lives, and comes back
            path = save_snapshot(second, tmp_path / "kept", model_dir)

            async def back(publisher: Publisher) -> Published:
                clients = publisher.engines
                await publisher.cold_sync(clients[1], second.version, path)
                assert (await clients[1].model_info()).version == second.version
                return await publisher.publish(third)

            assert publish(all_engines, model_dir, tmp_path, back, fan_out=fan_out).engines == (0, 1, 2)
            assert held(failing) == (str(third.version), third.checksum)


@pytest.mark.parametrize("fan_out", ["each", "one"])
def test_engines_join_and_leave_between_versions(engines, model_dir, tmp_path, fan_out):
    versions = [snapshot(model_dir, number) for number in ((71, 72, 73) if fan_out == "each" else (74, 75, 76))]

    async def main(publisher: Publisher) -> Published:
        both = publisher.engines
        reached = []
        for some, version in zip((both[:1], both, both[1:]), versions, strict=True):
            publisher.set_engines(some)
            reached.append((await publisher.publish(version)).engines)
        assert reached == [(0,), (0, 1), (1,)]
        return await publisher.publish(versions[-1])

    publish(engines, model_dir, tmp_path, main, fan_out=fan_out)
    assert [held(engine)[0] for engine in engines] == [str(versions[1].version), str(versions[2].version)]


@pytest.mark.soak
def test_an_engine_that_leaves_in_mid_publishing_is_not_waited_for(engines, model_dir, tmp_path):
    wanted = snapshot(model_dir, 81)

    async def main(publisher: Publisher) -> Published:
        both, told = publisher.engines, []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: keep(publisher.publish(wanted), told))
            await trio.to_thread.run_sync(wait_for_version, engines[0], "81")
            publisher.set_engines(both[:1])  # the other one is frozen
        return told[0]

    with engine_process(model_dir, faults="engine.receive=stop@1") as frozen:
        published = publish([engines[0], frozen], model_dir, tmp_path, main, bucket_deadline_s=DEADLINE_S)
    assert (published.engines, published.fenced) == ((0,), {1: "it left while it was sent to"})
    assert published.seconds < DEADLINE_S / 2


def test_what_travels_as_bfloat16_is_held_as_its_float32(engines, model_dir, tmp_path):
    plain = [(name, tensor + 0.001) for name, tensor in load_file(model_dir / "model.safetensors").items()]
    rounded = Snapshot.of(91, 91, [plain], torch.bfloat16)
    published = publish(engines, model_dir, tmp_path, lambda publisher: publisher.publish(rounded))
    assert published.nbytes == sum(tensor.numel() for _, tensor in plain) * 2
    as_held = Snapshot.of(91, 91, [[(name, tensor.bfloat16()) for name, tensor in plain]], torch.float32)
    assert [held(engine) for engine in engines] == [("91", as_held.checksum)] * 2


def test_the_pause_an_engine_tells_is_that_of_its_commit(engines, model_dir, tmp_path):
    before = [told_pause_s(engine) for engine in engines]
    published = publish(engines, model_dir, tmp_path, lambda publisher: publisher.publish(snapshot(model_dir, 95)))
    grown = [told_pause_s(engine) - earlier for engine, earlier in zip(engines, before, strict=True)]
    assert [published.pause_s[0], published.pause_s[1]] == pytest.approx(grown)
    assert min(grown) > 0
    assert published.metrics["weights/pause_s"] == max(published.pause_s.values())


def told_pause_s(engine: httpx.Client) -> float:
    """How long generation has rested, as an engine tells."""
    told: float = engine.get("/server_info").json()["embedded"]["pause_s"]
    return told


async def keep(act: Awaitable[Published], into: list[Published]) -> None:
    into.append(await act)


def wait_for_version(engine: httpx.Client, version: str) -> None:
    deadline = time.monotonic() + 20.0
    while engine.get("/model_info").json()["weight_version"] != version:
        assert time.monotonic() < deadline, "it was not brought to it"
