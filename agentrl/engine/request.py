"""What `POST /generate` may say: parsed and checked once, refused with SGLang's status codes and body shapes.

{"error": {"message": ...}}                                     400   a request that cannot be served
{"error": "unknown field `x`, expected one of ..."}              400   a sampling parameter nobody knows
{"object": "error", "message": ..., "type": ..., "code": 400}    400   a body of the wrong form
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.engine.stops import TokenText
from agentrl.errors import EngineRefused

__all__ = ["GenerateRequest", "Limits", "RequestRefused", "SamplingParams", "malformed", "parse_generate"]

MAX_STOP_STRINGS = 32  # SGLang's limit
DEFAULT_NEW_TOKENS = 128  # SGLang's default
GREEDY_BELOW = 1e-6  # SGLang's: a smaller temperature means the likeliest token
_MASK_64 = (1 << 64) - 1
_MAX_POSITION = 1 << 31

# what this engine does not compute, with the values that mean "off"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1),
    "top_k": (None, -1),
    "min_p": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_new_tokens": (None, 0),
    "n": (None, 1),
    "beam_width": (None, 1),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, "", []),
    "logit_bias": (None, {}),
    "watermark": (None, False),
    "choice": (None, []),
}
_COMPUTED = (
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "sampling_seed",
    "custom_params",
)
_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "return_sampling_mask": (None, False),
    "return_hidden_states": (None, False),
    "lora_path": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
}


class RequestRefused(EngineRefused):
    """A request is answered with `status` and `body` instead of being served."""

    def __init__(self, message: str, *, status: int = 400, body: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: Mapping[str, Any] = body if body is not None else {"error": {"message": message}}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a completion ends."""

    max_new_tokens: int = DEFAULT_NEW_TOKENS
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # end tokens of the model included, unless ignore_eos
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    seed: int = 0
    position: int = 0  # of the first token in its turn: what counter_uniform counts from


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One sequence to complete or to score."""

    rid: str
    input_ids: list[int]
    params: SamplingParams
    return_logprob: bool = False
    logprob_start: int = -1  # first prompt token whose log-prob is wanted; -1: none
    text_in_logprobs: bool = False
    extra_key: str = ""

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt log-probs are wanted, which rules out reuse of a cached prefix."""
        return self.return_logprob and self.logprob_start >= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What requests are checked against."""

    vocabulary: int
    context_tokens: int
    eos_ids: frozenset[int]


def malformed(message: str) -> RequestRefused:
    """The refusal of a body of the wrong form."""
    return RequestRefused(message, body={"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})


def parse_generate(body: Any, limits: Limits, text: TokenText | None) -> tuple[list[GenerateRequest], bool]:
    """The sequences of a `/generate` body, and whether it was a batch (then the reply is a list).

    Raises:
        RequestRefused: nothing of the body is served.
    """
    if not isinstance(body, dict):
        raise malformed(f"the body must be a JSON object, got {type(body).__name__}")
    for field, neutral in _UNSUPPORTED_FIELDS.items():
        if field in body and body[field] not in neutral:
            raise RequestRefused(f"{field} is not supported by the embedded engine")
    prompts, batched = _prompts(body, limits, text)
    rids = _per_prompt(body.get("rid"), len(prompts), "rid")
    start = body.get("logprob_start_len")
    shared: dict[str, Any] = {
        "return_logprob": bool(body.get("return_logprob", False)),
        "logprob_start": _integer(-1 if start is None else start, "logprob_start_len", minimum=-1),
        "text_in_logprobs": bool(body.get("return_text_in_logprobs", False)),
        "extra_key": str(body.get("extra_key") or "") + "\0" + str(body.get("cache_salt") or ""),
    }
    parameters = _per_prompt(body.get("sampling_params"), len(prompts), "sampling_params")
    requests = []
    for index, (prompt, raw) in enumerate(zip(prompts, parameters, strict=True)):
        rid = rids[index] if isinstance(body.get("rid"), list) or not batched else rids[index] and f"{rids[index]}_{index}"
        request = GenerateRequest(rid=str(rid or uuid.uuid4().hex), input_ids=prompt, params=_sampling(raw, limits, text), **shared)
        _check_length(request, limits)
        requests.append(request)
    return requests, batched


def _prompts(body: Mapping[str, Any], limits: Limits, text: TokenText | None) -> tuple[list[list[int]], bool]:
    ids, words = body.get("input_ids"), body.get("text")
    if (ids is None) == (words is None):
        raise RequestRefused("Either text, input_ids or input_embeds should be provided.")
    if words is not None:
        if text is None:
            raise RequestRefused("text needs a tokenizer, and the model directory has no tokenizer.json")
        batched = isinstance(words, list)
        if any(not isinstance(word, str) for word in (words if batched else [words])):
            raise malformed("text must be a string or a list of strings")
        prompts = [text.encode(word) for word in (words if batched else [words])]
    else:
        if not isinstance(ids, list):
            raise malformed(f"input_ids must be a list, got {type(ids).__name__}")
        batched = bool(ids) and isinstance(ids[0], list)
        prompts = ids if batched else [ids]
    for prompt in prompts:
        _check_ids(prompt, limits.vocabulary)
    return prompts, batched


def _check_ids(ids: Any, vocabulary: int) -> None:
    if not isinstance(ids, list) or set(map(type, ids)) - {int}:
        raise malformed("input_ids must be a list of integers or a list of such lists")
    if not ids:
        raise RequestRefused("input_ids cannot be empty.")
    if min(ids) < 0 or max(ids) >= vocabulary:
        outside = min(ids) if min(ids) < 0 else max(ids)
        raise RequestRefused(f"token id {outside} is outside the vocabulary of {vocabulary}")


def _check_length(request: GenerateRequest, limits: Limits) -> None:
    have, new, context = len(request.input_ids), request.params.max_new_tokens, limits.context_tokens
    if have >= context:
        raise RequestRefused(f"The input ({have} tokens) is longer than the model's context length ({context} tokens).")
    if have + new > context:
        raise RequestRefused(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total of {have + new} tokens: "
            f"{have} tokens from the input messages and {new} tokens for the completion. Please reduce the number of tokens in the input messages "
            "or the completion to fit within the limit."
        )


def _per_prompt(value: Any, count: int, field: str) -> Sequence[Any]:
    """One value per prompt: a list as it is, anything else repeated."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestRefused(f"{field} has {len(value)} entries for {count} prompts")
    return value


def _sampling(raw: Any, limits: Limits, text: TokenText | None) -> SamplingParams:
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise malformed(f"sampling_params must be an object, got {type(raw).__name__}")
    for field, value in raw.items():
        if field in _COMPUTED:
            continue
        if field not in _NEUTRAL:
            known = ", ".join(f"`{name}`" for name in sorted((*_COMPUTED, *_NEUTRAL)))
            message = f"unknown field `{field}`, expected one of {known}"
            raise RequestRefused(message, body={"error": message})
        if value not in _NEUTRAL[field]:
            raise RequestRefused(f"sampling parameter {field}={value!r} is not supported by the embedded engine")
    seed = raw.get("sampling_seed")
    stop_ids = frozenset(_integer(token, "stop_token_ids") for token in _list(raw.get("stop_token_ids"), "stop_token_ids"))
    return SamplingParams(
        max_new_tokens=_integer(raw.get("max_new_tokens", DEFAULT_NEW_TOKENS), "max_new_tokens"),
        temperature=_temperature(raw.get("temperature", 1.0)),
        stop=_stops(raw.get("stop"), text),
        stop_ids=stop_ids if raw.get("ignore_eos") else stop_ids | limits.eos_ids,
        no_stop_trim=bool(raw.get("no_stop_trim", False)),
        skip_special_tokens=bool(raw.get("skip_special_tokens", True)),
        seed=random.getrandbits(63) if seed is None else _integer(seed, "sampling_seed", minimum=None) & _MASK_64,
        position=_position(raw.get("custom_params")),
    )


def _integer(value: Any, field: str, *, minimum: int | None = 0) -> int:
    if type(value) is not int:
        raise malformed(f"{field} must be an integer, got {value!r}")
    if minimum is not None and value < minimum:
        raise RequestRefused(f"{field} must be at least {minimum}, got {value}")
    return value


def _temperature(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise malformed(f"temperature must be a number, got {value!r}")
    if not 0 <= value < math.inf:
        raise RequestRefused(f"temperature must be non-negative, got {value}.")
    return float(value) if value >= GREEDY_BELOW else 0.0


def _position(custom: Any) -> int:
    if custom is not None and not isinstance(custom, dict):
        raise malformed(f"custom_params must be an object, got {custom!r}")
    position = _integer((custom or {}).get("position", 0), "custom_params.position")
    if position > _MAX_POSITION:
        raise RequestRefused(f"custom_params.position must be at most {_MAX_POSITION}, got {position}")
    return position


def _list(value: Any, field: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise malformed(f"{field} must be a list, got {value!r}")
    return value or []


def _stops(value: Any, text: TokenText | None) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(_list(value, "stop"))
    if any(not isinstance(stop, str) or not stop for stop in stops):
        raise malformed(f"stop must be a non-empty string or a list of such strings, got {value!r}")
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestRefused(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stops)}")
    if stops and text is None:
        raise RequestRefused("stop strings need a tokenizer, and the model directory has no tokenizer.json")
    return stops
