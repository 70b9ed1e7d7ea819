"""The engine protocol: what training needs of SGLang's native HTTP API, typed, and its client.

An engine is a server that generates tokens: SGLang, or the embedded engine, which serves the same calls. Token ids go in, ids with
log-probs and weight-version spans come out; text is only ever looked at.

Errors: an answer of 4xx is a mistake of ours (`EngineRefused`, never tried again); no answer within the deadline, a broken connection or
5xx is `EngineUnavailable`; an answer that contradicts itself is an `EngineError`. Every call has a total deadline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import httpx
import numpy as np
import numpy.typing as npt
import trio
from pydantic_core import from_json, to_json

from agentrl.engine_messages import (
    Abilities,
    EngineKeys,
    EngineLoad,
    Finish,
    GenerateReply,
    GenerateRequest,
    ModelInfo,
    PromptScores,
    ServerInfo,
    WeightBucket,
    WeightsChecksum,
    WeightSpan,
)
from agentrl.errors import EngineError, EngineRefused, EngineUnavailable
from retriever.transport import Answer, trio_client

__all__ = [
    "Abilities",
    "EngineClient",
    "EngineKeys",
    "EngineLoad",
    "Finish",
    "GenerateReply",
    "GenerateRequest",
    "ModelInfo",
    "PauseMode",
    "PromptScores",
    "ServerInfo",
    "WeightBucket",
    "WeightSpan",
    "WeightsChecksum",
]

CONTROL_DEADLINE_S = 10.0
GENERATE_DEADLINE_S = 120.0  # weight updates included: a paused engine keeps requests open
UPDATE_DEADLINE_S = 60.0
MAX_RESPONSE_BYTES = 256 * 1024 * 1024  # a million tokens with log-probs is a tenth of it

PauseMode = Literal["abort", "retract", "in_place"]


class EngineClient:
    """One engine over HTTP, for use under trio. `async with` closes its connections.

    Args:
        index: the engine's number in the run.
        vocab_size: token ids at or above it are refused here: one of them ends a whole SGLang server. None: not checked.
        max_connections: requests in flight; more wait for their turn (and their deadline runs).
        transport: used instead of the network, e.g. a fake's.
        keys: of the server, where it wants any.
    """

    def __init__(
        self,
        url: str,
        index: int = 0,
        *,
        vocab_size: int | None = None,
        max_connections: int = 1024,
        transport: httpx.AsyncBaseTransport | None = None,
        keys: EngineKeys | None = None,
    ) -> None:
        self._keys = keys or EngineKeys()
        self.url = url.rstrip("/")
        self.index = index
        self.vocab_size = vocab_size
        self._http = trio_client(max_connections=max_connections, max_response_bytes=MAX_RESPONSE_BYTES, transport=transport)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def __repr__(self) -> str:
        return f"engine {self.index} ({self.url})"

    async def generate(self, request: GenerateRequest, *, deadline_s: float = GENERATE_DEADLINE_S) -> GenerateReply:
        """Sample one completion. Waits through pauses of the engine."""
        self._check_ids(request.input_ids)
        return GenerateReply.parse(await self._json("POST", "/generate", request.body(), deadline_s))

    async def score(self, input_ids: Sequence[int], *, rid: str, deadline_s: float = GENERATE_DEADLINE_S) -> PromptScores:
        """The log-probs of a prompt's own tokens, at temperature 1. No token is generated, and no cached prefix is used."""
        self._check_ids(input_ids)
        scores = PromptScores.parse(await self._json("POST", "/generate", _scoring(rid) | {"input_ids": list(input_ids)}, deadline_s))
        if not scores.reads(input_ids):
            raise EngineError(f"{self} was asked to score {len(input_ids)} tokens and answered with others: {str(scores.ids)[:200]}")
        return scores

    async def score_text(self, text: str, *, rid: str, deadline_s: float = GENERATE_DEADLINE_S) -> PromptScores:
        """The same of a text, read by the engine's own tokenizer, special tokens at its start or end included. For checks: we send ids only."""
        return PromptScores.parse(await self._json("POST", "/generate", _scoring(rid) | {"text": text}, deadline_s))

    async def abort(self, rid: str, *, deadline_s: float = 2.0) -> None:
        """End the request `rid`; its caller gets what there is. An unknown rid is no error."""
        await self._call("POST", "/abort_request", {"rid": rid}, deadline_s)

    async def abort_all(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """End all requests."""
        await self._call("POST", "/abort_request", {"abort_all": True}, deadline_s)

    async def start_profile(
        self, directory: str, passes: int, prefix: str, activities: Sequence[str], *, deadline_s: float = CONTROL_DEADLINE_S
    ) -> None:
        """Record a torch profile of the next `passes` forward passes; the engine then writes it into `directory`, on its machine.

        Args:
            prefix: of the file's name. `activities`: "CPU", "GPU".
        """
        body = {"output_dir": directory, "num_steps": passes, "profile_prefix": prefix, "activities": list(activities), "with_stack": False}
        await self._call("POST", "/start_profile", body, deadline_s)

    async def pause(self, mode: PauseMode = "retract", *, deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """Stop generating. `retract` keeps requests open and drops their KV; `abort` answers them with what there is."""
        await self._call("POST", "/pause_generation", {"mode": mode}, deadline_s)

    async def continue_(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """Go on generating; harmless where nothing is paused."""
        await self._call("POST", "/continue_generation", {}, deadline_s)

    async def release_memory(self, *, deadline_s: float = UPDATE_DEADLINE_S) -> None:
        """Give the GPU's memory away: keys and values, captured graphs, and the weights, which wait in host memory. Only while paused by `retract`
        or `abort`. Requests wait until `resume_memory`, and updates of weights are refused. SGLang needs --enable-memory-saver for it."""
        await self._call("POST", "/release_memory_occupation", {}, deadline_s)

    async def resume_memory(self, *, deadline_s: float = UPDATE_DEADLINE_S) -> None:
        """Take it back, with the weights that were released. Generation stays paused until `continue_`. SGLang that has released nothing ends."""
        await self._call("POST", "/resume_memory_occupation", {}, deadline_s)

    async def flush_cache(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """Drop every cached prefix. Refused while requests run."""
        await self._call("POST", "/flush_cache", None, deadline_s)

    async def init_group(
        self,
        *,
        address: str,
        port: int,
        rank_offset: int,
        world_size: int,
        group: str,
        backend: str,
        timeout_s: float | None = None,
        deadline_s: float = UPDATE_DEADLINE_S,
    ) -> None:
        """Join the process group that weights are broadcast over. Answers when rank 0 has joined too.

        Args:
            timeout_s: of the engine's end of a broadcast; SGLang has its own and is not told one.
        """
        if not group:
            raise EngineRefused("a weight-update group needs a name: an empty one ends an SGLang server")
        body: dict[str, Any] = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        body |= {} if timeout_s is None else {"timeout_s": timeout_s}
        await self._update("/init_weights_update_group", body | {"group_name": group, "backend": backend}, deadline_s)

    async def destroy_group(self, group: str, *, deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """Leave a group. One that does not exist is refused."""
        await self._update("/destroy_weights_update_group", {"group_name": group}, deadline_s)

    async def begin_update(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """Open an update session. Refused while one is open."""
        await self._update("/begin_weight_update", {}, deadline_s)

    async def update_from_distributed(
        self,
        bucket: WeightBucket,
        *,
        group: str,
        version: int | None = None,
        flush_cache: bool = False,
        piece_bytes: int | None = None,
        deadline_s: float = UPDATE_DEADLINE_S,
    ) -> None:
        """Receive one bucket over the group, as one flat broadcast of bytes from rank 0. The last one of a session names the version.

        Args:
            piece_bytes: it comes as broadcasts of so many bytes each (`collective.broadcast_pieces`); only engines with staged updates know it.
        """
        body: dict[str, Any] = {
            "names": list(bucket.names),
            "dtypes": list(bucket.dtypes),
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": group,
            "flush_cache": flush_cache,
            "abort_all_requests": False,
            "load_format": "flattened_bucket",
        }
        body |= {} if piece_bytes is None else {"piece_bytes": piece_bytes}
        await self._update("/update_weights_from_distributed", body | _named(version), deadline_s)

    async def end_update(self, *, checksums: Sequence[str] | None = None, deadline_s: float = UPDATE_DEADLINE_S) -> None:
        """Close the update session; an engine with staged updates commits here.

        Args:
            checksums: of each bucket's bytes (`collective.tensor_checksum`), which such an engine compares before; others know none.
        """
        await self._update("/end_weight_update", {} if checksums is None else {"checksums": list(checksums)}, deadline_s)

    async def update_from_disk(
        self, model_path: str, *, version: int | None, flush_cache: bool = True, deadline_s: float = UPDATE_DEADLINE_S
    ) -> None:
        """Load weights from a Hugging Face directory that the engine can read."""
        body = {"model_path": model_path, "flush_cache": flush_cache, "abort_all_requests": False}
        await self._update("/update_weights_from_disk", body | _named(version), deadline_s)

    async def weights_checksum(self, *, deadline_s: float = UPDATE_DEADLINE_S) -> WeightsChecksum:
        """Checksums of the weights the engine holds."""
        value = await self._json("POST", "/weights_checker", {"action": "checksum"}, deadline_s)
        try:
            return WeightsChecksum(engine=str(value["per_engine_checksum"]), tensors=dict(value["ranks"][0]["checksums"]))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self} answered no checksums: {str(value)[:300]}") from error

    async def model_info(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> ModelInfo:
        """The model and the version of its weights, as they are now."""
        value = _mapping(await self._json("GET", "/model_info", None, deadline_s))
        name = str(value.get("weight_version", ""))
        return ModelInfo(version=int(name) if name.isdecimal() else None, model_path=str(value.get("model_path", "")), raw=value)

    async def server_info(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> ServerInfo:
        """The server's launch arguments and abilities."""
        value = _mapping(await self._json("GET", "/server_info", None, deadline_s))
        version, context = str(value.get("version", "")), value.get("context_length")
        return ServerInfo(
            version=version,
            abilities=Abilities.of(version, staged_update=value.get("staged_update") is True),
            tensor_parallel=int(value.get("tp_size") or 1),
            context_tokens=context if isinstance(context, int) else None,
            raw=value,
        )

    async def loads(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> EngineLoad:
        """How busy the engine is."""
        value = _mapping(await self._json("GET", "/v1/loads?include=core", None, deadline_s))
        loads = [_mapping(load) for load in value.get("loads", ())]
        return EngineLoad(
            running=sum(int(load.get("num_running_reqs", 0)) for load in loads), waiting=sum(int(load.get("num_waiting_reqs", 0)) for load in loads)
        )

    async def health(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> bool:
        """Whether the server lives."""
        return await self._probe("/health", deadline_s)

    async def ready(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> bool:
        """Whether it generates: not while it starts or is paused."""
        return await self._probe("/ready", deadline_s)

    def _check_ids(self, input_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        ids = np.asarray(input_ids)
        if not len(ids):
            raise EngineRefused("a generation request needs at least one token")
        if ids.min() < 0 or (self.vocab_size is not None and ids.max() >= self.vocab_size):
            raise EngineRefused(f"token ids must be in [0, {self.vocab_size}), got {int(ids.min())} to {int(ids.max())}")

    async def _probe(self, path: str, deadline_s: float) -> bool:
        try:
            await self._call("GET", path, None, deadline_s)
        except (EngineUnavailable, EngineRefused):
            return False
        return True

    async def _update(self, path: str, body: Mapping[str, Any], deadline_s: float) -> None:
        value = _mapping(await self._json("POST", path, body, deadline_s))
        if value.get("success") is not True:
            raise EngineRefused(f"{self} refused {path}: {value.get('message', value)}")

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Any:
        answer = await self._call(method, path, body, deadline_s)
        try:
            return _decoded(answer.content)
        except ValueError as error:
            raise EngineError(f"{self} answered no JSON to {path}: {answer.content[:300]!r}") from error

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Answer:
        content = b"" if body is None else to_json(body)
        try:
            with trio.fail_after(deadline_s):
                answer = await self._http.exchange(method, self.url + path, content, self._keys.headers(path))
        except trio.TooSlowError as error:
            raise EngineUnavailable(f"{self} did not answer {path} within {deadline_s:g} s") from error
        except httpx.TransportError as error:
            raise EngineUnavailable(f"{self} cannot be reached for {path}: {error!r}") from error
        if answer.status_code >= 500:
            raise EngineUnavailable(f"{self} failed at {path}: {answer.status_code} {_message(answer)}")
        if answer.status_code >= 400:
            raise EngineRefused(f"{self} refused {path}: {answer.status_code} {_message(answer)}")
        return answer


def _decoded(content: bytes) -> Any:
    """The value of JSON. pydantic's reader takes a third of the time of Python's, which takes what SGLang may write beyond it: lone surrogates."""
    try:
        return from_json(content)
    except ValueError:
        return json.loads(content)


def _named(version: int | None) -> dict[str, str]:
    return {} if version is None else {"weight_version": str(version)}  # a string: an integer is answered 400


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EngineError(f"expected a JSON object of an engine, got {str(value)[:300]}")
    return value


def _message(answer: Answer) -> str:
    """The text of an error, in any of the shapes SGLang has for it."""
    try:
        value = json.loads(answer.content)
    except ValueError:
        return answer.text[:500]
    if isinstance(value, dict):
        error = value.get("error", value.get("message", value.get("detail", value)))
        value = error.get("message", error) if isinstance(error, dict) else error
    return str(value)[:500]


def _scoring(rid: str) -> dict[str, Any]:
    sampling = {"max_new_tokens": 0, "temperature": 1.0}
    return {"rid": rid, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0, "stream": False}
