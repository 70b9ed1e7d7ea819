"""What is said to an engine and what it answers: requests, replies, buckets of weights, what a server can do.

The records of SGLang's native HTTP API as far as training needs it; `engine_api` has the client.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from agentrl.errors import ConfigError, EngineError, EngineUnavailable

__all__ = [
    "Abilities",
    "EngineKeys",
    "EngineLoad",
    "Finish",
    "GenerateReply",
    "GenerateRequest",
    "ModelInfo",
    "PromptScores",
    "ServerInfo",
    "WeightBucket",
    "WeightSpan",
    "WeightsChecksum",
]

# Versions of SGLang that brought an ability.
_WEIGHT_SPANS = (0, 5, 20)
_UPDATE_SESSION = (0, 5, 21)
_JSON = {"content-type": "application/json"}
_UNPRIVILEGED = frozenset({"/generate", "/model_info", "/server_info", "/v1/loads?include=core", "/health", "/ready"})  # take the API key


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One completion to be sampled."""

    rid: str  # unique among the requests in flight; names it for `abort`
    input_ids: Sequence[int] | npt.NDArray[np.int32]
    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    stop: tuple[str, ...] = ()
    sampling_seed: int | None = None  # of the turn: see agentrl.seeds
    position: int = 0  # in the turn, of the first token asked for: above 0 where half a turn is resubmitted
    extra_key: str | None = None  # a namespace of the prefix cache

    def body(self) -> dict[str, Any]:
        """The JSON of `POST /generate`."""
        sampling: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "stop": list(self.stop),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "custom_params": {"position": self.position},
        }
        if self.sampling_seed is not None:
            sampling["sampling_seed"] = self.sampling_seed
        ids = self.input_ids.tolist() if isinstance(self.input_ids, np.ndarray) else list(self.input_ids)
        body = {"rid": self.rid, "input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": False}
        return body if self.extra_key is None else body | {"extra_key": self.extra_key}


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSpan:
    """Tokens [start, end) of a reply were written by `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """Why a completion ended: `stop` (a stop string or, as an integer, a stop token matched), `length`, or `abort` (tokens are partial)."""

    kind: Literal["stop", "length", "abort"]
    matched: str | int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateReply:
    """What an engine wrote. Tokens are whole: those of a stop string, and what its last token carries beyond it, included."""

    text: str  # for eyes: nothing is ever tokenised from it
    output_ids: npt.NDArray[np.int32]  # [C]
    logprobs: npt.NDArray[np.float32]  # [C], of log_softmax(logits / T)
    spans: tuple[WeightSpan, ...]  # cover [0, C) in order
    finish: Finish
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def parse(cls, value: Any) -> GenerateReply:
        """The reply of `POST /generate`'s JSON.

        Raises:
            EngineError: a field is missing, ids and log-probs differ in number, spans leave tokens out, or a version is no integer.
        """
        try:
            meta = value["meta_info"]
            ids = np.array(value["output_ids"], dtype=np.int32)
            logprobs = np.array([entry[0] for entry in meta.get("output_token_logprobs", ())], dtype=np.float32)
            finish = meta["finish_reason"]
            reply = cls(
                text=value.get("text", ""),
                output_ids=ids,
                logprobs=logprobs,
                spans=_spans(meta, len(ids)),
                finish=Finish(kind=finish["type"], matched=finish.get("matched")),
                prompt_tokens=meta.get("prompt_tokens", 0),
                cached_tokens=meta.get("cached_tokens", 0),
            )
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise EngineError(f"not a reply of /generate ({error!r}): {str(value)[:300]}") from error
        reply._check()
        return reply

    def _check(self) -> None:
        if len(self.output_ids) != len(self.logprobs):
            raise EngineError(f"an engine answered {len(self.output_ids)} tokens with {len(self.logprobs)} log-probs: expected one each")
        if not np.isfinite(self.logprobs).all():
            raise EngineError("an engine answered a log-prob that is not finite")
        if self.finish.kind not in ("stop", "length", "abort"):
            raise EngineError(f"an engine answered the finish reason {self.finish.kind!r}: expected stop, length or abort")
        ends = [0, *(span.end for span in self.spans)]
        if [span.start for span in self.spans] != ends[:-1] or ends[-1] != len(self.output_ids):
            raise EngineError(f"weight_versions {self.spans} do not cover the {len(self.output_ids)} tokens they came with")


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScores:
    """What an engine says of a prompt it is given: its tokens, and the log-prob of each but the first, at temperature 1.

    SGLang (0.5.23) names the last id of the vocabulary 0 here: so it hides the placeholders of images, and that id with them. Its log-prob is
    that of the id it read.
    """

    ids: tuple[int, ...]  # [T], as the engine read them
    logprobs: npt.NDArray[np.float32]  # [T - 1]; not a number where it answered none
    version: int | None  # of its weights when it answered; None where their name is not one of ours

    def reads(self, ids: Sequence[int]) -> bool:
        """Whether it may have read these ids: those that it names 0 are not looked at."""
        return len(ids) == len(self.ids) and all(named in (0, token) for named, token in zip(self.ids, ids, strict=True))

    @classmethod
    def parse(cls, value: Any) -> PromptScores:
        """The reply of `POST /generate`'s JSON to a request with `logprob_start_len` 0.

        Raises:
            EngineUnavailable: it was aborted.
            EngineError: a field is missing.
        """
        try:
            meta = value["meta_info"]
            if meta["finish_reason"]["type"] == "abort":
                raise EngineUnavailable("an engine aborted the scoring of a prompt")
            entries = meta["input_token_logprobs"]
            version = str(meta["weight_version"])
            return cls(
                ids=tuple(int(entry[1]) for entry in entries),
                logprobs=np.array([np.nan if entry[0] is None else entry[0] for entry in entries[1:]], dtype=np.float32),
                version=int(version) if version.isdecimal() else None,
            )
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"not the scores of a prompt ({error!r}): {str(value)[:300]}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBucket:
    """Tensors sent as one flat buffer of bytes, in this order. One dtype per bucket."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # "bfloat16", "float32": without "torch."
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsChecksum:
    """Checksums of the weights an engine holds, as hex: compared between engines, and with what was sent where the algorithm is ours."""

    engine: str
    tensors: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """`GET /model_info`. `version` is None where the engine's weights have a name that is not one of ours."""

    version: int | None
    model_path: str
    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """What an engine can do that not every one can. Versions are SGLang's (its releases 0.5.12 to 0.5.23 were compared)."""

    weight_spans: bool  # each reply says which version wrote which token (0.5.20)
    update_session: bool  # weights by process group come between begin_weight_update and end_weight_update, and only there (0.5.21)
    staged_update: bool  # weights are taken in while it generates (the embedded engine)

    @classmethod
    def of(cls, version: str, *, staged_update: bool = False) -> Abilities:
        """Those of a server that calls itself `version`.

        Raises:
            EngineError: it is no version number.
        """
        found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
        if found is None:
            raise EngineError(f"an engine calls itself version {version!r}: expected a number as 0.5.23")
        number = tuple(int(part) for part in found.groups())
        return cls(
            weight_spans=number >= _WEIGHT_SPANS,
            update_session=number >= _UPDATE_SESSION,
            staged_update=staged_update,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """`GET /server_info`."""

    version: str
    abilities: Abilities
    tensor_parallel: int  # processes that hold a part of the model each: so many ranks of a weight-update group
    context_tokens: int | None  # prompt and completion together, where it says so
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def staged_update(self) -> bool:
        """Whether weights are taken in while the engine generates."""
        return self.abilities.staged_update


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineKeys:
    """What servers with keys want to see. With an admin key, SGLang's control calls take that one alone and `/generate` the other alone."""

    api: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)

    @classmethod
    def of_environment(cls, api_variable: str | None, admin_variable: str | None) -> EngineKeys:
        """The keys in the environment variables of these names.

        Raises:
            ConfigError: a variable that is named is not set.
        """
        return cls(api=_key(api_variable, "engine.api_key_variable"), admin=_key(admin_variable, "engine.admin_key_variable"))

    def headers(self, path: str) -> dict[str, str]:
        """The headers of a call."""
        key = self.api if self.admin is None or path in _UNPRIVILEGED else self.admin
        return _JSON if key is None else _JSON | {"authorization": f"Bearer {key}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLoad:
    """Requests an engine runs and holds waiting."""

    running: int
    waiting: int


def _spans(meta: Mapping[str, Any], count: int) -> tuple[WeightSpan, ...]:
    told = meta.get("weight_versions")
    if told is None and count:  # an engine before 0.5.20, or a reply without tokens
        told = [{"version": meta["weight_version"], "start": 0, "end": count}]
    return tuple(_span(value) for value in told or () if value["end"] > value["start"])


def _span(value: Mapping[str, Any]) -> WeightSpan:
    version = str(value["version"])
    if not version.isdecimal():
        raise EngineError(
            f"the engine's weights are named {version!r}: expected a version number (publish to it, or start it with --weight-version 0)"
        )
    return WeightSpan(version=int(version), start=value["start"], end=value["end"])


def _key(variable: str | None, named_by: str) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise ConfigError(f"{named_by} is {variable}, and the environment has no such variable: export {variable}=...")
    return key
