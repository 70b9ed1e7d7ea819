"""The rollout worker's program: a trio loop of episodes, at the engines the buffer's roster names."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import trio

from agentrl.buffer_api import BufferClient
from agentrl.config.recipe import Recipe
from agentrl.env import Environment
from agentrl.errors import ConfigError, StaleIncarnation
from agentrl.resolve import origin, resolve
from agentrl.rollout.fleet import Fleet
from agentrl.rollout.tokens import TokenEncoder
from agentrl.rollout.worker import RolloutWorker
from agentrl.system.engines import engine_clients
from agentrl.system.process import OnReady, ProcessSpec, StopSignal
from agentrl.system.retriever_token import keep_token

__all__ = ["environment_factory", "main"]

ROSTER_POLL_S = 30.0  # one long poll; the next follows at once


def main(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    """Play episodes until the tickets end. Payload: buffer, model_dir, retriever_url, retriever_token, environment_file."""
    keep_token(spec.payload["retriever_token"])
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
    fleet = Fleet(first=spec.index, connect=engine_clients(recipe, vocab_size=_known_ids(Path(payload["model_dir"]))))
    async with (
        BufferClient(payload["buffer"], role=spec.role, index=spec.index, incarnation=spec.incarnation) as client,
        trio.open_nursery() as nursery,
    ):
        stop.cancels(nursery.cancel_scope)
        worker = RolloutWorker(
            client=client,
            engines=fleet,
            environment=environment,
            encoder=encoder,
            recipe=recipe.rollout,
            index=spec.index,
            incarnation=spec.incarnation,
            prefixes_apart=recipe.weights.pause == "in_place",
        )
        nursery.start_soon(_follow_roster, client, fleet)
        on_ready({})
        await worker.run()
        nursery.cancel_scope.cancel()


def _known_ids(model_dir: Path) -> int:
    """Rows of the model's embedding: an id beyond them ends a whole SGLang server. The tokenizer may have fewer, and a policy may write them all."""
    rows: int = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return rows


async def _follow_roster(client: BufferClient, fleet: Fleet) -> None:
    """Keep the fleet as the roster is.

    consumes      the buffer's roster of engines
    produces      seats at current engines; the end of requests to others
    waits for     a change of the roster
    unblocked by  cancellation at the end of the tickets
    """
    revision = 0
    while True:
        try:
            roster = await client.engines(after=revision, wait_s=ROSTER_POLL_S)
        except StaleIncarnation:
            return  # a newer incarnation took over: the worker's own calls are answered the same, and end it
        revision = roster.revision
        for gone in fleet.update(roster.engines):
            await gone.aclose()
