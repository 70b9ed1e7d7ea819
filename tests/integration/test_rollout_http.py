"""A rollout worker over real sockets: the embedded engine with a tiny model of random weights, and the real replay buffer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from agentrl.buffer_api import BufferClient
from agentrl.config.recipe import Architecture, LimitsRecipe, RolloutRecipe
from agentrl.engine_api import EngineClient
from agentrl.env import Environment, Observation, StepResult
from agentrl.rollout.tokens import TokenEncoder
from agentrl.rollout.worker import RolloutWorker
from agentrl.system.http import serve_app
from agentrl.system.process import StopSignal
from agentrl.testing.buffer import FakeBuffer
from agentrl.testing.tokenizer import byte_tokenizer, write_tokenizer
from agentrl.types import StopReason, Task, Trajectory
from agentrl.wire import decode_trajectory

pytestmark = pytest.mark.slow

TINY = Architecture(hidden_size=32, intermediate_size=64, layers=1, heads=2, kv_heads=1, max_positions=256, initializer_range=0.3)
RECIPE = RolloutRecipe(concurrency=8, limits=LimitsRecipe(prompt_tokens=100, completion_tokens=40, observation_tokens=20, context_tokens=200))


class Talk(Environment):
    """Answers up to two completions that end at a vowel. A model of random weights plays it well enough."""

    stop_strings = ("a", "e")

    async def start(self, task: Task) -> Observation:
        self.turns = 0
        return Observation.user(task.prompt)

    async def step(self, completion: str) -> StepResult:
        self.turns += 1
        if self.turns == 3:
            return StepResult(stop=StopReason.TURN_LIMIT, parts={"length": float(len(completion))})
        return StepResult(observation=Observation.framed("<", "said <|im_end|> so", ">"), action="talk")


@contextmanager
def serving(app: Any) -> Iterator[str]:
    stop, ready, url = StopSignal(), threading.Event(), []
    server = threading.Thread(target=serve_app, args=(app,), kwargs={"on_ready": lambda info: (url.append(info["url"]), ready.set()), "stop": stop})
    server.start()
    try:
        assert ready.wait(30)
        yield url[0]
    finally:
        stop.set()
        server.join(30)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from agentrl.learner.build_model import make_model

    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(byte_tokenizer(), folder / "tokenizer", chat=True)
    return make_model(TINY, folder / "tokenizer", folder / "model", seed=1)


@pytest.fixture(scope="module")
def engine_url(model_dir: Path) -> Iterator[str]:
    from agentrl.engine.app import EngineServer

    with serving(EngineServer(model_dir, slots=8, context_tokens=256, deterministic=True).app) as url:
        yield url


async def work(client: Any, url: str, model_dir: Path) -> None:
    encoder = TokenEncoder.load(model_dir)
    async with EngineClient(url) as engine:
        await RolloutWorker(client=client, engines=[engine], environment=Talk, encoder=encoder, recipe=RECIPE).run()


def play(url: str, model_dir: Path, disturb: Any = None) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        buffer = FakeBuffer([Task(id=str(number), prompt=f"Question {number}") for number in range(6)], samples=4)
        with trio.fail_after(60):
            async with EngineClient(url) as control, trio.open_nursery() as nursery:
                if disturb is not None:
                    nursery.start_soon(disturb, control)
                await work(buffer, url, model_dir)
                nursery.cancel_scope.cancel()
        assert [outcome.cause for outcome in buffer.outcomes if outcome.trajectory is None] == []
        return sorted(buffer.trajectories, key=lambda trajectory: trajectory.ticket)

    return trio.run(main)


def test_turns_that_are_aborted_again_and_again_come_out_token_for_token_as_undisturbed_ones(engine_url: str, model_dir: Path) -> None:
    aborted = 0

    async def disturb(control: EngineClient) -> None:
        nonlocal aborted
        while True:
            await control.abort_all()
            aborted += 1
            await trio.sleep(0.03)

    calm, disturbed = play(engine_url, model_dir), play(engine_url, model_dir, disturb)
    assert aborted > 3
    assert [t.token_ids.tolist() for t in disturbed] == [t.token_ids.tolist() for t in calm]
    assert [t.loss_mask.tolist() for t in disturbed] == [t.loss_mask.tolist() for t in calm]
    for one, other in zip(disturbed, calm, strict=True):
        np.testing.assert_allclose(one.behaviour_logprobs, other.behaviour_logprobs, atol=1e-4)
    assert len({tuple(t.token_ids.tolist()) for t in calm}) > 12  # samples of one task differ
    assert max(len(t.turns) for t in calm) == 3


def test_episodes_go_on_while_the_weights_get_a_new_name(engine_url: str, model_dir: Path) -> None:
    async def publish(control: EngineClient) -> None:
        for version in range(1, 100):
            await trio.sleep(0.05)
            with trio.CancelScope(shield=True):  # the end of the episodes leaves no paused engine behind
                await control.pause("retract")
                await control.update_from_disk(str(model_dir), version=version)
                await control.continue_()

    played = play(engine_url, model_dir, publish)
    assert any(trajectory.version_count > 1 for trajectory in played)
    for trajectory in played:
        written = trajectory.versions[trajectory.loss_mask == 1]
        assert (np.diff(written) >= 0).all()


def test_a_worker_feeds_the_replay_buffer_and_ends_when_the_run_is_stopped(engine_url: str, model_dir: Path, tmp_path: Path) -> None:
    from agentrl.buffer.app import create_app
    from agentrl.buffer.buffer import BufferSettings, ReplayBuffer

    class Tasks:
        size = 100

        def task(self, ordinal: int) -> Task:
            return Task(id=f"t{ordinal}", prompt=f"Question {ordinal}")

    settings = BufferSettings(group_size=2, groups_per_batch=2, max_staleness=1, total_steps=3, debug=True)
    buffer = ReplayBuffer(tmp_path / "journal", settings, tasks=Tasks(), incarnation=1, run=1)

    async def main(url: str) -> list[Trajectory]:
        with trio.fail_after(60):
            async with (
                BufferClient(url, role="learner", index=0, incarnation=1) as learner,
                BufferClient(url, role="worker", index=0, incarnation=1) as client,
                trio.open_nursery() as nursery,
            ):
                version = await learner.reserve_version(reason="initial")
                async with EngineClient(engine_url) as engine:
                    await engine.update_from_disk(str(model_dir), version=version)
                await learner.version_published(version=version, engines=[0], seconds=0.1, bytes=1)
                nursery.start_soon(work, client, engine_url, model_dir)
                batch = await learner.take_batch(number=0, wait_s=30)
                await learner.stop("enough")  # the worker ends by itself, and with it the nursery
        assert batch is not None
        return [decode_trajectory(data) for group in batch.groups for data in group]

    with serving(create_app(buffer)) as url:
        batch = trio.run(main, url)
    assert len({trajectory.ticket.ordinal for trajectory in batch}) == 2  # whole groups
    assert [trajectory.ticket.k for trajectory in batch] == [0, 1, 0, 1]
    assert all(trajectory.generated and trajectory.turns for trajectory in batch)
