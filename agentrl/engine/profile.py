"""A torch profile of the engine's forward passes, asked for by SGLang's calls: `POST /start_profile`, `POST /stop_profile`.

    {"output_dir": "runs/x/profiles", "num_steps": 200, "profile_prefix": "engine0"}  ->  runs/x/profiles/engine0.json, a Chrome trace

Started, stopped and written in the engine's thread, whose operations it sees. It ends by itself after `num_steps` passes. SGLang 0.5.23 writes
a gzipped trace, whose name has more in it, and without an `output_dir` to /tmp; here one has to be given.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from torch.profiler import ProfilerActivity, profile, record_function

from agentrl.errors import EngineRefused

__all__ = ["PassProfiler", "profile_calls"]

log = logging.getLogger(__name__)

# A trace is held in memory until it is written; so many passes of a large model are some hundred megabytes.
MOST_PASSES = 5_000


class PassProfiler:
    """Used in the engine's thread only."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._path = Path()
        self._left = 0

    def start(self, path: Path, passes: int) -> None:
        """Record the next `passes` passes, then write the trace.

        Raises:
            EngineRefused: it records already.
        """
        if self._profile is not None:
            raise EngineRefused("a profile is being recorded already: POST /stop_profile first")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile, self._path, self._left = profile(activities=activities, acc_events=True), path, passes
        self._profile.start()

    def stop(self) -> None:
        """Write what there is.

        Raises:
            EngineRefused: nothing is recorded.
        """
        if self._profile is None:
            raise EngineRefused("no profile is being recorded: POST /start_profile first")
        seen, self._profile = self._profile, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seen.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(self._path))

    @contextmanager
    def around_pass(self) -> Iterator[None]:
        """Around one step of the scheduler."""
        if self._profile is None:
            yield
            return
        with record_function("engine pass"):
            yield
        self._left -= 1
        if not self._left:
            try:
                self.stop()
            except (OSError, RuntimeError):  # of a full disk: what is lost is a profile
                log.exception("the profile %s was not written", self._path)


def profile_calls(profiler: PassProfiler, call: Callable[[Callable[[], None]], Future[None]]) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """The endpoints by path. `call` runs a command in the engine's thread."""

    async def start(request: Request) -> Response:
        path, passes = _asked(await request.body())
        await asyncio.wrap_future(call(lambda: profiler.start(path, passes)))
        return PlainTextResponse("Start profiling.\n")

    async def stop(_: Request) -> Response:
        await asyncio.wrap_future(call(profiler.stop))
        return PlainTextResponse("Stop profiling. This will take some time.\n")

    return {"/start_profile": start, "/stop_profile": stop}


def _asked(content: bytes) -> tuple[Path, int]:
    try:
        body = json.loads(content)
        directory, passes, prefix = body["output_dir"], body.get("num_steps", MOST_PASSES), body.get("profile_prefix", "engine")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineRefused(f"expected a JSON object with output_dir: {error!r}") from error
    if not isinstance(directory, str) or not isinstance(prefix, str) or "/" in prefix:
        raise EngineRefused("output_dir and profile_prefix must be strings, the second without a slash")
    if not isinstance(passes, int) or not 1 <= passes <= MOST_PASSES:
        raise EngineRefused(f"num_steps must be 1 to {MOST_PASSES}, got {passes!r}")
    return Path(directory) / f"{prefix}.json", passes
