"""Bringing a snapshot to every engine: by a process group (NCCL, gloo) or by disk.

    begin ─> buckets by broadcast ─> [pause ─> end ─> continue] ─> checksums     engines that stage updates: paused for the commit only
    pause ─> begin ─> buckets ─> end ─> continue ─> checksums                    engines that do not (SGLang)

A version's reservation is in the journal before the first byte leaves. After any failure the group is destroyed everywhere and formed anew,
under a fresh name and port; then the version is sent once more. No engine goes on with half a version: it is paused until its `end`.
"""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
import trio

from agentrl.collective import broadcast, join_update_group, leave_update_group
from agentrl.config.recipe import WeightsRecipe
from agentrl.engine_api import EngineClient, WeightBucket
from agentrl.errors import AgentRLError, EngineError, PublishError
from agentrl.weights.snapshot import Snapshot, save_snapshot

__all__ = ["Published", "Publisher"]

log = logging.getLogger(__name__)

_ATTEMPTS = 2  # a group may break once per version without anybody being to blame
_CLEANUP_DEADLINE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A version that every engine reports."""

    version: int
    engines: tuple[int, ...]
    fenced: Mapping[int, str] = field(default_factory=dict)
    seconds: float
    nbytes: int


class Publisher:
    """Publishes snapshots to a fixed set of engines, one at a time. For use under trio, on learner rank 0.

    Args:
        model_dir: where the files besides the weights are taken from when a version goes by disk.
        directory: where versions that go by disk are written.
        device_backend: "nccl" or "gloo", what `backend: auto` means here.
    """

    def __init__(self, recipe: WeightsRecipe, *, model_dir: Path, directory: Path, device_backend: str = "gloo") -> None:
        self._engines: tuple[EngineClient, ...] = ()
        self._recipe = recipe
        self._model_dir, self._directory = model_dir, directory
        self._backend = device_backend if recipe.backend == "auto" else recipe.backend
        self._epochs = itertools.count()
        self._group: _Group | None = None
        self._staged: dict[int, bool] = {}
        self._stale = False

    def set_engines(self, clients: Sequence[EngineClient]) -> None:
        """The engines of the next publishing."""
        if {id(client) for client in clients} != {id(engine) for engine in self._engines}:
            self._stale = self._stale or self._group is not None
            self._engines = tuple(clients)

    async def cold_sync(self, engine: EngineClient, version: int, path: Path) -> None:
        """Have one engine load a Hugging Face directory as `version`."""
        await engine.update_from_disk(str(path), version=version, deadline_s=self._recipe.deadline_s)

    async def cold_start(self, version: int, path: Path) -> Published:
        """Have every engine load a Hugging Face directory as `version`: initial and restored weights."""
        started = time.monotonic()
        await self._each(lambda engine: engine.update_from_disk(str(path), version=version, deadline_s=self._recipe.deadline_s))
        await self._verify_version(version)
        return self._published(version, started, await trio.to_thread.run_sync(_weight_bytes, path))

    async def publish(self, snapshot: Snapshot) -> Published:
        """Bring every engine to `snapshot`.

        Raises:
            PublishError: an engine could not be brought to it, in two attempts.
        """
        started = time.monotonic()
        if self._stale:
            await self._abandon_group()
            self._stale = False
        for attempt in range(_ATTEMPTS):
            try:
                await self._send(snapshot)
                await self._verify(snapshot)
                return self._published(snapshot.version, started, snapshot.nbytes)
            except* (AgentRLError, RuntimeError, OSError, trio.TooSlowError) as errors:  # what engines, gloo and the network raise
                await self._abandon_group()
                reasons = "; ".join(dict.fromkeys(str(error) for error in _leaves(errors)))
                if attempt + 1 == _ATTEMPTS:
                    raise PublishError(f"version {snapshot.version} could not be brought to every engine: {reasons}") from errors
                log.warning("publishing version %d failed, trying once more: %s", snapshot.version, reasons)
        raise AssertionError("unreachable")

    async def aclose(self) -> None:
        """Leave the group and close the engines' connections."""
        await self._abandon_group()
        for engine in self._engines:
            await engine.aclose()

    async def _send(self, snapshot: Snapshot) -> None:
        with trio.fail_after(self._recipe.deadline_s):
            if self._recipe.transport == "disk":
                path = await trio.to_thread.run_sync(save_snapshot, snapshot, self._directory / f"v{snapshot.version}", self._model_dir)
                await self._each(lambda engine: self._paused(engine, lambda: engine.update_from_disk(str(path), version=snapshot.version)))
                return
            group = await self._formed_group()
            await self._each(self._note_staging)
            live = [engine for engine in self._engines if not self._staged[engine.index]]
            await self._each(lambda engine: engine.pause(self._recipe.pause), live)
            await self._each(lambda engine: engine.begin_update())
            for bucket in snapshot.buckets:
                last = bucket is snapshot.buckets[-1]
                await self._broadcast(group, bucket.header, bucket.flat, snapshot.version if last else None)
            await self._each(self._end)
            await self._each(lambda engine: engine.continue_(), live)

    async def _end(self, engine: EngineClient) -> None:
        if self._staged[engine.index]:
            await self._paused(engine, engine.end_update)
        else:
            await engine.end_update()

    async def _paused(self, engine: EngineClient, act: Callable[[], Awaitable[None]]) -> None:
        await engine.pause(self._recipe.pause)
        try:
            await act()
        finally:
            with trio.CancelScope(shield=True):
                await engine.continue_()

    async def _note_staging(self, engine: EngineClient) -> None:
        if engine.index not in self._staged:
            self._staged[engine.index] = (await engine.server_info()).staged_update

    async def _broadcast(self, group: _Group, bucket: WeightBucket, flat: Any, version: int | None) -> None:
        """One bucket: the engines' calls and our end of the collective at the same time."""
        deadline_s = self._recipe.deadline_s
        async with trio.open_nursery() as nursery:
            for engine in self._engines:
                nursery.start_soon(
                    _call,
                    lambda engine=engine: engine.update_from_distributed(
                        bucket, group=group.name, version=version, flush_cache=version is not None, deadline_s=deadline_s
                    ),
                )
            # Abandoned on cancellation: gloo has no way to give up a collective but its own deadline.
            await trio.to_thread.run_sync(group.broadcast, flat, abandon_on_cancel=True)

    async def _formed_group(self) -> _Group:
        if self._group is not None:
            return self._group
        port, epoch = _free_port(), next(self._epochs)
        group = _Group(
            name=f"weights-{epoch}-{port}", port=port, world=1 + len(self._engines), backend=self._backend, timeout_s=self._recipe.deadline_s
        )
        self._group = group  # before it is whole: what fails from here on is cleaned up with it
        async with trio.open_nursery() as nursery:
            for rank, engine in enumerate(self._engines, start=1):
                nursery.start_soon(_call, lambda engine=engine, rank=rank: group.invite(engine, rank))
            await trio.to_thread.run_sync(group.join, abandon_on_cancel=True)
        return group

    async def _abandon_group(self) -> None:
        """Destroy the group everywhere; engines that are gone or never joined do not matter, nor does one keep the others waiting.

        An engine without staged updates stays paused: it may hold half a version, until the next attempt brings it a whole one.
        """
        group, self._group = self._group, None

        async def clean(engine: EngineClient) -> None:
            with trio.move_on_after(_CLEANUP_DEADLINE_S):
                await _unless_refused(engine.end_update)
                if self._staged.get(engine.index, True):
                    await _unless_refused(engine.continue_)
                if group is not None:
                    await _unless_refused(lambda: engine.destroy_group(group.name))

        with trio.CancelScope(shield=True):
            await self._each(clean)
            if group is not None:
                with trio.move_on_after(_CLEANUP_DEADLINE_S):
                    await trio.to_thread.run_sync(group.leave, abandon_on_cancel=True)

    async def _verify(self, snapshot: Snapshot) -> None:
        """Every engine holds exactly these bytes: ours are compared with what was sent, others with each other."""
        await self._verify_version(snapshot.version)
        sums: dict[int, str] = {}

        async def ask(engine: EngineClient) -> None:
            sums[engine.index] = (await engine.weights_checksum()).engine

        await self._each(ask)
        for engine in self._engines:
            expected = snapshot.checksum if self._staged.get(engine.index) else sums[self._engines[0].index]
            if sums[engine.index] != expected:
                raise PublishError(
                    f"{engine} holds other weights than version {snapshot.version}: checksum {sums[engine.index]}, expected {expected}"
                )

    async def _verify_version(self, version: int) -> None:
        async def ask(engine: EngineClient) -> None:
            if (told := (await engine.model_info()).version) != version:
                raise PublishError(f"{engine} reports version {told} after version {version} was published")

        await self._each(ask)

    async def _each(self, act: Callable[[EngineClient], Awaitable[None]], engines: Sequence[EngineClient] | None = None) -> None:
        async with trio.open_nursery() as nursery:
            for engine in self._engines if engines is None else engines:
                nursery.start_soon(_call, lambda engine=engine: act(engine))

    def _published(self, version: int, started: float, nbytes: int) -> Published:
        engines = tuple(engine.index for engine in self._engines)
        return Published(version=version, engines=engines, seconds=time.monotonic() - started, nbytes=nbytes)


@dataclass
class _Group:
    """Our end of a weight-update group: rank 0."""

    name: str
    port: int
    world: int
    backend: str
    timeout_s: float
    address: str = "127.0.0.1"
    handle: dist.ProcessGroup | None = None

    async def invite(self, engine: EngineClient, rank: int) -> None:
        await engine.init_group(
            address=self.address,
            port=self.port,
            rank_offset=rank,
            world_size=self.world,
            group=self.name,
            backend=self.backend,
            deadline_s=self.timeout_s,
        )

    def join(self) -> None:
        self.handle = join_update_group(
            master_address=self.address,
            master_port=self.port,
            rank=0,
            world_size=self.world,
            group_name=self.name,
            backend=self.backend,
            timeout_s=self.timeout_s,
        )

    def broadcast(self, flat: Any) -> None:
        assert self.handle is not None
        tensor = flat.cuda() if self.backend == "nccl" else flat
        broadcast(tensor, self.handle)

    def leave(self) -> None:
        """Engines that wait in the group are freed when the last reference to our end goes: none is kept here."""
        handle, self.handle = self.handle, None
        if handle is not None:
            leave_update_group(handle)


async def _unless_refused(act: Callable[[], Awaitable[None]]) -> None:
    try:
        await act()
    except EngineError as error:
        log.debug("cleaning up after a failed update: %s", error)


async def _call(act: Callable[[], Awaitable[None]]) -> None:
    await act()


def _weight_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def _free_port() -> int:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
