"""The two calls by which the engine gives its memory to whoever shares its GPU, and takes it back.

    paused by retract or abort ──release──> asleep: keys, values and captured steps are gone, the weights wait in host memory ──resume──> paused

While it sleeps requests come in and wait, and updates of the weights are refused. On a CPU the weights lie in host memory anyway and stay there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from agentrl.engine.scheduler import PARTS, Scheduler
from agentrl.engine.thread import EngineThread
from agentrl.engine.updates import WeightUpdates
from agentrl.errors import EngineRefused

__all__ = ["Sleep"]


class Sleep:
    """Operations on request bodies: {} or {"tags": [...]}, of "kv_cache", "cuda_graph" and "weights". Lives on one event loop."""

    def __init__(self, scheduler: Scheduler, thread: EngineThread, updates: WeightUpdates) -> None:
        self._scheduler, self._thread, self._updates = scheduler, thread, updates
        self._turn = asyncio.Lock()

    async def release(self, body: Mapping[str, Any]) -> None:
        """Give the memory of the parts away. What is given away already is left as it is."""
        parts = _parts(body)
        async with self._turn:
            self._updates.require_rest()
            new = parts - self._scheduler.asleep
            await asyncio.wrap_future(self._thread.call(lambda: self._scheduler.fall_asleep(new)))
            await self._updates.give_away(weights="weights" in new)

    async def resume(self, body: Mapping[str, Any]) -> None:
        """Have the memory of the parts again, with the weights that were there. Harmless where they are awake."""
        parts = _parts(body)
        async with self._turn:
            if "weights" in parts:
                await self._updates.take_back()
            await asyncio.wrap_future(self._thread.call(lambda: self._scheduler.wake_up(parts)))


def _parts(body: Mapping[str, Any]) -> frozenset[str]:
    tags = body.get("tags")
    if tags is None:
        return PARTS
    if not isinstance(tags, list) or not tags or not PARTS.issuperset(map(str, tags)):
        raise EngineRefused(f"tags must be a list of some of {sorted(PARTS)}, got {tags!r}")
    return frozenset(map(str, tags))
