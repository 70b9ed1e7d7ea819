"""Paths in a recipe: made absolute when it is loaded, looked for when it is run.

A relative path is looked for in the current directory first, then beside the file it is written in. `prepared:NAME` (a file the prepare stage
makes) and `hub:NAME` stay as they are, and so does a model's name on the hub where no such directory is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.config.document import Node, Step, path_text
from agentrl.config.modes import require_mode
from agentrl.config.recipe import Recipe
from agentrl.config.tasks import HASHED, NO_ENCODER
from agentrl.errors import ConfigError

__all__ = ["missing_files", "require_files", "resolve_paths"]

# Keys that hold paths; `*` is any key or item.
_FILES = (
    ("model", "train_tokenizer", "corpus"),
    ("warm_start", "rows"),
    ("tasks", "train", "*", "path"),
    ("eval", "sets", "*", "tasks", "*", "path"),
    ("retriever", "corpus"),
    ("retriever", "index"),
)
_MODELS = (  # directories, or names on the hub
    ("model", "path"),
    ("model", "tokenizer"),
    ("critic", "path"),
    ("algorithm", "kl", "reference"),
    ("retriever", "encoder"),
    ("retriever", "model"),
    ("retriever", "reranker"),
)
_REMOTE = ("prepared:", "hub:")
_NO_MODELS = frozenset({("retriever", "encoder", HASHED), ("retriever", "encoder", NO_ENCODER)})


def resolve_paths(document: Node) -> Node:
    """The document with every path absolute."""
    for pattern in (*_FILES, *_MODELS):
        document = _edit(document, pattern, pattern)
    return document


def missing_files(recipe: Recipe) -> list[str]:
    """One line for each file the recipe names that does not exist, e.g. `retriever.corpus: no such file: /data/wiki-18.jsonl`."""
    document = recipe.model_dump()
    found = [place for pattern in _FILES for place in _places(document, pattern, ())]
    return [
        f"{path_text(path)}: no such file: {value}"
        for path, value in found
        if isinstance(value, str) and not value.startswith(_REMOTE) and not Path(value).exists()
    ]


def require_files(recipe: Recipe) -> None:
    """Refuse a recipe that names files which do not exist, or an index that is not searched as it asks.

    Raises:
        ConfigError: naming all of them.
    """
    if missing := missing_files(recipe):
        raise ConfigError("\n".join(missing))
    require_mode(recipe)


def _edit(node: Node, pattern: tuple[str, ...], whole: tuple[str, ...]) -> Node:
    if not pattern:
        return replace(node, value=_absolute(node, whole)) if isinstance(node.value, str) else node
    if isinstance(node.value, dict):
        edited = {k: _edit(child, pattern[1:], whole) if pattern[0] in (k, "*") else child for k, child in node.value.items()}
        return replace(node, value=edited)
    if isinstance(node.value, list) and pattern[0] == "*":
        return replace(node, value=[_edit(child, pattern[1:], whole) for child in node.value])
    return node


def _absolute(node: Node, whole: tuple[str, ...]) -> str:
    text: str = node.value
    if not text or text.startswith(_REMOTE) or (*whole, text) in _NO_MODELS:
        return text
    path = Path(text).expanduser()
    folders = [Path.cwd(), node.origin.folder or Path.cwd()]
    found = next((folder / path for folder in folders if (folder / path).exists()), None)
    if found is None and whole in _MODELS and not path.is_absolute() and not text.startswith("."):
        return text
    return os.path.abspath(found or path)


def _places(value: Any, pattern: tuple[str, ...], above: tuple[Step, ...]) -> Iterator[tuple[tuple[Step, ...], Any]]:
    if not pattern:
        yield above, value
    elif isinstance(value, dict):
        for key, child in value.items():
            if pattern[0] in (key, "*"):
                yield from _places(child, pattern[1:], (*above, key))
    elif isinstance(value, list) and pattern[0] == "*":
        for index, child in enumerate(value):
            yield from _places(child, pattern[1:], (*above, index))
