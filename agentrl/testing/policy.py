"""A policy that says what it is told to, as real tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from agentrl.env import Observation
from agentrl.rollout.completion import EOS, LENGTH, Completion, first_stop
from agentrl.rollout.tokens import TokenEncoder, Tokens

__all__ = ["ScriptedPolicy", "saying"]


class ScriptedPolicy:
    """Says `texts`, one per turn, and ends each at the environment's stop string, its own end or the budget.

    Args:
        version: of the weights that its tokens claim to come from.
        logprob: of every token.
    """

    def __init__(self, texts: Sequence[str], *, encoder: TokenEncoder, version: int = 0, logprob: float = -0.5) -> None:
        self._texts = list(texts)
        self._encoder = encoder
        self._version = version
        self._logprob = logprob
        self.prompts: list[Tokens] = []  # what it was asked to continue

    async def complete(self, token_ids: Tokens, *, stop_strings: Sequence[str], budget: int) -> Completion:
        """Say the next text.

        Raises:
            AssertionError: the script is over, but the episode is not.
        """
        if len(self.prompts) == len(self._texts):
            raise AssertionError(f"the script has {len(self._texts)} turns, and the episode goes on after them")
        now = time.time()
        said = self._encoder.encode_observation(Observation.frame(self._texts[len(self.prompts)])).ids
        self.prompts.append(token_ids)
        ids, text, stop = self._ended(said, stop_strings, budget)
        return Completion(
            token_ids=ids,
            logprobs=np.full(len(ids), self._logprob, dtype=np.float32),
            versions=np.full(len(ids), self._version, dtype=np.int32),
            text=text,
            stop=stop,
            engine="script",
            started_s=now,
            generated_s=time.time(),
        )

    def _ended(self, said: Tokens, stop_strings: Sequence[str], budget: int) -> tuple[Tokens, str, str]:
        for length in range(1, min(len(said), budget) + 1):
            found = first_stop(self._encoder.decode(said[:length]), stop_strings)
            if found is not None:
                return said[:length], found[1], found[0]
        ids = said[:budget]
        return ids, self._encoder.decode(ids), EOS if len(said) <= budget else LENGTH


def saying(*texts: str) -> Callable[[TokenEncoder], ScriptedPolicy]:
    """For `play(policy=saying(...))`: a `ScriptedPolicy` of these texts."""
    return lambda encoder: ScriptedPolicy(texts, encoder=encoder)
