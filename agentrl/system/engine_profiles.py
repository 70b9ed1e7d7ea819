"""Profiles of the engines, as the recipe's `profile` section asks for them: learner rank 0 starts them, the engines end and write them."""

from __future__ import annotations

import logging
from pathlib import Path

from agentrl.buffer_api import BufferClient
from agentrl.config.recipe import Recipe
from agentrl.errors import EngineError
from agentrl.system.engines import engine_clients

__all__ = ["start_engine_profiles"]

log = logging.getLogger(__name__)


async def start_engine_profiles(recipe: Recipe, buffer: BufferClient, run_dir: Path, step: int) -> None:
    """Where `step` is the first of those that are looked at: ask every engine that lives. One that does not answer goes without."""
    profile = recipe.profile
    if profile is None or "engine" not in profile.roles or step != profile.steps[0]:
        return
    activities = ["CPU", *(["GPU"] if recipe.engine.device == "cuda" else [])]
    connect = engine_clients(recipe)
    for entry in (await buffer.engines(after=-1, wait_s=0)).engines:
        async with connect(entry.url, entry.index) as engine:
            try:
                await engine.start_profile(str((run_dir / "profiles").resolve()), profile.engine_passes, f"engine{entry.index}", activities)
            except EngineError as error:
                log.warning("no profile of %s: %s", engine, error)
