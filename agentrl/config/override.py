"""Overrides: `a.b=c` from the command line, or `a.b: c` from a recipe's `smoke` section, laid on a document.

    learner.learning_rate=1e-3     tasks.train[0].path=my.jsonl     env.options={"max_turns": 3}     warm_start=null

The value is YAML (so JSON works too). A map is merged into the map that is there, everything else replaces what is there; sections on the way
are made where the document has none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from agentrl.config.document import Node, Origin, Step, merge, parse, path_text
from agentrl.errors import ConfigError

__all__ = ["Override", "is_override", "override", "parse_path"]

_KEY = r"[A-Za-z0-9_-]+(?:\[[0-9]+\])*"
_PATH = re.compile(rf"^{_KEY}(?:\.{_KEY})*$")
_STEP = re.compile(r"\[([0-9]+)\]|([^.\[\]]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """A value and the path it is to stand at."""

    path: tuple[Step, ...]
    node: Node

    @classmethod
    def of(cls, text: str) -> Override:
        """The override written `a.b=c`.

        Raises:
            ConfigError: it is not of that form, or its value is not YAML.
        """
        left, equals, right = text.partition("=")
        origin = Origin(label=f"override {text!r}")
        if not equals:
            raise ConfigError(f"{origin}: an override is written key.key=value")
        node = parse(right, label=origin.label, located=False)
        return cls(path=parse_path(left.strip(), origin), node=replace(node, key=origin))

    def apply(self, document: Node) -> Node:
        """A copy of `document` with the override laid on it.

        Raises:
            ConfigError: the path leads through a scalar, or to an item that a list does not have.
        """
        return _lay(document, self.path, self)


def override(document: Node, overrides: list[Override]) -> tuple[Node, list[ConfigError]]:
    """The document with all overrides laid on it that can be, and the errors of those that cannot."""
    refused = []
    for item in overrides:
        try:
            document = item.apply(document)
        except ConfigError as error:
            refused.append(error)
    return document, refused


def is_override(argument: str) -> bool:
    """Whether a command line argument is written like an override, not like a file."""
    left, equals, _ = argument.partition("=")
    return bool(equals) and _PATH.match(left.strip()) is not None


def parse_path(text: str, origin: Origin) -> tuple[Step, ...]:
    """The steps of `a.b[0].c`.

    Raises:
        ConfigError: it is not of that form.
    """
    if not _PATH.match(text):
        raise ConfigError(f"{origin}: not a path to a key: {text!r} (written like tasks.train[0].path)")
    return tuple(int(index) if index else key for index, key in _STEP.findall(text))


def _lay(node: Node, path: tuple[Step, ...], item: Override) -> Node:
    if not path:
        return merge(node, item.node)
    step, done = path[0], item.path[: len(item.path) - len(path)]
    if isinstance(step, int):
        if not isinstance(node.value, list):
            raise ConfigError(f"{item.node.origin}: {path_text(done)} is not a list")
        if step >= len(node.value):
            raise ConfigError(f"{item.node.origin}: {path_text(done)} has {len(node.value)} item(s), so there is no [{step}]")
        return replace(node, value=[_lay(child, path[1:], item) if i == step else child for i, child in enumerate(node.value)])
    if node.value is not None and not isinstance(node.value, dict):
        raise ConfigError(f"{item.node.origin}: {path_text(done)} is not a section, it has no key {step}")
    children = node.value or {}
    origin = item.node.origin
    child = _lay(children[step], path[1:], item) if step in children else _grow(path[1:], item)
    # A key that the override sets, or makes, is reported as the override's.
    child = replace(child, key=origin) if len(path) == 1 or step not in children else child
    return replace(node, value={**children, step: child})


def _grow(path: tuple[Step, ...], item: Override) -> Node:
    return _lay(Node(value=None, origin=item.node.origin), path, item) if path else item.node
