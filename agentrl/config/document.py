"""A YAML document that remembers where each of its values was written.

Scalars follow the core schema of YAML 1.2, not PyYAML's 1.1: `1e-6` is a float, only true and false are booleans, `3:30` and `no` are
strings, `017` is 17. Duplicate keys, keys that are no strings, tags and values that contain themselves are refused.

    parse("a: 1", label="x.yaml") -> Node(value={"a": Node(value=1, origin=x.yaml:1:4, key=x.yaml:1:1)}, origin=x.yaml:1:1)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ConfigError

__all__ = ["Node", "Origin", "Step", "dump", "merge", "parse", "path_text", "plain", "plant", "read"]

Step = str | int  # one step into a document: a key of a map or an index of a list


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a value was written: a place in a file, or an override of the command line (line 0)."""

    label: str
    line: int = 0
    column: int = 0
    folder: Path | None = None  # of the file: relative paths are looked for there too

    def __str__(self) -> str:
        return f"{self.label}:{self.line}:{self.column}" if self.line else self.label


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A value: a scalar, a `dict[str, Node]` or a `list[Node]`; where it was written, and where its key was (None for list items)."""

    value: Any
    origin: Origin
    key: Origin | None = None


def read(path: Path) -> Node:
    """The document in a file.

    Raises:
        ConfigError: it cannot be read, is not YAML, or is not a map; with file, line and column.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error.reason} at byte {error.start})"
        raise ConfigError(f"{path}: cannot read the recipe: {reason}") from error
    node = parse(text, label=str(path), folder=path.resolve().parent)
    if not isinstance(node.value, dict):
        raise ConfigError(f"{node.origin}: a recipe is a map of sections, got {'nothing' if node.value is None else repr(plain(node))}")
    return node


def parse(text: str, *, label: str, folder: Path | None = None, located: bool = True) -> Node:
    """The document in a text.

    Args:
        label: what error messages call the text, e.g. the file's name.
        folder: kept in every origin.
        located: whether line and column mean anything to the reader (not so for an override's value).

    Raises:
        ConfigError: it is not YAML, or uses what this module refuses.
    """
    origins = _Origins(label, folder, located)
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        return Node(value=None, origin=origins.at(None)) if root is None else _build(root, origins, None, ())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        told = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{origins.at(mark)}: not valid YAML: {told}") from error
    finally:
        loader.dispose()


def plain(node: Node) -> Any:
    """The value without its origins."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def plant(value: Any, origin: Origin, key: Origin | None = None) -> Node:
    """The node of a plain value, all of it written at `origin`."""
    if isinstance(value, dict):
        return Node(value={name: plant(child, origin, origin) for name, child in value.items()}, origin=origin, key=key)
    if isinstance(value, (list, tuple)):
        return Node(value=[plant(child, origin) for child in value], origin=origin, key=key)
    return Node(value=value, origin=origin, key=key)


def merge(base: Node, over: Node) -> Node:
    """`over` laid on `base`: maps are merged key by key, everything else (lists too) is replaced."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for name, child in over.value.items():
        merged[name] = merge(merged[name], child) if name in merged else child
    return replace(base, value=merged)


def path_text(path: Sequence[Step]) -> str:
    """E.g. `tasks.train[0].path`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def dump(value: Any) -> str:
    """YAML text that `parse` reads as `value`."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=150)
    return text


_CORE = {
    "null": re.compile(r"^(?:~|null|Null|NULL|)$"),
    "bool": re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    "float": re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
}
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, _pattern in _CORE.items():  # in this order: an integer would also match as a float
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, _pattern, None)


class _Origins:
    def __init__(self, label: str, folder: Path | None, located: bool) -> None:
        self._label, self._folder, self._located = label, folder, located

    def at(self, mark: yaml.Mark | None) -> Origin:
        if not self._located:
            return Origin(label=self._label, folder=self._folder)
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        return Origin(label=self._label, line=line, column=column, folder=self._folder)


def _build(node: yaml.Node, origins: _Origins, key: Origin | None, above: tuple[int, ...]) -> Node:
    origin = origins.at(node.start_mark)
    if id(node) in above:
        raise ConfigError(f"{origin}: this value contains itself")
    if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
        return Node(value=_build_map(node, origins, (*above, id(node))), origin=origin, key=key)
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        return Node(value=[_build(child, origins, None, (*above, id(node))) for child in node.value], origin=origin, key=key)
    if isinstance(node, yaml.ScalarNode):
        return Node(value=_scalar(node, origin), origin=origin, key=key)
    raise ConfigError(f"{origin}: tags are not supported: {node.tag}")


def _build_map(node: yaml.MappingNode, origins: _Origins, above: tuple[int, ...]) -> dict[str, Node]:
    built: dict[str, Node] = {}
    for key, child in node.value:
        origin = origins.at(key.start_mark)
        if not isinstance(key, yaml.ScalarNode) or not isinstance(name := _scalar(key, origin), str):
            raise ConfigError(f"{origin}: a key must be a string, got {getattr(key, 'value', '')!r} (put it in quotes)")
        if name in built:
            raise ConfigError(f"{origin}: duplicate key {name} (first at {built[name].key})")
        built[name] = _build(child, origins, origin, above)
    return built


def _scalar(node: yaml.ScalarNode, origin: Origin) -> Any:
    text: str = node.value
    match node.tag.removeprefix(_TAG):
        case "str":
            return text
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    raise ConfigError(f"{origin}: tags are not supported: {node.tag}")
