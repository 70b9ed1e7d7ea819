"""What the driver adds to a step's metrics: how busy the engines were, and how groups and versions flow through the buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.buffer_api import BufferClient, EngineRoster
from agentrl.engine_api import EngineClient
from agentrl.errors import EngineError

__all__ = ["EngineMeter", "FlowMeter"]

READ_DEADLINE_S = 2.0


class EngineMeter:
    """The roster's engines: how many have the newest weights, and differences of the embedded ones' counters.

    Args:
        connect: makes the client of an engine, from its URL and index.
    """

    def __init__(self, buffer: BufferClient, connect: Callable[[str, int], EngineClient]) -> None:
        self._buffer, self._connect = buffer, connect
        self._engines: dict[tuple[int, int], EngineClient] = {}  # by (index, incarnation)
        self._last: dict[tuple[int, int], tuple[float, float, float]] = {}  # (read at, generated tokens, busy seconds)

    async def __aenter__(self) -> EngineMeter:
        return self

    async def __aexit__(self, *_: object) -> None:
        for engine in self._engines.values():
            await engine.aclose()

    async def read(self) -> dict[str, float]:
        """Idle share and tokens per second since the last reading, over all engines; nothing of an engine at its first.

        SGLang keeps no such counters: it tells a rate of its own, and no idle share.
        """
        roster = await self._buffer.engines(after=0, wait_s=0.0)
        await self._follow(roster)
        idle, rate = [], 0.0
        rates = 0
        for key, engine in self._engines.items():
            try:
                told = (await engine.server_info(deadline_s=READ_DEADLINE_S)).raw
            except EngineError:
                continue  # the supervisor judges engines; a reading may be missing
            if (counters := told.get("embedded")) is None:
                if (own := _own_rate(told)) is not None:
                    rate, rates = rate + own, rates + 1
                continue
            now = (time.monotonic(), float(counters["generated_tokens"]), float(counters["busy_s"]))
            before = self._last.get(key)
            self._last[key] = now
            if before is not None and now[0] > before[0]:
                seconds = now[0] - before[0]
                idle.append(max(0.0, 1.0 - (now[2] - before[2]) / seconds))
                rate, rates = rate + (now[1] - before[1]) / seconds, rates + 1
        busy = {"idle/engine": sum(idle) / len(idle)} if idle else {}
        return busy | ({"engine/tokens_per_s": rate} if rates else {}) | {"engine/current": sum(entry.current for entry in roster.engines)}

    async def _follow(self, roster: EngineRoster) -> None:
        live = {(entry.index, entry.incarnation): entry for entry in roster.engines}
        for key in [key for key in self._engines if key not in live]:
            await self._engines.pop(key).aclose()
            self._last.pop(key, None)
        for key in live.keys() - self._engines.keys():
            self._engines[key] = self._connect(live[key].url, live[key].index)


def _own_rate(told: Mapping[str, Any]) -> float | None:
    """What an SGLang server says of itself: tokens per second of its last decode steps, 0 where there were none lately."""
    states = told.get("internal_states")
    rate = states[0].get("last_gen_throughput") if isinstance(states, list) and states and isinstance(states[0], dict) else None
    return float(rate) if isinstance(rate, int | float) else None


class FlowMeter:
    """Turns the buffer's step and publishing events into metrics."""

    def __init__(self) -> None:
        self._ended_s: float | None = None  # of the step before
        self._published: Mapping[str, Any] | None = None

    def published(self, event: Mapping[str, Any]) -> None:
        """A version is out: told with the next step."""
        self._published = event

    def of_step(self, event: Mapping[str, Any]) -> dict[str, float]:
        """The metrics that a step event itself carries."""
        metrics: dict[str, float] = {f"buffer/{name}": event[name] for name in ("running", "buffered", "training", "completed", "filtered")}
        metrics |= {f"drops/{cause}": count for cause, count in event["dropped"].items()}
        metrics |= {"run/step": event["step"], "run/elapsed_s": event["elapsed_s"]}
        told = event["metrics"]
        if (seconds := told.get("seconds/step", 0.0)) > 0 and "learner/tokens" in told:
            metrics["learner/tokens_per_s"] = told["learner/tokens"] / seconds
        if self._ended_s is not None and event["ended_s"] > self._ended_s:
            metrics["idle/learner"] = min(1.0, told.get("seconds/wait_batch", 0.0) / (event["ended_s"] - self._ended_s))
        self._ended_s = event["ended_s"]
        if self._published is not None:
            metrics["weights/version"], metrics["weights/bytes"] = self._published["version"], self._published["bytes"]
            metrics["seconds/publish"], self._published = self._published["seconds"], None
        return metrics
