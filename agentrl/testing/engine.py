"""An engine for tests: the protocol of `engine_api`, in-process, with a scripted source of tokens and knobs for faults.

    engine = FakeEngine(turns(encoder, "<search> capital </search>", "<answer> Paris </answer>"), encoder=encoder)
    client = engine.client()

It is an httpx transport, so the production client talks to it without a socket. What SGLang answers, it answers in the same shape.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import trio

from agentrl.engine_api import EngineClient
from agentrl.env import Observation
from agentrl.rollout.completion import first_stop
from agentrl.rollout.tokens import TokenEncoder

__all__ = ["FakeEngine", "Fault", "Script", "turns"]

Script = Callable[[Mapping[str, Any]], Sequence[int]]
"""From a request's JSON to the tokens of its whole turn; the engine begins at the request's `position`."""

Fault = Literal["unavailable", "disconnect", "refuse", "garbage"]

_SAMPLING = frozenset({"max_new_tokens", "temperature", "stop", "no_stop_trim", "skip_special_tokens", "sampling_seed", "custom_params"})


def turns(encoder: TokenEncoder, *texts: str) -> Script:
    """A script that says `texts`, one per turn, by the number of the turn in the request's id (`.../turn/request`)."""
    said = [encoder.encode_observation(Observation.frame(text)).ids.tolist() for text in texts]
    return lambda body: said[int(body["rid"].split("/")[-2])]


class FakeEngine(httpx.AsyncBaseTransport):
    """One engine.

    Args:
        token_s: time of a token; 0 makes whole turns at once.
        version: of the weights it starts with.
        eos: the token that ends a turn.
    """

    def __init__(
        self, script: Script, *, encoder: TokenEncoder, token_s: float = 0.0, version: int = 0, eos: int | None = None, staged_update: bool = False
    ) -> None:
        self._script = script
        self._encoder = encoder
        self._token_s = token_s
        self._eos = eos
        self._staged_update = staged_update
        self.model_path = "fake"
        self._running: dict[str, _Running] = {}
        self._paused: str | None = None
        self._resumed = trio.Event()
        self._session = False
        self._groups: set[str] = set()
        self._faults: deque[Fault] = deque()
        self._break_off: deque[int] = deque()
        self._next_version: str | None = None
        self.weight_version = str(version)
        self.scores: Callable[[Sequence[int]], Sequence[float | None]] = lambda ids: [-0.01 * place for place in range(1, len(ids))]  # of a prompt
        self.checksums: dict[str, str] = {}  # of its weights, by tensor; without any, its version stands for all
        self.checksums_on_disk: dict[str, str] | None = None  # what they are once it has loaded weights from disk
        self.dead = False  # refuse connections
        self.frozen = False  # never answer
        self.requests: list[dict[str, Any]] = []  # the bodies of /generate
        self.calls: list[str] = []  # the paths of all calls
        self.aborted: list[str] = []  # rids

    def client(self, index: int = 0) -> EngineClient:
        """A client of this engine."""
        return EngineClient(f"http://engine-{index}", index, vocab_size=self._encoder.vocab_size, transport=self)

    def fail(self, *faults: Fault) -> None:
        """Answer the next generation requests with these faults, one each."""
        self._faults.extend(faults)

    def break_off(self, *lengths: int) -> None:
        """Abort the next generation requests after these numbers of tokens, one each."""
        self._break_off.extend(lengths)

    @property
    def running(self) -> int:
        """Generation requests being served."""
        return len(self._running)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Serve one call."""
        await trio.lowlevel.checkpoint()  # as a network does: a cancelled caller gets no further
        path = request.url.path
        self.calls.append(path)
        if self.dead:
            raise httpx.ConnectError("connection refused", request=request)
        if self.frozen:
            await trio.sleep_forever()
        body = json.loads(request.content) if request.content else {}
        if path == "/generate" and body.get("logprob_start_len") == 0:
            return httpx.Response(200, content=json.dumps(self._scored(body)).encode())
        if path == "/generate":
            return await self._generate(body, request)
        if path == "/abort_request":
            self._abort(body)
            return httpx.Response(200)
        handler = self._controls().get(path)
        return httpx.Response(404, json={"detail": "Not Found"}) if handler is None else handler(body)

    async def _generate(self, body: dict[str, Any], request: httpx.Request) -> httpx.Response:
        self.requests.append(body)
        refusal = self._refusal(body)
        if refusal:
            return _error(refusal)
        fault = self._faults.popleft() if self._faults else None
        if fault == "unavailable":
            return httpx.Response(503, json={"error": {"message": "the queue is full"}})
        if fault == "refuse":
            return _error("refused as told")
        running = self._running[body["rid"]] = _Running(break_off=self._break_off.popleft() if self._break_off else None)
        try:
            reply = await self._write(body, running)
        finally:
            del self._running[body["rid"]]
        if fault == "disconnect":
            raise httpx.ReadError("the connection broke", request=request)
        if fault == "garbage":
            reply["output_ids"].append(0)
        return httpx.Response(200, content=json.dumps(reply).encode())

    async def _write(self, body: Mapping[str, Any], running: _Running) -> dict[str, Any]:
        sampling = body["sampling_params"]
        planned = list(self._script(body))[sampling["custom_params"]["position"] :]
        ids, finish = self._planned(planned, sampling)
        if running.break_off is not None:
            ids, running.aborted = ids[: running.break_off], True
        await self._wait_while_paused(running)
        spans: list[dict[str, Any]] = []
        done = len(ids)
        if self._token_s or running.stop.is_set():
            done = await self._tokens(len(ids), running, spans)
        elif ids:
            spans = [{"version": self.weight_version, "start": 0, "end": len(ids)}]
        if running.aborted:
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return self._reply(body, ids[:done], finish, spans)

    async def _tokens(self, count: int, running: _Running, spans: list[dict[str, Any]]) -> int:
        """Let the time of `count` tokens pass, noting the version each is made by. Returns how many were made."""
        for position in range(count):
            with trio.move_on_after(self._token_s):
                await running.stop.wait()
            await self._wait_while_paused(running)
            if running.stop.is_set():
                running.aborted = True
                return position
            if spans and spans[-1]["version"] == self.weight_version:
                spans[-1]["end"] = position + 1
            else:
                spans.append({"version": self.weight_version, "start": position, "end": position + 1})
        return count

    def _planned(self, ids: list[int], sampling: Mapping[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """What would be written without faults, and why it ends. Sees this request's own tokens only, as engines do."""
        limit, stops = sampling["max_new_tokens"], sampling["stop"]
        if first_stop(self._encoder.decode(ids), stops) is not None:
            length = next(n for n in range(1, len(ids) + 1) if first_stop(self._encoder.decode(ids[:n]), stops) is not None)
            if length <= limit:
                found = first_stop(self._encoder.decode(ids[:length]), stops)
                return ids[:length], {"type": "stop", "matched": found and found[0]}
        if self._eos in ids[:limit]:
            return ids[: ids.index(self._eos) + 1], {"type": "stop", "matched": self._eos}
        if len(ids) > limit:
            return ids[:limit], {"type": "length", "length": limit}
        return ids, {"type": "stop", "matched": None}

    def _reply(self, body: Mapping[str, Any], ids: list[int], finish: dict[str, Any], spans: list[dict[str, Any]]) -> dict[str, Any]:
        position = body["sampling_params"]["custom_params"]["position"]
        logprobs = [[-0.01 * (position + at + 1), token, None] for at, token in enumerate(ids)]  # token p of a turn: -(p + 1) / 100
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.weight_version,
            "output_token_logprobs": logprobs,
            "output_token_logprobs_length": len(ids),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_versions": spans,
        }
        return {"text": self._encoder.decode(ids), "output_ids": ids, "meta_info": meta}

    def _scored(self, body: Mapping[str, Any]) -> dict[str, Any]:
        ids = body["input_ids"] if "input_ids" in body else self._encoder.encode_observation(Observation.frame(body["text"])).ids.tolist()
        entries = [[logprob, token, None] for logprob, token in zip((None, *self.scores(ids)), ids, strict=True)]
        meta = {"finish_reason": {"type": "length", "length": 0}, "input_token_logprobs": entries, "weight_version": self.weight_version}
        return {"text": "", "output_ids": [], "meta_info": meta | {"output_token_logprobs": [], "weight_versions": []}}

    def _refusal(self, body: Mapping[str, Any]) -> str:
        unknown = set(body["sampling_params"]) - _SAMPLING
        if unknown:
            return f"unknown field `{min(unknown)}`"
        if body["rid"] in self._running:
            return f"Duplicate request ID detected: {body['rid']}"
        return "" if body["input_ids"] else "input_ids cannot be empty."

    def _abort(self, body: Mapping[str, Any]) -> None:
        rids = list(self._running) if body.get("abort_all") else [body["rid"]]
        self.aborted.extend(rids)
        for rid in rids:
            if rid in self._running:
                self._running[rid].stop.set()
        self._resumed.set()  # wakes what waits; the others wait on
        self._resumed = trio.Event()

    async def _wait_while_paused(self, running: _Running) -> None:
        while self._paused is not None and not running.stop.is_set():
            await self._resumed.wait()

    def _controls(self) -> Mapping[str, Callable[[Mapping[str, Any]], httpx.Response]]:
        return {
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": lambda body: httpx.Response(200, text="Cache flushed.\n"),
            "/init_weights_update_group": lambda body: self._group(body, True),
            "/destroy_weights_update_group": lambda body: self._group(body, False),
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": self._update,
            "/end_weight_update": self._end,
            "/update_weights_from_disk": self._load,
            "/weights_checker": lambda body: self._checksum(),
            "/model_info": lambda body: httpx.Response(200, json={"model_path": self.model_path, "weight_version": self.weight_version}),
            "/server_info": lambda body: httpx.Response(200, json={"version": "0.5.23", "staged_update": self._staged_update}),
            "/v1/loads": lambda body: httpx.Response(200, json={"loads": [{"num_running_reqs": len(self._running), "num_waiting_reqs": 0}]}),
            "/health": lambda body: httpx.Response(200),
            "/ready": lambda body: httpx.Response(503 if self._paused else 200),
        }

    def _pause(self, body: Mapping[str, Any]) -> httpx.Response:
        self._paused = body.get("mode", "abort")
        if self._paused == "abort":
            self._abort({"abort_all": True})
        return httpx.Response(200, json={"message": "Generation paused successfully.", "status": "ok"})

    def _continue(self, body: Mapping[str, Any]) -> httpx.Response:
        self._paused = None
        self._resumed.set()
        self._resumed = trio.Event()
        return httpx.Response(200, json={"message": "Generation continued successfully.", "status": "ok"})

    def _group(self, body: Mapping[str, Any], join: bool) -> httpx.Response:
        name = body["group_name"]
        if not join and name not in self._groups:
            return _refused("The group to be destroyed does not exist.")
        (self._groups.add if join else self._groups.remove)(name)
        return _ok()

    def _begin(self, body: Mapping[str, Any]) -> httpx.Response:
        if self._session:
            return _refused("a weight update is already open")
        self._session, self._next_version = True, None
        return _ok()

    def _update(self, body: Mapping[str, Any]) -> httpx.Response:
        if not self._session:
            return _refused("update_weights_from_distributed must run between begin_weight_update() and end_weight_update()")
        version = body.get("weight_version")
        if not isinstance(version, str | None):
            return _error("weight_version must be a string")
        self._next_version = version
        if version is not None and not self._staged_update:
            self.weight_version = version
        return _ok()

    def _end(self, body: Mapping[str, Any]) -> httpx.Response:
        if not self._session:
            return _refused("no weight update is open")
        self._session = False
        self.weight_version = self._next_version or self.weight_version
        return _ok()

    def _checksum(self) -> httpx.Response:
        sums = self.checksums or {"all": self.weight_version}
        return _ok(per_engine_checksum="+".join(sums.values()), ranks=[{"checksums": sums}])

    def _load(self, body: Mapping[str, Any]) -> httpx.Response:
        self.checksums = self.checksums if self.checksums_on_disk is None else self.checksums_on_disk
        self.weight_version = body.get("weight_version", self.weight_version)
        return _ok()


@dataclass(slots=True)
class _Running:
    """A generation request being served."""

    break_off: int | None
    aborted: bool = False
    stop: trio.Event = field(default_factory=trio.Event)


def _ok(**more: Any) -> httpx.Response:
    return httpx.Response(200, json={"success": True, "message": "Success.", **more})


def _refused(message: str) -> httpx.Response:
    return httpx.Response(400, json={"success": False, "message": message})


def _error(message: str) -> httpx.Response:
    return httpx.Response(400, json={"error": {"message": message}})
