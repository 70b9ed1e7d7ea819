"""SGLang's response shapes."""

from __future__ import annotations

import time
from typing import Any

from agentrl.engine.sequence import Sequence
from agentrl.engine.stops import TokenText

__all__ = ["failure_status", "generate_reply", "outcome", "refused"]

LogprobEntry = list[Any]  # [logprob | null, token id, text | null]


def generate_reply(sequence: Sequence, text: TokenText | None) -> dict[str, Any]:
    """The reply to one finished sequence. Aborted in the queue, it has SGLang's reduced `meta_info`, with all tokens it had."""
    request = sequence.request
    assert sequence.finish is not None
    meta: dict[str, Any] = {"id": request.rid, "finish_reason": sequence.finish, "weight_version": sequence.version}
    waited = sequence.finish.get("message") == "Abort in waiting queue"
    if not waited:
        meta |= {"prompt_tokens": len(request.input_ids), "num_retractions": sequence.retractions}
    if request.return_logprob:
        meta["input_token_logprobs"] = _prompt_entries(sequence, text)
        meta["output_token_logprobs"] = _entries(sequence, sequence.logprobs, sequence.output, text)
        meta["output_token_logprobs_length"] = len(sequence.output)
    meta |= {"reasoning_tokens": 0, "completion_tokens": len(sequence.output)}
    if not waited:
        meta |= {"cached_tokens": sequence.cached_tokens, "cached_tokens_details": {"device": sequence.cached_tokens, "host": 0}}
    meta |= {
        "weight_versions": sequence.version_spans(),
        "dp_rank": None,
        "e2e_latency": sequence.finished_s - sequence.arrived_s,
        "response_sent_to_client_ts": time.time(),
    }
    reply = {"output_ids": sequence.output, "meta_info": meta}
    return reply if text is None else {"text": _text(sequence, text), **reply}


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
    request = sequence.request
    if sequence.prompt_logprobs is None:
        return []
    first = [[None, *entry[1:]] for entry in _entries(sequence, [0.0], request.input_ids[:1], text)] if request.logprob_start == 0 else []
    return first + _entries(sequence, sequence.prompt_logprobs, request.input_ids[max(request.logprob_start, 1) :], text)


def _entries(sequence: Sequence, logprobs: list[float], ids: list[int], text: TokenText | None) -> list[LogprobEntry]:
    if sequence.request.text_in_logprobs and text is not None:
        return [[logprob, token, text.decode([token], skip_special_tokens=False)] for logprob, token in zip(logprobs, ids, strict=True)]
    return [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
