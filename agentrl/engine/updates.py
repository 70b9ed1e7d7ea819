"""New weights while tokens are made: received into staging, checked, and committed whole between two decode steps.

    group: init ───────────────────────────────────────────> destroy
    session:      begin ── bucket, bucket, ... (staged) ── end: commit

Each piece of a bucket is taken in by a thread of its own (agentrl.engine.intake) while the next one comes.
Nothing reaches the live weights before `end`. A session with a failed or unfinished bucket, whose group was destroyed meanwhile, or that
never named a version, commits nothing: so ending a broken update is always safe.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.collective import CHECKED_BYTES, broadcast, broadcast_pieces, join_update_group, leave_update_group, torch_dtype
from agentrl.engine.architecture import ModelConfig
from agentrl.engine.intake import Announced, Intake
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.thread import EngineThread
from agentrl.engine.weights import read_tensors
from agentrl.errors import EngineError, EngineRefused, PublishError
from agentrl.faults import point

__all__ = ["WeightUpdates"]

GROUP_TIMEOUT_S = 60.0  # a member of a group that waits for a dead peer waits this long, unless the request says otherwise
LEAVE_WAIT_S = 1.0  # a group in which a collective hangs is left in the background, when its timeout has passed
NOT_IN_SESSION = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"


@dataclass(kw_only=True, slots=True)
class _Session:
    """What has been received between `begin` and now."""

    names: set[str] = field(default_factory=set)
    intakes: list[Future[str]] = field(default_factory=list)  # each gives the checksum of a bucket's bytes
    version: str | None = None
    groups: set[str] = field(default_factory=set)
    broken: str = ""  # why nothing of it may be committed
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # the members of a group must agree on the order of collectives


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """What one update request announces."""

    announced: Announced
    flattened: bool
    piece_bytes: int  # of each broadcast of a flattened one


class WeightUpdates:
    """Groups, the open session, and the way of tensors into the scheduler. Lives on one event loop; blocking work runs in threads."""

    def __init__(self, scheduler: Scheduler, thread: EngineThread) -> None:
        self._scheduler = scheduler
        self._thread = thread
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._session: _Session | None = None
        self._loading = 0  # updates from disk
        self._intake = Intake(scheduler.runner.weights)

    @property
    def state(self) -> str:
        """Of the weight update: "closed", "open", or "receiving" a bucket."""
        if self._session is None:
            return "closed"
        return "receiving" if self._session.turn.locked() else "open"

    async def stop(self) -> None:
        """Nothing is updated from now on."""
        await asyncio.to_thread(self._intake.close)

    def require_rest(self) -> None:
        """Raise EngineRefused while an update is under way."""
        if self._session is not None or self._loading:
            raise EngineRefused("memory is not released while weights are updated: end the update first")

    async def give_away(self, *, weights: bool) -> None:
        """Memory of the spare and, with `weights`, of the live weights; the scheduler is asleep."""
        await asyncio.wrap_future(self._intake.give_away(weights=weights))

    async def take_back(self) -> None:
        """Have the live weights again."""
        await asyncio.wrap_future(self._intake.take_back())

    async def join(self, body: Mapping[str, Any]) -> str:
        """Form a group with a learner that forms it at the same time."""
        name = _text(body, "group_name")
        if name in self._groups:
            raise EngineRefused(f"group {name!r} exists already; destroy it first")
        world, rank = _number(body, "world_size"), _number(body, "rank_offset")
        if not 0 < rank < world:
            raise EngineRefused(f"rank_offset must be from 1 to world_size - 1 = {world - 1}, got {rank}")
        self._groups[name] = await asyncio.to_thread(
            join_update_group,
            master_address=_text(body, "master_address"),
            master_port=_number(body, "master_port"),
            rank=rank,
            world_size=world,
            group_name=name,
            backend=body.get("backend") or "nccl",
            timeout_s=_seconds(body.get("timeout_s")),
        )
        return "Succeeded to initialize custom process group."

    async def leave(self, body: Mapping[str, Any]) -> str:
        """Drop a group; a session that received from it will commit nothing."""
        name = _text(body, "group_name")
        group = self._groups.pop(name, None)
        if group is None:
            raise EngineRefused("The group to be destroyed does not exist.")
        if self._session is not None and name in self._session.groups:
            self._session.broken = f"its group {name!r} was destroyed before its end"
        leaving = asyncio.get_running_loop().run_in_executor(None, leave_update_group, group)
        del group
        await asyncio.wait((leaving,), timeout=LEAVE_WAIT_S)
        return "Succeeded to destroy custom process group."

    async def begin(self) -> str:
        """Open a session."""
        self._require_awake()
        if self._session is not None:
            raise EngineRefused("begin_weight_update(): a weight update is already open; end it first")
        self._session = _Session()
        return "Success"

    async def receive(self, body: Mapping[str, Any]) -> str:
        """Receive one bucket into staging; generation goes on."""
        session = self._session
        if session is None:
            raise EngineRefused(NOT_IN_SESSION)
        self._require_awake()
        bucket, name, version = self._checked(body), _text(body, "group_name"), _optional_text(body, "weight_version")
        async with session.turn:
            if name not in self._groups:
                raise EngineRefused(f"group {name!r} does not exist: it was destroyed, or never initialised")
            session.groups.add(name)
            point("engine.receive")
            try:
                for earlier in session.intakes[:-1]:  # memory: two buckets
                    await asyncio.wrap_future(earlier)
                taken = await asyncio.to_thread(self._receive, bucket, self._groups[name], session)
                self._check_flush(body)
            except (EngineRefused, PublishError) as error:
                session.broken = session.broken or str(error)
                raise
            if session is self._session and not session.broken:
                session.intakes.append(taken)
                session.names |= {name for name in bucket.announced.names if not self._scheduler.runner.weights.is_tied_head(name)}
            session.version = version if version is not None else session.version
        return "Succeeded to update parameter online." + (f" Weight version updated to {version}." if version is not None else "")

    async def end(self, body: Mapping[str, Any]) -> str:
        """Commit what the session received, if its buckets have the `checksums` that the sender may tell."""
        session, self._session = self._session, None
        if session is None:
            raise EngineRefused("end_weight_update(): no weight update is open")
        if session.turn.locked():
            session.broken = session.broken or "it was ended while a bucket was still being received"
        if session.names and session.version is None:
            session.broken = session.broken or "none of its buckets named a weight_version, and other weights under the same version would be a lie"
        found = [await asyncio.wrap_future(taken) for taken in session.intakes]
        if body.get("checksums") not in (None, found):
            session.broken = session.broken or f"its buckets have the checksums {found}: those sent had {body['checksums']}"
        if session.broken:
            raise EngineRefused(f"the weight update was dropped whole, the weights are unchanged: {session.broken}")
        if session.names:
            await self._commit(session.names, session.version)
        return "Success"

    async def from_disk(self, body: Mapping[str, Any]) -> str:
        """Replace all weights by those of a model directory."""
        path, version = Path(_text(body, "model_path")), _optional_text(body, "weight_version")
        self._require_awake()
        self._check_flush(body)
        self._loading += 1
        if self._session is not None:
            self._session.broken = self._session.broken or "other weights were loaded from disk meanwhile"
        try:
            tensors = await asyncio.to_thread(self._read, path)
            if body.get("abort_all_requests"):
                await asyncio.wrap_future(self._thread.call(self._scheduler.abort_all))
            await asyncio.wrap_future(self._intake.take_in(tensors))
            await self._commit(set(tensors), version)
        finally:
            self._loading -= 1
        return "Succeeded to update model weights." + (f" Weight version updated to {version}." if version is not None else "")

    async def rename(self, body: Mapping[str, Any]) -> str:
        """Give the weights as they are another version. Returns it."""
        version = _text(body, "new_version")
        if body.get("abort_all_requests", True):
            await asyncio.wrap_future(self._thread.call(self._scheduler.abort_all))
        await asyncio.wrap_future(self._thread.call(lambda: self._scheduler.rename(version)))
        return version

    async def checksums(self) -> dict[str, str]:
        """Of the live weights, by name."""
        self._require_awake()
        return await asyncio.wrap_future(self._intake.checksums())

    async def _commit(self, names: set[str], version: str | None) -> None:
        """Bring what was taken in to life between two steps. That time counts as a pause, where it is not within one."""

        def commit() -> None:
            self._require_awake()
            started, counters = time.perf_counter(), self._scheduler.counters
            self._scheduler.commit(self._intake.commit(names), version)
            if self._scheduler.paused is None:
                counters.pause_s += time.perf_counter() - started

        await asyncio.wrap_future(self._thread.call(commit))
        self._intake.committed()

    def _require_awake(self) -> None:
        if "weights" in self._scheduler.asleep:
            raise EngineRefused("the engine is asleep, its weights are not there: resume_memory_occupation first")

    def _receive(self, bucket: _Bucket, group: dist.ProcessGroup, session: _Session) -> Future[str]:
        """Receive it; most of it is taken in then. The checksum of its bytes, when all is."""
        weights, device = self._scheduler.runner.weights, self._scheduler.runner.device
        if bucket.flattened:
            buffer = self._intake.buffer(bucket.announced.bytes, device)
            # A session that failed or was ended may not write into the spare of the next one.
            arrival = self._intake.arrival(bucket.announced, buffer, lambda: not session.broken)
            for arrived in broadcast_pieces(buffer, group, bucket.piece_bytes):
                arrival.advance(arrived)
            return arrival.finish()
        tensors: dict[str, Tensor] = {}
        for name, dtype, shape in zip(bucket.announced.names, bucket.announced.dtypes, bucket.announced.shapes, strict=True):
            tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            broadcast(tensors[name], group)
        return self._intake.take_in({} if session.broken else weights.checked(tensors, complete=False))

    def _check_flush(self, body: Mapping[str, Any]) -> None:
        """Raise EngineRefused where the cache is to be flushed and cannot be. (SGLang says so too, but when the new weights are live.)"""
        if body.get("flush_cache", True) and self._scheduler.frozen:
            raise EngineRefused(
                "the cache cannot be flushed, because requests are still running, paused in place: send flush_cache false, or retract them. "
                "The weights are unchanged."
            )

    def _read(self, path: Path) -> dict[str, Tensor]:
        weights = self._scheduler.runner.weights
        if ModelConfig.load(path).parameters() != weights.config.parameters():
            raise EngineError(f"{path}: its architecture is not that of the model being served")
        return weights.checked(read_tensors(path), complete=True)

    def _checked(self, body: Mapping[str, Any]) -> _Bucket:
        """The announced bucket, every tensor of it known: afterwards the sizes of the collective are certain."""
        names, dtypes, shapes = (body.get(field) for field in ("names", "dtypes", "shapes"))
        if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list) and len(names) == len(dtypes) == len(shapes) > 0):
            raise EngineRefused("names, dtypes and shapes must be lists of one length, at least 1")
        if body.get("load_format") not in (None, "flattened_bucket"):
            raise EngineRefused(f"load_format must be null or 'flattened_bucket', got {body['load_format']!r}")
        announced = Announced(
            names=[str(name) for name in names],
            dtypes=[torch_dtype(str(dtype).removeprefix("torch.")) for dtype in dtypes],
            shapes=[_shape(shape) for shape in shapes],
        )
        bucket = _Bucket(announced=announced, flattened=body.get("load_format") == "flattened_bucket", piece_bytes=_piece(body, announced.bytes))
        for name, shape in zip(announced.names, announced.shapes, strict=True):
            self._scheduler.runner.weights.check(name, shape)
        return bucket


def _text(body: Mapping[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise EngineRefused(f"{field} must be a non-empty string, got {value!r}")
    return value


def _optional_text(body: Mapping[str, Any], field: str) -> str | None:
    return None if body.get(field) is None else _text(body, field)


def _number(body: Mapping[str, Any], field: str) -> int:
    value = body.get(field)
    if type(value) is not int:
        raise EngineRefused(f"{field} must be an integer, got {value!r}")
    return value


def _seconds(value: Any) -> float:
    if value is None:
        return GROUP_TIMEOUT_S
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise EngineRefused(f"timeout_s must be a positive number of seconds, got {value!r}")
    return float(value)


def _piece(body: Mapping[str, Any], whole: int) -> int:
    if body.get("piece_bytes") is None:
        return max(whole, 1)
    size = _number(body, "piece_bytes")
    if size <= 0 or size % CHECKED_BYTES:
        raise EngineRefused(f"piece_bytes must be a positive multiple of {CHECKED_BYTES}, got {size}")
    return size


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(size) is not int or size < 0 for size in value):
        raise EngineRefused(f"a shape must be a list of sizes, got {value!r}")
    return tuple(value)
