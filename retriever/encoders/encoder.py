"""What an index asks of an encoder, and the error of one that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from retriever.query import Vectors

__all__ = ["Encoder", "EncoderFault"]


class EncoderFault(ValueError):
    """A model cannot be used as it was asked for. The message says what is wrong and what to do."""


class Encoder(Protocol):
    """Texts to vectors. Used by one thread at a time. A text's vector does not depend on what is encoded beside it, but for rounding."""

    @property
    def dim(self) -> int:
        """Length of a vector."""
        ...

    @property
    def record(self) -> Mapping[str, Any]:
        """What a manifest keeps, `kind` among it: `opening.open_encoder` makes the same encoder of it again."""
        ...

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """[N, dim]; a zero row where the text says nothing: it has no hits."""
        ...

    def encode_documents(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> Vectors:
        """[N, dim]; a zero row where the text says nothing. `progress` is told how many texts are done."""
        ...

    def info(self) -> Mapping[str, Any]:
        """How it is set and what runs it, for people and programs."""
        ...
