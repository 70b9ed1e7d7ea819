"""Whose turn it is where engines and learner ranks share GPUs: the engines', or the learner's while it trains.

rank 0    what was handed over is out ─> engines fall asleep ─┐                         ┌─> engines wake up
all ranks                                                 told: asleep ─> train ─> told: done
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal

import torch
import trio

from agentrl.config.recipe import Recipe
from agentrl.record import record
from agentrl.system.publishing import Publishing

__all__ = ["Turns", "engines_sleep"]


class Turns:
    """The turns of one learner rank.

    Args:
        agree: tells rank 0's value to all ranks: a collective.
        round_s: rank 0 lets the others know so often that it still waits: less than a collective may take.
    """

    def __init__(self, agree: Callable[[float], float], *, round_s: float) -> None:
        self._agree, self._round_s = agree, round_s

    @asynccontextmanager
    async def training(self, publishing: Publishing | None) -> AsyncIterator[None]:
        """The learner's turn: inside, no engine uses a GPU. All ranks enter and leave together; whatever happens inside, the engines wake up.

        Args:
            publishing: on rank 0 alone.
        """
        if publishing is None:
            while not await self._told(0.0):
                pass  # rank 0 waits still
            yield
            await self._done()
            return
        began = time.monotonic()
        try:
            await self._lie_down(publishing)
            slept = time.monotonic()
            yield
            await self._done()
        finally:
            await publishing.rise()
        record("seconds/asleep", time.monotonic() - slept)
        record("seconds/fall_asleep", slept - began)

    async def _lie_down(self, publishing: Publishing) -> None:
        asleep = trio.Event()

        async def lie_down() -> None:
            await publishing.lie_down()
            asleep.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lie_down)
            told = False
            while not told:
                with trio.move_on_after(self._round_s):
                    await asleep.wait()
                told = await self._told(float(asleep.is_set()))

    async def _done(self) -> None:
        """Wait for every rank to be through, with what its GPU's memory was cached for."""
        if torch.cuda.is_available() and torch.cuda.memory_reserved():
            torch.cuda.empty_cache()
        await self._told(1.0)

    async def _told(self, value: float) -> bool:
        return bool(await trio.to_thread.run_sync(self._agree, value))


def engines_sleep(recipe: Recipe) -> Literal["release", "pause"] | None:
    """How a recipe's engines sleep while the learner trains: None where they do not. An SGLang on a CPU frees nothing and is paused only."""
    if not recipe.resources.colocate:
        return None
    return "pause" if recipe.engine.kind == "sglang" and recipe.engine.device == "cpu" else "release"
