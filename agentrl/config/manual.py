"""The manual of a recipe, as text: `docs/recipes.md` is `render()`. Everything in it is read from the models of `config.recipe`.

python -c 'from agentrl.config.manual import render; print(render(), end="")' > docs/recipes.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.config.recipe import Recipe

__all__ = ["render"]

Schema = Mapping[str, Any]  # of a model or a field, as pydantic writes it

_PREFACE = """# Recipes

A recipe is a YAML file that says everything about a run. This page lists every key, with what it takes, its default and its meaning. It is made
from the models in `agentrl/config/`; a test compares them.

- `agentrl validate RECIPE` checks a recipe and says what a run of it would be; with `--full` it prints all keys, defaults included.
- Several files are laid on one another from left to right: maps merge, lists and scalars replace.
- `a.b=c` on the command line changes one key, `tasks.train[0].path=x.jsonl` one in a list.
- The YAML is strict, by the rules of version 1.2: `1e-6` is a number, `no` is a text, a key given twice is an error. An unknown key is an error
  with its line and the most similar name.
- Paths are looked for in the current directory first, then beside the recipe. `prepared:NAME` is a file made by the `prepare` section.
- `--smoke` makes any recipe small: two steps on this machine's CPU, no network. The recipe's `smoke` section is applied on top of that.

"or none" means that the key may be `null`. "Required" holds where its section is given.
"""


def render() -> str:
    """docs/recipes.md."""
    schema = Recipe.model_json_schema()
    return "\n".join([_PREFACE, *_section("", schema, schema["$defs"])]).rstrip("\n") + "\n"


def _section(path: str, model: Schema, models: Mapping[str, Schema]) -> Iterator[str]:
    """A model's heading, text and keys; then the models inside it."""
    properties, required = model["properties"], model.get("required", ())
    inner = {name: (f"{path}.{name}".lstrip(".") + held[0], held[1]) for name, field in properties.items() if (held := _held(field, models))}
    rows = []
    for name, field in properties.items():
        see = f" See `{inner[name][0]}`." if name in inner else ""
        meaning = " ".join(f"{field.get('description', '')}{see}".split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {_kind(field)} | {_default(field, required=name in required)} | {meaning} |")
    yield from (f"{'###' if '.' in path else '##'} `{path}`" if path else "## The top level", "", model["description"], "")
    yield from ("| key | takes | default | meaning |", "|---|---|---|---|", *rows, "")
    for below, held_model in inner.values():
        yield from _section(below, held_model, models)


def _held(field: Schema, models: Mapping[str, Schema]) -> tuple[str, Schema] | None:
    """The model that a field holds and how its place is written: one, a list of them (`[]`) or a map of them (`.<name>`)."""
    parts = [("", part) for part in _alternatives(field)]
    parts += [(mark, field[inside]) for mark, inside in (("[]", "items"), (".<name>", "additionalProperties")) if inside in field]
    return next(((mark, models[part["$ref"].rsplit("/", 1)[1]]) for mark, part in parts if isinstance(part, Mapping) and "$ref" in part), None)


def _alternatives(field: Schema) -> list[Schema]:
    return list(field.get("anyOf", [field]))


def _kind(field: Schema) -> str:
    """What a key takes."""
    return " or ".join(_one_kind(part) for part in _alternatives(field))


def _one_kind(part: Schema) -> str:
    if "$ref" in part:
        return "a section"
    if "enum" in part or "const" in part:
        return ", ".join(f"`{value}`" for value in part.get("enum", [part.get("const")]))
    match part.get("type"):
        case "array":
            members = part["prefixItems"] if "prefixItems" in part else [part["items"]]
            return "a list of " + ("sections" if "$ref" in members[0] else f"{len(members)} numbers" if len(members) > 1 else _kind(members[0]))
        case "object":
            return _map_kind([part.get("additionalProperties"), *part.get("patternProperties", {}).values()])
        case kind:
            return {"string": "text", "boolean": "`true`, `false`", "null": "none"}.get(str(kind), str(kind)) + _range(part)


def _map_kind(members: list[Any]) -> str:
    member = next((member for member in members if isinstance(member, Mapping)), {})
    return "a map of sections" if "$ref" in member else "a map of texts" if member.get("type") == "string" else "a map"


def _range(part: Schema) -> str:
    signs = (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))
    bounds = [f"{sign} {part[name]:g}" for name, sign in signs if name in part]
    return f" {' and '.join(bounds)}" if bounds else f" matching `{part['pattern']}`" if "pattern" in part else ""


def _default(field: Schema, *, required: bool) -> str:
    value = field.get("default")
    if required:
        return "required"
    if isinstance(value, Mapping) and value:
        return "its defaults"
    return "none" if value is None else f"`{value if isinstance(value, str) else json.dumps(value)}`"
