"""Recipes from files: read, merged, overridden, made small by `--smoke`, and checked; everything that is wrong is said at once.

    recipe = load_recipe([Path("recipes/quickstart.yaml")], ["learner.learning_rate=1e-3"])

Needs neither torch nor ray, and takes a fraction of a second.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config.document import Node, Origin, Step, dump, merge, path_text, plain, plant, read
from agentrl.config.override import Override, override, parse_path
from agentrl.config.paths import resolve_paths
from agentrl.config.problem import problems_of
from agentrl.config.recipe import Recipe
from agentrl.config.smoke import smoke_overrides
from agentrl.errors import ConfigError

__all__ = ["dump_recipe", "load_recipe"]

_LACKING_OF_A_LAYER = 2  # a recipe that is being written may lack one of name, run, model, tasks and env


def load_recipe(paths: Sequence[Path], overrides: Sequence[str] = (), *, smoke: bool = False) -> Recipe:
    """The recipe of one or more files.

    Args:
        paths: laid on one another from left to right: maps merge, lists and scalars replace.
        overrides: `a.b=c`, laid on last.
        smoke: make it small (config.smoke), apply its `smoke` section, then the overrides.

    Raises:
        ConfigError: one line for each thing that is wrong, each with its file, line and column.
    """
    document, refused = _merged(paths)
    asked, malformed = _collected(Override.of, overrides)
    if document is None:
        raise _told([*refused, *malformed])
    document, unfit = _smoked(document, asked) if smoke else override(document, asked)
    recipe, problems = _validated(resolve_paths(document))
    refused = [*malformed, *unfit]
    if recipe is None or refused:
        raise _told([*refused, *problems])
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, complete with its defaults. `load_recipe` of it gives an equal recipe."""
    return dump(recipe.model_dump(mode="json"))


def _merged(paths: Sequence[Path]) -> tuple[Node | None, list[ConfigError]]:
    """The files laid on one another; None where one of them cannot be read."""
    if not paths:
        return None, [ConfigError("no recipe file given")]
    documents, refused = _collected(read, paths)
    return None if refused else reduce(merge, documents), refused


def _smoked(document: Node, asked: list[Override]) -> tuple[Node, list[ConfigError]]:
    own, refused = _smoke_section(document)
    preview, _ = override(document, [*own, *asked])
    origin = Origin(label="--smoke")
    made = smoke_overrides(plain(resolve_paths(preview)))
    small = [Override(path=parse_path(key, origin), node=plant(value, origin, origin)) for key, value in made.items()]
    document, unfit = override(document, [*small, *own, *asked])
    applied = {name: child for name, child in document.value.items() if name != "smoke"}
    return Node(value=applied, origin=document.origin), refused + unfit


def _smoke_section(document: Node) -> tuple[list[Override], list[ConfigError]]:
    section = document.value.get("smoke")
    if section is None or not isinstance(section.value, dict):
        return [], []  # a smoke section that is no map is reported when the recipe is validated without --smoke
    return _collected(lambda item: Override(path=parse_path(item[0], item[1].key or item[1].origin), node=item[1]), section.value.items())


def _told(problems: Sequence[ConfigError | str]) -> ConfigError:
    return ConfigError("\n".join(dict.fromkeys(map(str, problems))))


def _collected(make: Any, items: Any) -> tuple[list[Any], list[ConfigError]]:
    made, refused = [], []
    for item in items:
        try:
            made.append(make(item))
        except ConfigError as error:
            refused.append(error)
    return made, refused


def _validated(document: Node) -> tuple[Recipe | None, list[str]]:
    """The recipe of a document, or what is wrong with it.

    Validated as JSON in strict mode: there a list may stand for a tuple, but true is no number and "3" is none either.
    """
    value = plain(document)
    endless = [f"{_origin(document, path)}: {path_text(path)} must be a finite number, got {number}" for path, number in _endless(value)]
    if endless:
        return None, endless
    try:
        recipe = Recipe.model_validate_json(json.dumps(value), strict=True)
        return recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": os.path.abspath(Path(recipe.run.dir).expanduser())})}), []
    except ValidationError as error:
        return None, [*(str(problem) for problem in problems_of(error, document, Recipe)), *_layer_hint(error, document)]


def _layer_hint(error: ValidationError, document: Node) -> list[str]:
    """A question where so much of the top level is missing that the file was perhaps made to be laid on another."""
    lacks = [detail["loc"] for detail in error.errors(include_url=False) if detail["type"] == "missing" and len(detail["loc"]) == 1]
    if len(lacks) < _LACKING_OF_A_LAYER:
        return []
    file = document.origin.label
    first = "Give the recipe first: agentrl validate recipes/search_r1_nq.yaml"
    return [f"{file}: is this a file that is laid on a recipe? {first} {file}"]


def _endless(value: Any, above: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], float]]:
    """Infinities and NaNs: a recipe travels as JSON, which has none."""
    if isinstance(value, float) and not math.isfinite(value):
        yield above, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _endless(child, (*above, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _endless(child, (*above, index))


def _origin(document: Node, path: Sequence[Step]) -> Origin:
    for step in path:
        document = document.value[step]
    return document.origin
