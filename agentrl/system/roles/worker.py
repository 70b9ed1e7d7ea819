"""The rollout worker's program: a trio loop of episodes."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import trio

from agentrl.buffer_api import BufferClient
from agentrl.config.recipe import Recipe
from agentrl.engine_api import EngineClient
from agentrl.env import Environment
from agentrl.errors import ConfigError
from agentrl.resolve import origin, resolve
from agentrl.rollout.tokens import TokenEncoder
from agentrl.rollout.worker import RolloutWorker
from agentrl.system.process import OnReady, ProcessSpec, StopSignal

__all__ = ["environment_factory", "main"]


def main(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    """Play episodes until the tickets end. Payload: buffer, engines, model_dir, retriever_url, environment_file."""
    trio.run(_main, spec, on_ready, stop)


def environment_factory(recipe: Recipe, *, retriever_url: str | None, expected_file: str | None = None) -> partial[Environment]:
    """What makes an environment per episode: the recipe's class with its options, and the retriever's URL where there is a retriever.

    Raises:
        ConfigError: `module:Class` is another file here than in the driver: a folder of the same name shadows it.
    """
    factory: Any = resolve(recipe.env.factory)
    found = origin(factory)
    if expected_file is not None and found != expected_file:
        raise ConfigError(f"env.factory {recipe.env.factory} is {found} in this process but {expected_file} in the driver: one shadows the other")
    options = dict(recipe.env.options)
    if retriever_url is not None:
        options.setdefault("retriever_url", retriever_url)
    return partial(factory, **options)


async def _main(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    recipe, payload = Recipe.model_validate(spec.recipe), spec.payload
    environment = environment_factory(recipe, retriever_url=payload["retriever_url"], expected_file=payload["environment_file"])
    encoder = TokenEncoder.load(Path(payload["model_dir"]))
    with trio.CancelScope() as scope:
        stop.cancels(scope)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(BufferClient(payload["buffer"], role=spec.role, index=spec.index, incarnation=spec.incarnation))
            engines = [await stack.enter_async_context(EngineClient(url, index)) for index, url in enumerate(payload["engines"])]
            worker = RolloutWorker(
                client=client,
                engines=engines,
                environment=environment,
                encoder=encoder,
                recipe=recipe.rollout,
                index=spec.index,
                incarnation=spec.incarnation,
            )
            on_ready({})
            await worker.run()
