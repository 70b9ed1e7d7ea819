"""SGLang's response shapes."""

from __future__ import annotations

import math
import time
from typing import Any

from agentrl.engine.sequence import ABORTED_WAITING, Progress, Sequence
from agentrl.engine.stops import UNDECODABLE, TokenText

__all__ = ["failure_status", "generate_reply", "outcome", "refused", "stream_reply"]

LogprobEntry = list[Any]  # [logprob | null, token id, text | null]


def generate_reply(sequence: Sequence, text: TokenText | None) -> dict[str, Any]:
    """The reply to one finished sequence. Aborted in the queue, it has SGLang's reduced `meta_info`, with all tokens it had."""
    assert sequence.finish is not None
    count = len(sequence.output)
    if sequence.finish.get("message") == ABORTED_WAITING["message"]:
        meta = {"id": sequence.request.rid, "finish_reason": sequence.finish, "weight_version": sequence.version, "completion_tokens": count}
        meta |= _logprobs(sequence, count, text)
    else:
        meta = _meta(sequence, count, sequence.version, text)
    meta |= {
        # as SGLang has it: no token, and yet a span
        "weight_versions": sequence.version_spans() or [{"version": sequence.version, "start": 0, "end": 0}],
        "e2e_latency": sequence.finished_s - sequence.arrived_s,
        "response_sent_to_client_ts": time.time(),
    }
    reply = {"output_ids": sequence.output, "meta_info": meta}
    return reply if text is None else {"text": _text(sequence, text), **reply}


def stream_reply(sequence: Sequence, progress: Progress, text: TokenText | None) -> dict[str, Any]:
    """A chunk of a stream before its last: everything so far, without what only the end can tell."""
    ids = sequence.output[: progress.tokens]
    reply = {"output_ids": ids, "meta_info": _meta(sequence, progress.tokens, progress.version, text)}
    if text is None:
        return reply
    # the bytes of a character that is not whole yet come with the chunk that ends it
    words = text.decode(ids, skip_special_tokens=sequence.request.params.skip_special_tokens).rstrip(UNDECODABLE)
    return {"text": words, **reply}


def failure_status(sequence: Sequence) -> int | None:
    """The HTTP status of a sequence that failed rather than ended."""
    status: int | None = (sequence.finish or {}).get("status_code")
    return status


def outcome(message: str, **more: Any) -> dict[str, Any]:
    """A control call that worked."""
    return {"success": True, "message": message, **more}


def refused(message: str) -> dict[str, Any]:
    """A control call that did not."""
    return {"success": False, "message": message}


def _meta(sequence: Sequence, count: int, version: str, text: TokenText | None) -> dict[str, Any]:
    """What is said of a sequence with its first `count` tokens."""
    cached = sequence.cached_tokens
    return {
        "id": sequence.request.rid,
        "finish_reason": sequence.finish if sequence.finish is not None and count == len(sequence.output) else None,
        "prompt_tokens": len(sequence.request.input_ids),
        "weight_version": version,
        "num_retractions": sequence.retractions,
        **_logprobs(sequence, count, text),
        "reasoning_tokens": 0,
        "completion_tokens": count,
        "cached_tokens": cached,
        "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        "dp_rank": None,
    }


def _logprobs(sequence: Sequence, count: int, text: TokenText | None) -> dict[str, Any]:
    if not sequence.request.return_logprob:
        return {}
    return {
        "input_token_logprobs": _prompt_entries(sequence, text),
        "output_token_logprobs": _entries(sequence, sequence.logprobs[:count], sequence.output[:count], text),
        "output_token_logprobs_length": count,
    }


def _text(sequence: Sequence, text: TokenText) -> str:
    """The completion's text, without what stopped it unless `no_stop_trim`."""
    params, matched = sequence.request.params, (sequence.finish or {}).get("matched")
    ids = sequence.output[:-1] if isinstance(matched, int) and not params.no_stop_trim else sequence.output
    words = text.decode(ids, skip_special_tokens=params.skip_special_tokens)
    if isinstance(matched, str) and not params.no_stop_trim:
        at = words.find(matched)
        return words if at < 0 else words[:at]
    return words


def _prompt_entries(sequence: Sequence, text: TokenText | None) -> list[LogprobEntry]:
    """Of the prompt's tokens from `logprob_start` on; the first has no log-prob, as in SGLang."""
    request = sequence.request
    start = request.logprob_start
    if sequence.prompt_logprobs is None or start >= len(request.input_ids):
        return []
    scores = [math.nan, *(sequence.prompt_logprobs if start == 0 else sequence.prompt_logprobs[1:])]
    entries = _entries(sequence, scores, request.input_ids[start:], text)
    return [[None, *entries[0][1:]], *entries[1:]]


def _entries(sequence: Sequence, logprobs: list[float], ids: list[int], text: TokenText | None) -> list[LogprobEntry]:
    if sequence.request.text_in_logprobs and text is not None:
        return [[logprob, token, text.decode([token], skip_special_tokens=False)] for logprob, token in zip(logprobs, ids, strict=True)]
    return [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
