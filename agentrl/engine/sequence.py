"""One request on its way through the engine: what it has, where it stands, how it ended."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from agentrl.engine.request import GenerateRequest
from agentrl.engine.stops import TokenText

__all__ = ["ABORTED", "ABORTED_WAITING", "FinishReason", "Progress", "Sequence"]

FinishReason = dict[str, Any]

ABORTED: FinishReason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: FinishReason = {"type": "abort", "message": "Abort in waiting queue"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where a sequence stood between two steps. Its lists only grow, so that their first `tokens` entries may be read by any thread."""

    tokens: int  # of the output
    version: str  # of the weights, then


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """A request with its output so far. Belongs to the engine thread until `finish` is set.

    Built from prompt P0 P1 and three tokens, the last two after an update from version 4 to 5:

        request.input_ids  P0 P1
        output                   A0 A1 A2
        logprobs                 x0 x1 x2
        spans              [("4", 0), ("5", 1)]
    """

    request: GenerateRequest
    watched: frozenset[int] = frozenset()  # ids that may end it
    limit: int = 0  # output tokens at most
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)  # (version, first output token it made)
    prompt_logprobs: list[float] | None = None  # of the prompt tokens from max(logprob_start, 1) on
    slot: int = -1
    cached_tokens: int = 0
    retractions: int = 0
    version: str = ""  # when it finished
    finish: FinishReason | None = None
    arrived_s: float = field(default_factory=time.time)
    finished_s: float = 0.0

    @classmethod
    def of(cls, request: GenerateRequest, text: TokenText | None) -> Sequence:
        """A request that has just arrived."""
        params = request.params
        watched = text.watched(params.stop, params.stop_ids) if text is not None else params.stop_ids
        return cls(request=request, watched=watched, limit=params.max_new_tokens)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.request.input_ids + self.output

    @property
    def computed_tokens(self) -> list[int]:
        """The tokens whose keys and values its slot holds: all but the newest output token, which nothing has followed yet."""
        return self.tokens[:-1] if self.output else self.request.input_ids

    def mark_version(self, version: str) -> None:
        """The tokens from here on are made by `version`."""
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.output)))

    def version_spans(self) -> list[dict[str, Any]]:
        """SGLang's `weight_versions`: versions that made at least one token."""
        bounds = [*self.spans, ("", len(self.output))]
        return [{"version": version, "start": start, "end": end} for (version, start), (_, end) in itertools.pairwise(bounds) if end > start]
