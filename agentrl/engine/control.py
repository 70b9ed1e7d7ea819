"""The control endpoints: abort, pause, continue, flush, versions, checksums, and the shell around weight updates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from agentrl.collective import combined_checksum
from agentrl.engine.replies import outcome, refused
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.thread import EngineThread
from agentrl.engine.updates import WeightUpdates
from agentrl.errors import EngineError, EngineRefused, EngineUnavailable, PublishError

__all__ = ["REFUSALS", "Control"]

Endpoint = Callable[[Request], Awaitable[Response]]


class Control:
    """Endpoints as methods. What they raise is answered by `REFUSALS`."""

    def __init__(self, scheduler: Scheduler, thread: EngineThread, updates: WeightUpdates) -> None:
        self._scheduler = scheduler
        self._thread = thread
        self._updates = updates

    async def abort(self, request: Request) -> Response:
        """End one request by `rid`, or all; unknown ones are ignored."""
        body = await _body(request)
        rid = body.get("rid")
        if body.get("abort_all"):
            await self._run(self._scheduler.abort_all)
        elif isinstance(rid, str):
            await self._run(lambda: self._scheduler.abort(rid))
        return Response()

    async def pause(self, request: Request) -> Response:
        """Stop generating; requests that come in wait."""
        mode = (await _body(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise EngineRefused(f"mode must be 'abort', 'retract' or 'in_place', got {mode!r}")
        await self._run(lambda: self._scheduler.pause(mode))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        """Go on."""
        await self._run(self._scheduler.resume)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: Request) -> Response:
        """Drop cached prefixes, if nothing runs."""
        if await self._run(self._scheduler.flush):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Flush cache failed.\n", 400)

    async def rename(self, request: Request) -> Response:
        """Give the weights another version."""
        version = await self._updates.rename(await _body(request))
        return JSONResponse(outcome(f"Weight version updated to {version}", new_version=version))

    async def checksum(self, request: Request) -> Response:
        """Checksums of the live weights, by name and of all."""
        action = (await _body(request)).get("action", "checksum")
        if action != "checksum":
            raise EngineRefused(f"action must be 'checksum', got {action!r}")
        checksums = await self._updates.checksums()
        combined = combined_checksum(checksums)
        rank = {"checksums": checksums, "per_gpu_checksum": combined, "parallelism_info": [{"tp_rank": 0, "tp_size": 1}]}
        return JSONResponse(outcome("Success.", ranks=[rank], per_engine_checksum=combined))

    def resting(self, operation: Callable[[dict[str, Any]], Awaitable[None]]) -> Endpoint:
        """The endpoint of one way of giving memory away or taking it back, which answers null."""

        async def endpoint(request: Request) -> Response:
            await operation(await _body(request))
            return JSONResponse(None)

        return endpoint

    def updating(self, operation: Callable[[dict[str, Any]], Awaitable[str]], **more: Any) -> Endpoint:
        """The endpoint of one step of a weight update, which answers its message."""

        async def endpoint(request: Request) -> Response:
            return JSONResponse(outcome(await operation(await _body(request)), **more))

        return endpoint

    async def _run(self, command: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._thread.call(command))


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object sent, {} where there is none."""
    data = await request.body()
    try:
        value = json.loads(data) if data else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EngineError(f"the body must be a JSON object, got {data[:100]!r}")
    return value


async def _refuse(request: Request, error: Exception) -> Response:
    return JSONResponse(refused(str(error)), 503 if isinstance(error, EngineUnavailable) else 400)


async def _no_such_call(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


REFUSALS: dict[Any, Any] = {EngineError: _refuse, PublishError: _refuse, HTTPException: _no_such_call}
