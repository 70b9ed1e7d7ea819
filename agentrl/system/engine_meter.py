"""Reads the engines' counters between two steps: how busy they were and how fast."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentrl.engine_api import EngineClient
from agentrl.errors import EngineError

__all__ = ["EngineMeter"]

READ_DEADLINE_S = 2.0


class EngineMeter:
    """Differences of the embedded engines' counters. Engines that keep none are left out."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._engines = [EngineClient(url, index) for index, url in enumerate(urls)]
        self._last: dict[int, tuple[float, float, float]] = {}  # (read at, generated tokens, busy seconds)

    async def read(self) -> dict[str, float]:
        """Idle share and tokens per second since the last reading, over all engines; nothing at the first."""
        idle, rate = [], 0.0
        for engine in self._engines:
            try:
                counters = (await engine.server_info(deadline_s=READ_DEADLINE_S)).raw["embedded"]
            except (EngineError, KeyError):
                continue  # the supervisor judges engines; a reading may be missing
            now = (time.monotonic(), float(counters["generated_tokens"]), float(counters["busy_s"]))
            before = self._last.get(engine.index)
            self._last[engine.index] = now
            if before is not None and now[0] > before[0]:
                seconds = now[0] - before[0]
                idle.append(max(0.0, 1.0 - (now[2] - before[2]) / seconds))
                rate += (now[1] - before[1]) / seconds
        return {"idle/engine": sum(idle) / len(idle), "engine/tokens_per_s": rate} if idle else {}
