"""The stage before a run: files made on the spot, the tokenizer, the model, the warm start. Each cached by what it is made from.

The work is done in a process of its own (`roles.prepare`), because it needs torch and the driver does not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.config.recipe import Recipe
from agentrl.system.local import LocalLauncher
from agentrl.system.process import ProcessSpec, Role

__all__ = ["Progress", "cache_key", "file_digest", "prepare", "with_models", "with_prepared"]

Progress = Callable[[str, int, int], None]  # what, done, of

_MARK = "prepared:"


async def prepare(recipe: Recipe, run_dir: Path, *, python_path: str, progress: Progress) -> tuple[Recipe, Path]:
    """The recipe with every `prepared:` path and hub name of a model resolved, and the model directory that every process loads."""
    spec = ProcessSpec(role=Role.PREPARE, index=0, incarnation=0, run_dir=str(run_dir), recipe=recipe.model_dump(mode="json"))
    async with LocalLauncher(python_path=python_path) as launcher:
        process = await launcher.start(spec)
        while "model_dir" not in (told := await process.ready()):
            progress(told["what"], told["done"], told["of"])
    recipe = with_models(recipe, critic=told["critic"], reference=told["reference"])
    return (with_prepared(recipe, Path(told["prepared"])) if told["prepared"] else recipe), Path(told["model_dir"])


def with_models(recipe: Recipe, *, critic: str | None, reference: str | None) -> Recipe:
    """The recipe with the directories of further models in place of their names."""
    plain = recipe.model_dump(mode="json")
    if critic is not None:
        plain["critic"]["path"] = critic
    if reference is not None:
        plain["algorithm"]["kl"]["reference"] = reference
    return Recipe.model_validate(plain)


def with_prepared(recipe: Recipe, directory: Path) -> Recipe:
    """The recipe with `prepared:NAME` replaced by `directory/NAME` wherever it stands."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [replaced(inner) for inner in value]
        if isinstance(value, str) and value.startswith(_MARK):
            return str(directory / value.removeprefix(_MARK))
        return value

    return Recipe.model_validate(replaced(recipe.model_dump(mode="json")))


def cache_key(*parts: Any) -> str:
    """A name for what is made from `parts` (JSON values)."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=10).hexdigest()


def file_digest(*paths: Path) -> str:
    """One digest over the contents of files, in the order given."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
