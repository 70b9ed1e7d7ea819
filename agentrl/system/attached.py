"""Engines that a run uses and did not start (`engine.urls`): on the roster while they answer, never restarted and never stopped.

One that stops answering, or has other weights than the learner gave it, was restarted by somebody or is about to be: it leaves the roster,
and comes back under a new incarnation as soon as it answers, fenced until the learner has brought it the newest weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import trio

from agentrl.buffer_api import BufferClient, EngineEntry
from agentrl.config.recipe import Recipe
from agentrl.engine_api import EngineClient, ModelInfo
from agentrl.errors import ConfigError, EngineError
from agentrl.system.sglang import CONTEXT_MARGIN, require_abilities

__all__ = ["AttachedEngines"]

log = logging.getLogger(__name__)

ADMISSION_DEADLINE_S = 20.0
LOOK_DEADLINE_S = 5.0
MISSES = 3  # answers that fail to come in a row before an engine counts as gone: one may be late under load
_ROLE = "engine"
# Of config.json: what decides which weights there are, and their shapes.
_SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)


@dataclass
class _Attached:
    client: EngineClient
    incarnation: int | None = None  # None: it is not on the roster
    missed: int = 0


class AttachedEngines:
    """The servers of `engine.urls`. Their indexes are their places in it.

    Args:
        model_dir: of the run's model; a server of another is refused.
        next_incarnation: gives numbers larger than any before.
        connect: makes the client of an engine, from its URL and index.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        model_dir: Path,
        buffer: BufferClient,
        next_incarnation: Callable[[], int],
        connect: Callable[[str, int], EngineClient],
    ) -> None:
        self._model_dir = model_dir
        self._recipe, self._buffer, self._next_incarnation = recipe, buffer, next_incarnation
        self._engines = [_Attached(connect(url, index)) for index, url in enumerate(recipe.engine.urls)]

    async def admit(self) -> None:
        """Put all of them on the roster.

        Raises:
            ConfigError: one does not answer, or cannot do what the recipe asks; the message names its URL.
        """
        for engine in self._engines:
            try:
                await self._require(engine.client)
            except (EngineError, ConfigError) as error:
                raise ConfigError(f"engine.urls: {engine.client.url}: {error}") from error
            await self._register(engine)

    async def look(self, roster: Iterable[EngineEntry]) -> int:
        """Ask all of them once, and change the roster by what they say. Returns how many have left it."""
        told = {entry.index: entry for entry in roster}
        async with trio.open_nursery() as nursery:
            before = [engine.incarnation is not None for engine in self._engines]
            for engine in self._engines:
                nursery.start_soon(self._ask, engine, told.get(engine.client.index))
        return sum(was and engine.incarnation is None for was, engine in zip(before, self._engines, strict=True))

    async def aclose(self) -> None:
        """Close the connections. The servers go on."""
        for engine in self._engines:
            await engine.client.aclose()

    async def _ask(self, engine: _Attached, entry: EngineEntry | None) -> None:
        try:
            info = await engine.client.model_info(deadline_s=LOOK_DEADLINE_S)
        except EngineError as error:
            engine.missed += 1
            if engine.missed == MISSES:
                await self._leave(engine, str(error))
            return
        engine.missed = 0
        if engine.incarnation is None:
            log.warning("%s answers again: it is fenced until it has the newest weights", engine.client)
            await self._register(engine)
        elif entry is not None and entry.incarnation == engine.incarnation and _lost_weights(info, entry):
            await self._leave(engine, f"it has version {info.version} and not version {entry.version}, which it was given: it was restarted")

    async def _register(self, engine: _Attached) -> None:
        engine.incarnation = self._next_incarnation()
        await self._buffer.register(role=_ROLE, index=engine.client.index, incarnation=engine.incarnation, url=engine.client.url)

    async def _leave(self, engine: _Attached, reason: str) -> None:
        if engine.incarnation is not None:
            log.warning("%s is left: %s", engine.client, reason)
            await self._buffer.engine_died(engine.client.index, engine.incarnation)
            engine.incarnation = None

    async def _require(self, client: EngineClient) -> None:
        info = await client.server_info(deadline_s=ADMISSION_DEADLINE_S)
        _require_model(Path((await client.model_info(deadline_s=ADMISSION_DEADLINE_S)).model_path), self._model_dir)
        wanted = limit = self._recipe.rollout.limits.context_tokens
        if self._recipe.engine.kind == "sglang":
            require_abilities(info.version, self._recipe)
            wanted += CONTEXT_MARGIN
        if info.context_tokens is not None and info.context_tokens < wanted:
            raise ConfigError(
                f"its context is {info.context_tokens} tokens, and with rollout.limits.context_tokens {limit} it needs {wanted}: start it with"
                " more, or lower that"
            )


def _require_model(served: Path, ours: Path) -> None:
    """Refuse a model of other sizes: SGLang 0.5.23 ends when it is given weights that do not fit. One that is not seen from here passes."""
    try:
        theirs, mine = (json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (served, ours))
    except OSError:
        log.warning("the model that is served, %s, is not seen from here, and not compared with the run's", served)
        return
    for size in _SIZES:
        if theirs.get(size) != mine.get(size):
            raise ConfigError(
                f"it serves {served}, whose {size} is {theirs.get(size)}, and the run's model has {mine.get(size)}: start it with --model-path {ours}"
            )


def _lost_weights(info: ModelInfo, entry: EngineEntry) -> bool:
    """Whether it holds older weights than those it was brought to. Newer ones may be on their way."""
    return entry.current and entry.version is not None and (info.version is None or info.version < entry.version)
