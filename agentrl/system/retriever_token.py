"""The token of a run's retriever: who asks without it gets no passages.

It travels in the payload of the processes' specs and in their environment, and is neither on a command line nor in a file of the run.
"""

from __future__ import annotations

import os
import secrets

from agentrl.config.recipe import Recipe

__all__ = ["TOKEN_VARIABLE", "keep_token", "retriever_token"]

TOKEN_VARIABLE = "AGENTRL_RETRIEVER_TOKEN"  # the retriever and its client read it
TOKEN_BYTES = 32


def retriever_token(recipe: Recipe) -> str | None:
    """The token of this process's environment; where there is none and the run's retriever can be reached by other machines, a new one."""
    if recipe.retriever is None:
        return None
    if given := os.environ.get(TOKEN_VARIABLE):
        return given
    needed = recipe.retriever.url is None and recipe.run.bind == "node"
    return secrets.token_urlsafe(TOKEN_BYTES) if needed else None


def keep_token(token: str | None) -> None:
    """Put it where the clients of this process, of whatever environment, look for it."""
    if token is not None:
        os.environ[TOKEN_VARIABLE] = token
