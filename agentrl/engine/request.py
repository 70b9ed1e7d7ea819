"""What `POST /generate` may say: parsed and checked once, refused with SGLang's status codes and body shapes.

{"error": {"message": ...}}                                     400   a request that cannot be served; of a stream: told in it, after a 200
{"error": "unknown field `x`, expected one of ..."}              400   a sampling parameter nobody knows, or of a wrong type
{"object": "error", "message": ..., "type": ..., "code": 400}    400   a body of the wrong form
"""

from __future__ import annotations

import math
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
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
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None, []),
    "return_sampling_mask": (None, False),
    "return_hidden_states": (None, False),
    "lora_path": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
}


class RequestRefused(EngineRefused):
    """A request is answered with `status` and `body` instead of being served. `at_the_gate`: before anything of a stream is sent."""

    def __init__(self, message: str, *, status: int = 400, body: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.at_the_gate = body is not None
        self.body: Mapping[str, Any] = body if body is not None else {"error": {"message": message}}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a completion ends."""

    max_new_tokens: int = DEFAULT_NEW_TOKENS
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # end tokens of the model included; none with ignore_eos, as in SGLang
    no_stop_trim: bool = False
    stream_interval: int = 1  # tokens from one chunk of a stream to the next
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
    stream: bool = False

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
    start = body.get("logprob_start_len")
    shared: dict[str, Any] = {
        "return_logprob": _flag(body, "return_logprob"),
        "logprob_start": _integer(-1 if start is None else start, "logprob_start_len", minimum=-1, refusal=malformed),
        "text_in_logprobs": _flag(body, "return_text_in_logprobs"),
        "extra_key": str(body.get("extra_key") or "") + "\0" + str(body.get("cache_salt") or ""),
        "stream": _flag(body, "stream"),
    }
    parameters = _per_prompt(body.get("sampling_params"), len(prompts), "sampling_params")
    requests = []
    for prompt, raw, rid in zip(prompts, parameters, _rids(body.get("rid"), len(prompts), batched), strict=True):
        request = GenerateRequest(rid=rid, input_ids=prompt, params=_sampling(raw, limits, text), **shared)
        _check_length(request, limits)
        requests.append(request)
    return requests, batched


def _rids(value: Any, count: int, batched: bool) -> list[str]:
    """A name for each prompt: those given, the one given (numbered in a batch), or new ones."""
    if value is None:
        return [uuid.uuid4().hex for _ in range(count)]
    names = value if isinstance(value, list) else [value]
    if any(not isinstance(name, str) for name in names):
        raise malformed(f"rid must be a string or a list of strings, got {value!r}")
    if batched and isinstance(value, str):
        names = [f"{value}_{index}" for index in range(count)]
    if len(names) != count:
        raise RequestRefused("The specified rids length mismatch with the batch_size for batch processing.")
    if len(set(names)) < count:
        raise RequestRefused(f"Duplicate request IDs detected within the request: {sorted({name for name in names if names.count(name) > 1})}")
    return names


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
        raise malformed(f"sampling_params must be an object or a list of objects, got {type(raw).__name__}")
    for field, value in raw.items():
        if field in _COMPUTED:
            continue
        if field not in _NEUTRAL:
            known = ", ".join(f"`{name}`" for name in sorted((*_COMPUTED, *_NEUTRAL)))
            raise _mistyped(f"unknown field `{field}`, expected one of {known}")
        if value not in _NEUTRAL[field]:
            raise RequestRefused(f"sampling parameter {field}={value!r} is not supported by the embedded engine")
    seed = raw.get("sampling_seed")
    stop_ids = frozenset(_integer(token, "stop_token_ids") for token in _list(raw.get("stop_token_ids"), "stop_token_ids"))
    return SamplingParams(
        max_new_tokens=_integer(raw.get("max_new_tokens", DEFAULT_NEW_TOKENS), "max_new_tokens"),
        temperature=_temperature(raw.get("temperature", 1.0)),
        stop=_stops(raw.get("stop"), text),
        stream_interval=_integer(raw.get("stream_interval") or 1, "stream_interval", minimum=1),
        stop_ids=frozenset() if raw.get("ignore_eos") else stop_ids | limits.eos_ids,
        no_stop_trim=bool(raw.get("no_stop_trim", False)),
        skip_special_tokens=bool(raw.get("skip_special_tokens", True)),
        seed=random.getrandbits(63) if seed is None else _integer(seed, "sampling_seed", minimum=None) & _MASK_64,
        position=_position(raw.get("custom_params")),
    )


def _mistyped(message: str) -> RequestRefused:
    """The refusal of a sampling parameter that has no such name or type."""
    return RequestRefused(message, body={"error": message})


def _flag(body: Mapping[str, Any], field: str) -> bool:
    value = body.get(field) or False
    if not isinstance(value, bool):
        raise malformed(f"{field} must be true or false, got {value!r}")
    return value


def _integer(value: Any, field: str, *, minimum: int | None = 0, refusal: Callable[[str], RequestRefused] = _mistyped) -> int:
    if type(value) is not int:
        raise refusal(f"invalid type: {field} must be an integer, got {value!r}")
    if minimum is not None and value < minimum:
        raise RequestRefused(f"{field} must be at least {minimum}, got {value}.")
    return value


def _temperature(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _mistyped(f"invalid type: temperature must be a number, got {value!r}")
    if not 0 <= value < math.inf:
        raise RequestRefused(f"temperature must be a non-negative finite number, got {value}.")
    return float(value) if value >= GREEDY_BELOW else 0.0


def _position(custom: Any) -> int:
    if custom is not None and not isinstance(custom, dict):
        raise _mistyped(f"invalid type: custom_params must be an object, got {custom!r}")
    position = _integer((custom or {}).get("position", 0), "custom_params.position")
    if position > _MAX_POSITION:
        raise RequestRefused(f"custom_params.position must be at most {_MAX_POSITION}, got {position}")
    return position


def _list(value: Any, field: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise _mistyped(f"invalid type: {field} must be a list, got {value!r}")
    return value or []


def _stops(value: Any, text: TokenText | None) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(_list(value, "stop"))
    if any(not isinstance(stop, str) for stop in stops):
        raise _mistyped(f"invalid type: stop must be a string or a list of strings, got {value!r}")
    if "" in stops:
        raise RequestRefused("a stop string must not be empty: it would end every completion at its first token")
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestRefused(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stops)}")
    if stops and text is None:
        raise RequestRefused("stop strings need a tokenizer, and the model directory has no tokenizer.json")
    return stops
