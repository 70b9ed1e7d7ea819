"""The engine as a Starlette application that speaks SGLang 0.5.23's native HTTP API, as far as training needs it.

    server = EngineServer(model_dir, slots=64, context_tokens=1024)
    uvicorn.run(server.app, ...)

The application's lifespan starts and joins the one engine thread. Without keys it trusts its callers, like SGLang: bind it to loopback then.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.engine.access import Access
from agentrl.engine.architecture import ModelConfig
from agentrl.engine.control import REFUSALS, Control
from agentrl.engine.generation import Generation
from agentrl.engine.profile import profile_calls
from agentrl.engine.request import Limits
from agentrl.engine.runner import ModelRunner
from agentrl.engine.scheduler import Scheduler
from agentrl.engine.sleep import Sleep
from agentrl.engine.stops import TokenText
from agentrl.engine.updates import WeightUpdates
from agentrl.engine.weights import Weights
from agentrl.errors import EngineError

__all__ = ["EngineServer"]

SGLANG_VERSION = "0.5.23"  # whose API this is
_ALSO_GET = ("/flush_cache", "/weights_checker")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Endpoint = Callable[[Request], Awaitable[Response]]


class EngineServer:
    """One model, loaded at once, served while `app` runs.

    Args:
        slots: sequences decoded at once, and finished ones whose prefix is kept for the next turn.
        context_tokens: prompt and completion together.
        threads: of torch, in the engine thread.
        weight_version: of the weights in `model_dir`.
        deterministic: a token's bits depend on nothing but its own sequence (needs one thread and at least 4 slots; slower).
        api_key: wanted of callers, as `Authorization: Bearer KEY`.
        admin_key: wanted instead for control calls.

    Raises:
        EngineError: the model or the options do not fit.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        slots: int,
        context_tokens: int,
        threads: int = 1,
        device: str = "cpu",
        dtype: str = "float32",
        weight_version: str = "0",
        deterministic: bool = False,
        api_key: str | None = None,
        admin_key: str | None = None,
    ) -> None:
        config = ModelConfig.load(model_dir)
        _check_options(config, context_tokens=context_tokens, threads=threads, dtype=dtype, deterministic=deterministic)
        text = TokenText.load(model_dir, config.vocabulary)
        weights = Weights.load(model_dir, config, dtype=_DTYPES[dtype], device=device)
        runner = ModelRunner(weights, slots=slots, context_tokens=context_tokens)
        self._scheduler = Scheduler(runner, text, version=weight_version, deterministic=deterministic)
        limits = Limits(vocabulary=config.vocabulary, context_tokens=context_tokens, eos_ids=config.eos_ids)
        self._generation = Generation(self._scheduler, limits, text, threads=threads)
        self._updates = WeightUpdates(self._scheduler, self._generation.thread)
        self._sleep = Sleep(self._scheduler, self._generation.thread, self._updates)
        self._config = config
        self._started_s = time.monotonic()
        serving = {
            "context_length": context_tokens,
            "max_running_requests": slots,
            "device": device,
            "dtype": dtype,
            "weight_version": weight_version,
        }
        fixed = {"tp_size": 1, "dp_size": 1, "load_format": "safetensors", "enable_deterministic_inference": deterministic}
        paths = dict.fromkeys(("model_path", "tokenizer_path", "served_model_name"), str(model_dir))
        self._arguments: dict[str, Any] = {**paths, **serving, **fixed}
        self.app = self._application(api_key, admin_key)

    def _application(self, api_key: str | None, admin_key: str | None) -> Starlette:
        calls = self._control_calls()
        guard = [Middleware(Access, api_key=api_key, admin_key=admin_key, control=frozenset(calls))] if api_key or admin_key else []
        return Starlette(routes=self._routes(calls), middleware=guard, lifespan=self._lifespan, exception_handlers=REFUSALS)

    def _control_calls(self) -> dict[str, Endpoint]:
        """What changes the engine or ends requests, by path: with an admin key these need it."""
        control = Control(self._scheduler, self._generation.thread, self._updates)
        return {
            "/flush_cache": control.flush,
            "/abort_request": control.abort,
            "/pause_generation": control.pause,
            "/continue_generation": control.resume,
            "/release_memory_occupation": control.resting(self._sleep.release),
            "/resume_memory_occupation": control.resting(self._sleep.resume),
            "/init_weights_update_group": control.updating(self._updates.join),
            "/destroy_weights_update_group": control.updating(self._updates.leave),
            "/begin_weight_update": control.updating(lambda body: self._updates.begin()),
            "/update_weights_from_distributed": control.updating(self._updates.receive),
            "/end_weight_update": control.updating(self._updates.end),
            "/update_weights_from_disk": control.updating(self._updates.from_disk, num_paused_requests=0),
            "/update_weight_version": control.rename,
            "/weights_checker": control.checksum,
            **profile_calls(self._generation.thread.profiler, self._generation.thread.call),
        }

    def _routes(self, calls: dict[str, Endpoint]) -> list[Route]:
        gets: dict[str, Endpoint] = {
            "/health": self._health,
            "/health_generate": self._health,
            "/ready": self._ready,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/v1/loads": self._loads,
        }
        return [
            Route("/generate", self._generation, methods=["POST"]),
            *(Route(path, endpoint, methods=["GET", "POST"] if path in _ALSO_GET else ["POST"]) for path, endpoint in calls.items()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._generation.start()
        try:
            yield
        finally:
            await self._generation.stop()
            await self._updates.stop()

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._generation.thread.alive else 503)

    async def _ready(self, request: Request) -> Response:
        generates = self._generation.thread.alive and self._scheduler.paused is None and not self._scheduler.asleep
        return Response(status_code=200 if generates else 503)

    async def _model_info(self, request: Request) -> Response:
        names = ("model_path", "tokenizer_path", "served_model_name", "load_format")
        return JSONResponse(
            {name: self._arguments[name] for name in names}
            | {
                "is_generation": True,
                "weight_version": self._scheduler.version,
                "model_type": self._config.family,
                "architectures": [self._config.architecture],
            }
        )

    async def _server_info(self, request: Request) -> Response:
        counted: dict[str, Any] = self._scheduler.counted()
        context, slots = self._arguments["context_length"], self._arguments["max_running_requests"]
        return JSONResponse(
            self._arguments
            | {
                "version": SGLANG_VERSION,
                "max_total_num_tokens": context * slots,
                "max_req_input_len": context - 1,
                "internal_states": [{}],
                "staged_update": True,
                "weight_update": self._updates.state,
                "asleep": sorted(self._scheduler.asleep),
                "embedded": counted | {"uptime_s": time.monotonic() - self._started_s},
            }
        )

    async def _loads(self, request: Request) -> Response:
        load = self._scheduler.load()
        counted = self._scheduler.counters
        capacity = self._arguments["context_length"] * self._arguments["max_running_requests"]
        entry = {
            "dp_rank": 0,
            "num_running_reqs": load["running"],
            "num_waiting_reqs": load["waiting"],
            "num_total_reqs": load["running"] + load["waiting"],
            "num_used_tokens": load["used_tokens"],
            "max_running_requests": self._arguments["max_running_requests"],
            "max_total_num_tokens": capacity,
            "token_usage": load["used_tokens"] / capacity,
            "gen_throughput": counted.generated_tokens / counted.busy_s if counted.busy_s else 0.0,
        }
        return JSONResponse({"timestamp": datetime.now(UTC).isoformat(), "version": SGLANG_VERSION, "loads": [entry]})


def _check_options(config: ModelConfig, *, context_tokens: int, threads: int, dtype: str, deterministic: bool) -> None:
    if context_tokens > config.max_tokens:
        raise EngineError(f"context_tokens is {context_tokens}, but the model was made for {config.max_tokens} positions")
    if deterministic and threads != 1:
        raise EngineError(f"deterministic mode needs one thread, got {threads}")
    if dtype not in _DTYPES:
        raise EngineError(f"dtype must be one of {sorted(_DTYPES)}, got {dtype!r}")
