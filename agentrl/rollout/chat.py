"""Chat templates: what a tokenizer's template writes around a message.

The template is rendered with markers in place of the contents and split around them; the contents themselves never pass through it. So
text cannot change what the template does, and a conversation only ever grows at its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from agentrl.errors import ConfigError

__all__ = ["ChatTemplate", "Wrapping", "read_settings", "special_tokens"]

_CONTENT = "\ue0f0content\ue0f1"  # private-use characters: no template writes them
_ASSISTANT = "\ue0f0assistant\ue0f1"
_FIRST = "\ue0f0first\ue0f1"

Wrapping = tuple[str, str]  # what stands before the content, and after it up to where the assistant begins to write


class ChatTemplate:
    """A jinja2 chat template of Hugging Face's kind, from `chat_template.jinja` or `tokenizer_config.json`."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._template = _environment().from_string(source)
        self._variables = dict(variables)
        self.opening = cache(self._opening)
        self.following = cache(self._following)

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """The template of a tokenizer's directory; None where it has none."""
        file = directory / "chat_template.jinja"
        settings = read_settings(directory)
        source = file.read_text(encoding="utf-8") if file.exists() else settings.get("chat_template")
        if isinstance(source, list):  # several by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return None if source is None else cls(source, special_tokens(settings))

    def divergence(self, first: str, later: str | None, *, reply: str, turns: int = 3) -> tuple[str, str] | None:
        """Where the template, given a whole conversation, writes another text than turn by turn: its text and ours; None where it never does.

        A server that renders messages shows the model the first, an episode the second. Equal at every number of turns, each text is the
        start of the next.

        Args:
            first: the role of the first message; `later`: of those that answer the assistant. None: the template writes none of those.
            reply: what the assistant says in every turn.
        """
        messages = [{"role": first, "content": "message 0"}]
        before, after = self.opening(first)
        ours = f"{before}message 0{after}"
        for turn in range(1, turns + 1):
            whole = self._render(messages)
            if whole != ours:
                return whole, ours
            if later is None:
                return None
            before, after = self.following(later)
            ours += f"{reply}{before}message {turn}{after}"
            messages += [{"role": "assistant", "content": reply}, {"role": later, "content": f"message {turn}"}]
        return None

    def _opening(self, role: str) -> Wrapping:
        """Around the first message, `role`'s."""
        text = self._render([{"role": role, "content": _CONTENT}])
        return self._split(text, role)

    def _following(self, role: str) -> Wrapping:
        """Around a later message of `role`: what closes the assistant's turn, then the message."""
        messages = [{"role": "user", "content": _FIRST}, {"role": "assistant", "content": _ASSISTANT}, {"role": role, "content": _CONTENT}]
        _, found, text = self._render(messages).partition(_ASSISTANT)
        if not found:
            raise ConfigError("the chat template drops the assistant's message: episodes of several messages need another template")
        return self._split(text, role)

    def _split(self, text: str, role: str) -> Wrapping:
        before, found, after = text.partition(_CONTENT)
        if not found or _CONTENT in after:
            raise ConfigError(f"the chat template writes a message of role {role!r} {'twice' if found else 'not at all'}: expected it once")
        return before, after

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._variables)
        except jinja2.TemplateError as error:
            roles = " -> ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template refuses the roles {roles}: {error}") from error


def read_settings(directory: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, empty where there is none."""
    file = directory / "tokenizer_config.json"
    value = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object")
    return value


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens (`bos_token`, `eos_token`, ...) of a tokenizer's settings, as text."""
    named = {name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items() if name.endswith("_token")}
    return {name: value for name, value in named.items() if isinstance(value, str)}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for trainers; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """As transformers makes it: templates are written against exactly these settings."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
