"""An engine that takes part in updates: what it can do, how it is paused, and how it comes back to rest after a failure."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import trio

from agentrl.config.weights import WeightsRecipe
from agentrl.engine_api import EngineClient, ServerInfo
from agentrl.errors import AgentRLError, EngineError, PublishError

__all__ = ["CLEANUP_S", "Member", "if_stopped", "unless_refused"]

log = logging.getLogger(__name__)

CLEANUP_S = 1.5  # an engine that does not answer by then is left as it is: others wait for this
_INFO_S = 5.0
_OF_NOTHING = ("nothing",)  # checksums that no buckets have


class Member:
    """One engine in one publisher.

    Two kinds: an engine that stages weights generates until it commits them all at its `end`; one that does not (SGLang) writes each bucket
    into the live weights, so it is paused from before the first until after the last.
    """

    def __init__(self, engine: EngineClient, info: ServerInfo, recipe: WeightsRecipe) -> None:
        self.engine, self.info = engine, info
        self.staged = info.abilities.staged_update
        self.ranks = info.tensor_parallel
        self.pause_s = 0.0  # of generation, in the last update
        self._recipe = recipe
        self._paused_at: float | None = None
        self._told_pause_s = _told_pause_s(info)

    @classmethod
    async def introduced(cls, engine: EngineClient, recipe: WeightsRecipe) -> Member:
        """The member that `engine` is, as it tells."""
        return cls(engine, await engine.server_info(deadline_s=min(_INFO_S, recipe.deadline_s)), recipe)

    @property
    def kind(self) -> tuple[object, ...]:
        """Members of one kind have equal checksums of equal weights."""
        return self.staged, self.ranks, self.info.version, self.info.raw.get("dtype"), self.info.raw.get("quantization")

    async def open(self) -> None:
        """Everything before the first bucket."""
        if not self.staged:
            await self._pause()
        if self.info.abilities.update_session:
            await self.engine.begin_update(deadline_s=self._recipe.deadline_s)

    async def close(self, checksums: Sequence[str]) -> None:
        """Everything after the last bucket: from here on the engine computes with the new weights. It is told what the buckets' checksums were."""
        # A commit is a pause of its own and drops what was computed under older weights, as `retract` does.
        if self.staged and self._recipe.pause != "retract":
            await self._pause()
        if self.info.abilities.update_session:
            await self.engine.end_update(checksums=checksums if self.staged else None, deadline_s=self._recipe.deadline_s)
        await self.resume()

    async def load(self, path: str, version: int) -> None:
        """A version from disk, whatever the engine was left in. Where it fails it stays paused."""
        async with if_stopped(self._let_go):
            await self.engine.pause("retract", deadline_s=self._recipe.deadline_s)
            await self._drop(self._recipe.deadline_s)
            self._paused_at = time.perf_counter()
            await self.engine.update_from_disk(path, version=version, deadline_s=self._recipe.deadline_s)
            await self.resume()

    async def resume(self) -> None:
        """Generate again."""
        if self._paused_at is not None:
            await self.engine.continue_(deadline_s=self._recipe.deadline_s)
            self.pause_s, self._paused_at = time.perf_counter() - self._paused_at, None

    async def settle(self, *, whole: bool) -> None:
        """After a failure: no session is left open, and nothing of it is committed. It generates on only where no half version can be in it; else
        it stays paused."""
        with trio.move_on_after(CLEANUP_S):
            await self._drop(CLEANUP_S)
            if self.staged or whole:
                await unless_refused(self.resume)

    async def settle_stopped(self) -> None:
        """After the run was stopped in mid-update: as `settle`, but it generates on in any case, for nobody would come to wake it."""
        with trio.move_on_after(CLEANUP_S):
            await self._drop(CLEANUP_S)
        if self._paused_at is not None:
            await self._let_go()

    async def confirm(self, version: int) -> None:
        """Hear of the engine that it is at `version`, and how long it paused where it knows better than we do.

        Raises:
            PublishError: it is at another.
        """
        if (told := (await self.engine.model_info()).version) != version:
            raise PublishError(f"{self.engine} reports version {told} after version {version} was published")
        if self._told_pause_s is not None and (told_s := _told_pause_s(await self.engine.server_info())) is not None:
            self.pause_s, self._told_pause_s = told_s - self._told_pause_s, told_s

    async def _drop(self, deadline_s: float) -> None:
        """End a session that may be open. One that is staged may be whole, and must not be committed unchecked."""
        if self.info.abilities.update_session:
            await unless_refused(lambda: self.engine.end_update(checksums=_OF_NOTHING if self.staged else None, deadline_s=deadline_s))

    async def _let_go(self) -> None:
        with trio.move_on_after(CLEANUP_S):
            await unless_refused(self.engine.continue_)

    async def _pause(self) -> None:
        self._paused_at = time.perf_counter()
        await self.engine.pause(self._recipe.pause, deadline_s=self._recipe.deadline_s)


@asynccontextmanager
async def if_stopped(undo: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """What neither comes to its end nor fails is stopped from outside: it is undone."""
    stopped = True
    try:
        yield
        stopped = False
    except AgentRLError:
        stopped = False
        raise
    finally:
        if stopped:
            with trio.CancelScope(shield=True):
                await undo()


async def unless_refused(act: Callable[[], Awaitable[None]]) -> None:
    """What is done for tidiness may fail."""
    try:
        await act()
    except EngineError as error:
        log.debug("settling an engine after a failed update: %s", error)


def _told_pause_s(info: ServerInfo) -> float | None:
    counted = info.raw.get("embedded")
    if not isinstance(counted, dict) or "pause_s" not in counted:
        return None
    return float(counted["pause_s"]) - float(counted.get("asleep_s", 0.0))  # asleep it rests for the learner, not for us
