"""Clients of a run's engines, with the keys that its recipe names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from agentrl.config.recipe import Recipe
from agentrl.engine_api import EngineClient, EngineKeys

__all__ = ["engine_clients"]


def engine_clients(recipe: Recipe, *, vocab_size: int | None = None) -> Callable[[str, int], EngineClient]:
    """What makes the client of an engine, from its URL and index.

    Args:
        vocab_size: token ids at or above it are refused by the clients.

    Raises:
        ConfigError: a variable with a key is not set.
    """
    keys = EngineKeys.of_environment(recipe.engine.api_key_variable, recipe.engine.admin_key_variable)
    return partial(EngineClient, vocab_size=vocab_size, keys=keys)
