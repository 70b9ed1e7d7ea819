"""What a policy wrote in one turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from agentrl.rollout.tokens import Tokens

__all__ = ["EOS", "LENGTH", "Completion", "Policy", "first_stop"]

EOS = "eos"
LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The policy's tokens of one turn, whole, and their text up to where the turn's action ends.

    `token_ids` may carry characters after the stop string, where the last token holds more than it: they stay in the ids and are no part of
    `text`.
    """

    token_ids: Tokens  # [C], C >= 1
    logprobs: npt.NDArray[np.float32]  # [C], as sampled: log_softmax(logits / T)
    versions: npt.NDArray[np.int32]  # [C]
    text: str  # special tokens shown, up to and including the stop string
    stop: str  # the stop string, EOS or LENGTH
    engine: str
    started_s: float
    generated_s: float


class Policy(Protocol):
    """Who plays: one episode's view of a language model. Called once per turn, in order."""

    async def complete(self, token_ids: Tokens, *, stop_strings: Sequence[str], budget: int) -> Completion:
        """Continue `token_ids` by 1 to `budget` tokens, ending at the first of `stop_strings`."""
        ...


def first_stop(text: str, stop_strings: Sequence[str]) -> tuple[str, str] | None:
    """The stop string that is complete first in `text`, and the text up to and including it; None where there is none."""
    ends = [(at + len(stop), stop) for stop in stop_strings if (at := text.find(stop)) >= 0]
    if not ends:
        return None
    end, stop = min(ends)
    return stop, text[:end]
