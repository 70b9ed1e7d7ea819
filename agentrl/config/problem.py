"""What is wrong with a recipe, in sentences: pydantic's findings with file, line, the key's full name, what it must be, and a suggestion.

    recipes/mine.yaml:14:3: unknown key learner.learning_rte (did you mean learner.learning_rate?)
    recipes/mine.yaml:22:18: rollout.max_staleness must be an integer >= 0, got 2.5
    override 'rollout.workers=true': rollout.workers must be an integer > 0, got true

The sentences are made from the models' JSON schema, so a new key needs none of its own.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from agentrl.config.document import Node, Origin, Step, path_text, plain

__all__ = ["Problem", "problems_of"]

_LONGEST_VALUE = 60  # characters of a wrong value that a message shows
_CLOSE = 0.6  # difflib's own default: `learning_rte` finds `learning_rate`
_CLOSE_ELSEWHERE = 0.85  # keys of other sections are suggested only when they are nearly the same

Schema = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong, and where it was written."""

    origin: Origin
    text: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.text}"


def problems_of(error: ValidationError, document: Node, model: type[BaseModel]) -> list[Problem]:
    """All findings of a validation of `document` by `model`, in the order of the files."""
    schema = _Schema(model.model_json_schema())
    found = [_problem(detail, document, schema) for detail in error.errors(include_url=False)]
    return sorted(dict.fromkeys(found), key=lambda p: (p.origin.line == 0, p.origin.label, p.origin.line, p.origin.column))


def _problem(detail: Any, document: Node, schema: _Schema) -> Problem:
    path, kind = tuple(detail["loc"]), detail["type"]
    name = path_text(path)
    if kind == "missing" and isinstance(path[-1], str):
        return Problem(origin=_deepest(document, path[:-1]).origin, text=f"missing key {name}: {schema.expected(path)}")
    if path[-1:] == ("[key]",):  # of a map whose keys have a form
        key = _deepest(document, path[:-1])
        return Problem(origin=key.key or key.origin, text=f"{path_text(path[:-2])}: a key must be {schema.expected_key(path[:-2])}, got {path[-2]!r}")
    node = _deepest(document, path)
    if kind == "extra_forbidden":
        return Problem(origin=node.key or node.origin, text=f"unknown key {name}{schema.suggestion(path)}")
    if kind == "value_error":  # raised by a validator of ours: it says all there is to say
        return Problem(origin=node.key or node.origin, text=f"{name}: {detail['ctx']['error']}" if name else str(detail["ctx"]["error"]))
    if kind in ("missing", "too_long", "too_short"):  # of a list: the list is wrong, not the item that is not there
        path = path if isinstance(detail["input"], list) and kind != "missing" else path[:-1]
        node = _deepest(document, path)
    expected, value = schema.expected(path), plain(node)
    quoted = f" (a text, in quotes: {_quoted(path[-1], value)})" if expected.startswith("a string") and isinstance(value, bool | int | float) else ""
    return Problem(origin=node.origin, text=f"{path_text(path)} must be {expected}, got {_shown(value)}{quoted}")


def _deepest(document: Node, path: Sequence[Step]) -> Node:
    """The node at `path`, or the last one on the way to it."""
    node = document
    for step in path:
        children = dict(enumerate(node.value)) if isinstance(node.value, list) else node.value
        if not isinstance(children, dict) or step not in children:
            break
        node = children[step]
    return node


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _quoted(step: Step, value: float) -> str:
    text = f'"{json.dumps(value)}"'
    return text if isinstance(step, int) else f"{step}: {text}"


class _Schema:
    """Answers about a model's JSON schema: what a key must be, and which key may have been meant."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def expected(self, path: Sequence[Step]) -> str:
        """What the value at `path` must be, e.g. `an integer >= 0`."""
        return self._sentence(self._at(path))

    def expected_key(self, path: Sequence[Step]) -> str:
        """What a key of the map at `path` must be."""
        forms = list(self._at(path).get("patternProperties", {}))
        return self._sentence({"type": "string", "pattern": forms[0]} if forms else {"type": "string"})

    def suggestion(self, path: Sequence[Step]) -> str:
        """` (did you mean a.b?)`, or nothing: a similar key of the same section, else the same key of another."""
        siblings = list(self._at(path[:-1]).get("properties", {}))
        name = str(path[-1])
        if close := difflib.get_close_matches(name, siblings, n=1, cutoff=_CLOSE):
            return f" (did you mean {path_text([*path[:-1], close[0]])}?)"
        everywhere: dict[str, str] = {}
        for known in self._paths(self._root):
            everywhere.setdefault(known[-1], ".".join(known))
        if close := difflib.get_close_matches(name, everywhere, n=1, cutoff=_CLOSE_ELSEWHERE):
            return f" (did you mean {everywhere[close[0]]}?)"
        return ""

    def _at(self, path: Sequence[Step]) -> Schema:
        schema = self._resolve(self._root)
        for step in path:
            if isinstance(step, int):
                items = schema.get("prefixItems", [])
                schema = items[step] if step < len(items) else schema.get("items", {})
            else:
                members = [schema.get("properties", {}).get(step), schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()]
                schema = next(filter(None, members), {})
            schema = self._resolve(schema) if isinstance(schema, Mapping) else {}
        return schema

    def _resolve(self, schema: Schema) -> Schema:
        """Follow references, and of `X or null` take X."""
        while True:
            if "$ref" in schema:
                schema = self._root["$defs"][schema["$ref"].rsplit("/", 1)[-1]]
            elif "anyOf" in schema:
                schema = next(option for option in schema["anyOf"] if option.get("type") != "null")
            else:
                return schema

    def _paths(self, schema: Schema, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        """The paths of all keys, nearest to the root first."""
        properties = self._resolve(schema).get("properties", {})
        yield from ((*above, name) for name in properties)
        for name, child in properties.items():
            yield from self._paths(child, (*above, name))

    def _sentence(self, schema: Schema) -> str:
        if choices := schema.get("enum", [schema["const"]] if "const" in schema else []):
            return f"one of {', '.join(map(str, choices))}" if len(choices) > 1 else str(choices[0])
        match schema.get("type"):
            case "integer":
                return f"an integer{_bounds(schema)}"
            case "number":
                return f"a number{_bounds(schema)}"
            case "string":
                return f"a string matching {schema['pattern']}" if "pattern" in schema else "a string"
            case "boolean":
                return "true or false"
            case "array":
                return self._list_sentence(schema)
        return "a map of keys and values"

    def _list_sentence(self, schema: Schema) -> str:
        if items := schema.get("prefixItems"):
            return f"a list of {len(items)} values, each {self._sentence(self._resolve(items[0]))}"
        least = f" with at least {schema['minItems']} item" if "minItems" in schema else ""
        return f"a list{least}, each {self._sentence(self._resolve(schema.get('items', {})))}"


def _bounds(schema: Schema) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    told = [f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema]
    return f" {' and '.join(told)}" if told else ""
