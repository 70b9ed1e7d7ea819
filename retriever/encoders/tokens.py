"""Texts to chunks of token ids: truncated, sorted by length and cut, so that little of what is computed is padding."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.files import TOKENIZER, ModelFiles

__all__ = ["Chunk", "ChunkLimits", "TextTokenizer", "cut"]

Ids = npt.NDArray[np.int64]

# A text is cut to this many characters per token before it is tokenized, which takes time with its length: no sensible text has longer tokens.
CHARACTERS_PER_TOKEN = 64
BYTES_PER_CHARACTER = 4  # at most, in UTF-8: no text has more tokens than bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkLimits:
    """How much is computed at a time."""

    rows: int
    tokens: int  # padding included


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """N texts of T tokens together, one after another, that are computed together. The first is the longest."""

    places: Ids  # [N]: where in the list each text was
    lengths: Ids  # [N]: in tokens
    ids: Ids  # [T]
    types: Ids  # [T]: 1 in the second text of a pair


class TextTokenizer:
    """A model's tokenizer, without its own truncation and padding.

    Raises:
        EncoderFault: tokenizer.json is not one that the tokenizers library reads.
    """

    def __init__(self, files: ModelFiles, *, threads: int) -> None:
        # Read by the library when it starts its threads; one thread is itself.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true" if threads > 1 else "false")
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_file(str(files.directory / TOKENIZER))
        except Exception as error:
            raise EncoderFault(f"{files.directory / TOKENIZER} cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._limit: tuple[int, str] | None = None

    def count(self, text: str) -> int:
        """Tokens of a whole text, special ones included."""
        self._tokenizer.no_truncation()
        self._limit = None
        return len(self._tokenizer.encode(text).ids)

    def chunks(self, texts: Sequence[str], *, max_tokens: int, limits: ChunkLimits) -> Iterator[Chunk]:
        """All texts, each in one chunk."""
        self._truncate(max_tokens, "longest_first")
        longest = max_tokens * CHARACTERS_PER_TOKEN
        return self._chunks([_encodable(text[:longest]) for text in texts], limits)

    def pair_chunks(self, pairs: Sequence[tuple[str, str]], *, max_tokens: int, limits: ChunkLimits) -> Iterator[Chunk]:
        """All pairs, each in one chunk. Where one is too long, its second text is cut; the first, only where it alone takes more than half."""
        longest, most = max_tokens * CHARACTERS_PER_TOKEN, max(1, max_tokens // 2)
        firsts = {first: self._shortened(first, most) for first, _ in pairs}
        self._truncate(max_tokens, "only_second")
        return self._chunks([(firsts[first], _encodable(second[:longest])) for first, second in pairs], limits)

    def _shortened(self, text: str, max_tokens: int) -> str:
        """The text up to that many tokens."""
        text = _encodable(text[: max_tokens * CHARACTERS_PER_TOKEN])
        if len(text) * BYTES_PER_CHARACTER <= max_tokens:
            return text
        self._tokenizer.no_truncation()
        self._limit = None
        ends = [end for _, end in self._tokenizer.encode(text, add_special_tokens=False).offsets[:max_tokens]]
        return text[: max(ends, default=0)]

    def _chunks(self, texts: Sequence[Any], limits: ChunkLimits) -> Iterator[Chunk]:
        encodings = self._tokenizer.encode_batch_fast(texts)
        for places in cut([len(encoding.ids) for encoding in encodings], limits):
            some = [encodings[place] for place in places]
            yield Chunk(
                places=places,
                lengths=np.array([len(encoding.ids) for encoding in some], np.int64),
                ids=np.concatenate([encoding.ids for encoding in some]).astype(np.int64),
                types=np.concatenate([encoding.type_ids for encoding in some]).astype(np.int64),
            )

    def _truncate(self, max_tokens: int, strategy: str) -> None:
        if self._limit != (max_tokens, strategy):
            self._tokenizer.enable_truncation(max_tokens, strategy=strategy)
            self._limit = (max_tokens, strategy)


def _encodable(text: str) -> str:
    """With ? for what is no character: JSON can say half of a surrogate pair, which tokenizers refuses."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def cut(lengths: Sequence[int], limits: ChunkLimits) -> Iterator[Ids]:
    """Places of texts in chunks within the limits, the longest first in each and among them. A text longer than the limit is alone."""
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    start = 0
    while start < len(order):
        rows = max(1, min(limits.rows, limits.tokens // max(1, lengths[order[start]])))
        yield order[start : start + rows]
        start += rows
