"""Text to tokens: each piece of text an environment says is encoded once, on its own, with nothing added.

    prompt = encoder.encode_start(Observation.user("Who wrote Hamlet?"))
    info = encoder.encode_observation(Observation.framed("<information>", passages, "</information>"), budget=500)

Only `tokenizers` and `jinja2` are used, on the files of a model's directory (tokenizer.json, tokenizer_config.json, chat_template.jinja).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from agentrl.env import Observation, Segment
from agentrl.errors import ConfigError
from agentrl.rollout.chat import ChatTemplate, read_settings, special_tokens

__all__ = ["Encoded", "TokenEncoder", "Tokens"]

CACHED_SEGMENTS = 8192  # frames, prompts of a group and passages come again; at 500 tokens each this is 16 MB of ids
CACHED_CHARACTERS = 16_384  # a longer text is not kept
MIN_CHARACTERS_PER_TOKEN = 128  # of untrusted text, this much is looked at for every token of the budget, or the longest token's length

# Texts are encoded one at a time. `encode_batch_fast`, which leaves out where in the text each token stands and so takes three quarters of the
# time of `encode`, would start a thread for every core all the same.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The tokens of an observation, cut to a budget."""

    ids: Tokens  # [L]
    truncated: bool = False  # untrusted text was cut
    fits: bool = True  # False: the frames alone exceed the budget; they are whole, and all untrusted text is gone


class TokenEncoder:
    """The run's frozen tokenizer.

    Frames are encoded as the tokenizer does it, control tokens included. Untrusted text is encoded by a copy of the tokenizer that has
    never heard of its added tokens, special or not: they are taken out of its list of added tokens and out of the model's vocabulary
    and merges, so that none can occur whatever the text says. (An unknown word still becomes the unknown token, where the model has one.)

    A message with a role is wrapped by the chat template, where there is one. A beginning-of-sequence token is put before a prompt only
    where the tokenizer's own post-processor would put it (or `add_bos_token` says so), and never where a chat template wrote the prompt:
    the template decides then.

    "Nothing added": the prefix space that some tokenizers put before every text is switched off.
    """

    def __init__(self, definition: dict[str, Any], *, template: ChatTemplate | None = None, bos: str | None = None) -> None:
        unprefixed = _without_prefix(definition) | {"truncation": None, "padding": None}
        self._tokenizer = Tokenizer.from_str(json.dumps(unprefixed))
        added = definition.get("added_tokens") or []
        unknown = definition["model"].get("unk_token")
        self._controls = frozenset(token["id"] for token in added if token["content"] != unknown)
        self._plain = Tokenizer.from_str(json.dumps(_without_added(unprefixed, {token["content"] for token in added} - {unknown})))
        self._template = template
        self._bos = self._own_bos(bos)
        self._cached = lru_cache(CACHED_SEGMENTS)(self._encode_segment)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values())
        self._characters_per_token = max(MIN_CHARACTERS_PER_TOKEN, *map(len, vocabulary))

    @classmethod
    def load(cls, directory: Path) -> TokenEncoder:
        """The tokenizer of a model's directory.

        Raises:
            ConfigError: there is no `tokenizer.json`, or it or the chat template cannot be read.
        """
        file = directory / "tokenizer.json"
        if not file.exists():
            raise ConfigError(f"{file} does not exist: rollouts need the tokenizer in the `tokenizers` format (save it with a fast tokenizer)")
        settings = read_settings(directory)
        bos = special_tokens(settings).get("bos_token") if settings.get("add_bos_token") is True else None
        return cls(json.loads(file.read_text(encoding="utf-8")), template=ChatTemplate.load(directory), bos=bos)

    def encode_start(self, observation: Observation) -> Encoded:
        """The prompt of an episode; never cut."""
        if observation.role is None or self._template is None:
            return Encoded(ids=np.concatenate([self._bos, *map(self._segment, observation.segments)]))
        before, after = self._template.opening(observation.role)
        return Encoded(ids=np.concatenate([self._frame(before), *map(self._segment, observation.segments), self._frame(after)]))

    def encode_observation(self, observation: Observation, budget: int | None = None, *, after: int | None = None) -> Encoded:
        """What an environment said to a completion, in at most `budget` tokens, the template's wrapping included.

        Args:
            after: the last token the policy wrote. Where it closed its turn itself (its end-of-turn token), that token is not repeated.
        """
        pieces = [self._segment(segment if budget is None else self._within(segment, budget)) for segment in observation.segments]
        untrusted = [segment.untrusted for segment in observation.segments]
        if observation.role is not None and self._template is not None:
            closing, opening = map(self._frame, self._template.following(observation.role))
            if len(closing) and closing[0] == after and after in self._controls:
                closing = closing[1:]
            pieces, untrusted = [closing, *pieces, opening], [False, *untrusted, False]
        return _cut(pieces, untrusted, budget)

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """The text of `ids`, special tokens shown."""
        text: str = self._tokenizer.decode(ids.tolist() if isinstance(ids, np.ndarray) else list(ids), skip_special_tokens=False)
        return text

    def is_control(self, token: int) -> bool:
        """Whether `token` is an added token of the tokenizer (the unknown token aside): one that untrusted text cannot hold."""
        return token in self._controls

    def _frame(self, text: str) -> Tokens:
        return self._segment(Segment(text=text))

    def _within(self, segment: Segment, budget: int) -> Segment:
        """Untrusted text without what cannot be within the budget: a tool may answer megabytes, and encoding them would stall every episode."""
        longest = (budget + 1) * self._characters_per_token
        return Segment(text=segment.text[:longest], untrusted=True) if segment.untrusted and len(segment.text) > longest else segment

    def _segment(self, segment: Segment) -> Tokens:
        return self._cached(segment) if len(segment.text) <= CACHED_CHARACTERS else self._encode_segment(segment)

    def _encode_segment(self, segment: Segment) -> Tokens:
        tokenizer = self._plain if segment.untrusted else self._tokenizer
        ids = tokenizer.encode_batch_fast([_well_formed(segment.text)], add_special_tokens=False)[0].ids
        if segment.untrusted and not self._controls.isdisjoint(ids):
            ids = [token for token in ids if token not in self._controls]  # a vocabulary that entries cannot be taken out of: Unigram's
        array = np.array(ids, dtype=np.int32)
        array.flags.writeable = False  # shared by all who ask again
        return array

    def _own_bos(self, bos: str | None) -> Tokens:
        probe = "a"
        bare = self._tokenizer.encode(probe, add_special_tokens=False).ids
        full = self._tokenizer.encode(probe, add_special_tokens=True).ids
        starts = [start for start in range(len(full) - len(bare) + 1) if full[start : start + len(bare)] == bare]
        ids = full[: starts[0]] if bare and starts else []
        if ids or bos is None:
            return np.array(ids, dtype=np.int32)
        number = self._tokenizer.token_to_id(bos)
        if number is None:
            raise ConfigError(f"tokenizer_config.json says add_bos_token, but the tokenizer has no token {bos!r}")
        return np.array([number], dtype=np.int32)


def _well_formed(text: str) -> str:
    """Lone surrogates, which JSON can carry and no encoder takes, become replacement characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _cut(pieces: list[Tokens], untrusted: list[bool], budget: int | None) -> Encoded:
    """Join, untrusted pieces cut from the end so that all fit; frames stay whole."""
    total = sum(map(len, pieces))
    if budget is None or total <= budget:
        return Encoded(ids=np.concatenate(pieces) if pieces else np.array([], dtype=np.int32))
    frames = sum(len(piece) for piece, loose in zip(pieces, untrusted, strict=True) if not loose)
    left = max(budget - frames, 0)
    kept = []
    for piece, loose in zip(pieces, untrusted, strict=True):
        kept.append(piece[:left] if loose else piece)
        left -= len(kept[-1]) if loose else 0
    return Encoded(ids=np.concatenate(kept), truncated=total > frames, fits=frames <= budget)


def _without_added(definition: dict[str, Any], words: set[str]) -> dict[str, Any]:
    """The tokenizer without its added tokens, and its model without them as words."""
    model = dict(definition["model"])
    if isinstance(model.get("vocab"), dict):  # WordLevel, WordPiece, BPE; Unigram's is a list whose places are the ids
        model["vocab"] = {word: number for word, number in model["vocab"].items() if word not in words}
    if "merges" in model:
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if words.isdisjoint((*pair, "".join(pair)))]
    return definition | {"model": model, "added_tokens": [], "post_processor": None}


def _without_prefix(value: Any) -> Any:
    """Switch off whatever puts a space (or its stand-in) before every text."""
    if isinstance(value, list):
        return [_without_prefix(part) for part in value if not (isinstance(part, dict) and part.get("type") == "Prepend")]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "Prepend":
        return None
    off = {"add_prefix_space": False, "prepend_scheme": "never"}
    return {key: off[key] if key in off else _without_prefix(part) if key in _NESTED else part for key, part in value.items()}


_NESTED = {"normalizer", "normalizers", "pre_tokenizer", "pretokenizers"}  # not the model: its vocabulary is large and holds no settings
