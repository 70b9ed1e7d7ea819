"""Stop strings, found cheaply: text is decoded only when the newest token could have completed one.

A stop string is completed by the token that brings its last character. So a token is watched if that character is in its text, or if its text
cannot be told alone (part of a character's bytes). Every other token costs one set lookup. A stop string that ends in white space watches all
tokens: decoders make spaces between tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from agentrl.errors import EngineError

__all__ = ["UNDECODABLE", "TokenText"]

UNDECODABLE = "�"  # what bytes become that are no whole character
_REMEMBERED = 256  # combinations of stops whose watched ids are kept
_MARGIN = 16  # bytes decoded before the longest stop string: decoders treat the first tokens of a text differently


class TokenText:
    """The text side of a tokenizer: decoding, and what of it stops a completion. `watched` is for one thread, the rest for any."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._watched: dict[tuple[tuple[str, ...], frozenset[int]], frozenset[int]] = {}
        self._pieces: list[str] = tokenizer.decode_batch([[token] for token in range(vocabulary)], skip_special_tokens=False)
        # a lower bound of the bytes each token adds to a text: part of a character counts as one byte
        self._piece_bytes = [1 if UNDECODABLE in piece else len(piece.strip().encode()) for piece in self._pieces]

    @classmethod
    def load(cls, model_dir: Path, vocabulary: int) -> TokenText | None:
        """The tokenizer of a model directory, None where it has none."""
        path = model_dir / "tokenizer.json"
        if not path.exists():
            return None
        try:
            return cls(Tokenizer.from_file(str(path)), vocabulary)
        except Exception as error:  # blast radius of a foreign file: tokenizers raises bare Exception
            raise EngineError(f"{path} cannot be read: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with whatever the tokenizer adds by itself."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def watched(self, stops: Sequence[str], stop_ids: frozenset[int] = frozenset()) -> frozenset[int]:
        """`stop_ids` and the ids that can complete one of `stops`."""
        key = (tuple(stops), stop_ids)
        if key not in self._watched:
            if len(self._watched) >= _REMEMBERED:
                self._watched.clear()
            self._watched[key] = stop_ids.union(*(self._watched_by(stop) for stop in stops))
        return self._watched[key]

    def matched(self, ids: Sequence[int], stops: Sequence[str]) -> str | None:
        """The first of `stops` that occurs at the end of the decoded completion, special tokens shown, up to characters its last token adds."""
        text = self.decode(ids[self._tail_start(ids, max(len(stop.encode()) for stop in stops)) :], skip_special_tokens=False)
        return next((stop for stop in stops if stop in text), None)

    def _watched_by(self, stop: str) -> frozenset[int]:
        last = stop[-1]
        return frozenset(
            token for token, piece in enumerate(self._pieces) if last.isspace() or last in piece or UNDECODABLE in piece or last in self._raw(token)
        )

    def _tail_start(self, ids: Sequence[int], stop_bytes: int) -> int:
        """Where to begin decoding so that a stop string ending in the last token is whole."""
        start, have = len(ids), 0
        wanted = stop_bytes + _MARGIN + len(self._pieces[ids[-1]].encode())
        while start > 0 and have < wanted:
            start -= 1
            have += self._piece_bytes[ids[start]]
        return start

    def _raw(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""
