"""The engine that a test talks to: the embedded one, a real SGLang (mark `sglang`), or whatever AGENTRL_ENGINE_URL names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from conformance_models import write_models, written_models
from conformance_servers import embedded_command, embedded_thread, http_client, sglang_server
from differences import DIFFERENCES
from engine_calls import DEADLINE_S, Group, Reply, Running, generate, group

URL = os.environ.get("AGENTRL_ENGINE_URL")  # a running server of the suite's own model
MODELS = os.environ.get("AGENTRL_ENGINE_MODELS")  # and what wrote it: conformance_models.py
PYTHON = os.environ.get("AGENTRL_SGLANG_PYTHON")
NO_SGLANG = pytest.mark.skipif(PYTHON is None, reason="AGENTRL_SGLANG_PYTHON names no Python that has sglang: make test-sglang sets one up")
KINDS = ["attached"] if URL else ["embedded", pytest.param("sglang", marks=[pytest.mark.sglang, NO_SGLANG])]


@dataclass
class Engine:
    """An engine under test, and short ways to talk to it."""

    kind: str  # "embedded" or "sglang"
    http: httpx.Client
    models: list[Path]
    pool: ThreadPoolExecutor

    def post(self, path: str, **body: Any) -> httpx.Response:
        """A call with a JSON object."""
        return self.http.post(path, json=body)

    def get(self, path: str) -> httpx.Response:
        """A call without a body."""
        return self.http.get(path)

    def generate(self, ids: list[int] | None = None, **fields: Any) -> Reply:
        """See engine_calls.generate."""
        return generate(self.http, ids, **fields)

    def start(self, ids: list[int] | None = None, **fields: Any) -> Running:
        """See engine_calls.Running."""
        return Running(self.http, self.pool, ids, **fields)

    def group(self, name: str) -> Any:
        """See engine_calls.group: a context of a Group."""
        return group(self.http, self.pool, name)

    def differs(self, name: str) -> str:
        """What this kind of engine does where the two are meant to differ."""
        told: str = getattr(DIFFERENCES[name], self.kind)
        return told

    @property
    def version(self) -> str:
        """Of the weights, as told now."""
        told: str = self.get("/model_info").json()["weight_version"]
        return told

    def checksum(self) -> str:
        """Of all weights."""
        told: str = self.post("/weights_checker", action="checksum").json()["per_engine_checksum"]
        return told

    def from_disk(self, model: int, version: str, **more: Any) -> httpx.Response:
        """Update to one of the models. For a moment after a request has been answered SGLang still holds it, and cannot flush: once more then."""
        reply = self.once_from_disk(model, version, **more)
        deadline = time.monotonic() + DEADLINE_S
        while "requests are still running" in reply.text and time.monotonic() < deadline:
            reply = self.once_from_disk(model, version, **more)
        return reply

    def once_from_disk(self, model: int, version: str, **more: Any) -> httpx.Response:
        """Whatever is answered."""
        return self.post("/update_weights_from_disk", model_path=str(self.models[model]), weight_version=version, **more)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One architecture, three sets of weights."""
    return written_models(Path(MODELS)) if MODELS else write_models(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="session", params=KINDS)
def server(request: pytest.FixtureRequest, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One server of each kind for the whole suite, and of one kind at a time."""
    if request.param == "attached":
        assert MODELS, "AGENTRL_ENGINE_URL needs AGENTRL_ENGINE_MODELS, the directory that conformance_models.py has written"
        starting: Any = nullcontext(URL)
    elif request.param == "sglang":
        assert PYTHON is not None
        starting = sglang_server(PYTHON, models[0], tmp_path_factory.mktemp("sglang") / "server.log")
    else:
        starting = embedded_command(models[0])
    with starting as url, http_client(url) as http, ThreadPoolExecutor(16) as pool:
        kind = "embedded" if "embedded" in http.get("/server_info").json() else "sglang"
        engine = Engine(kind, http, models, pool)
        try:
            yield engine
        finally:
            _settle(engine)


@pytest.fixture
def engine(server: Engine) -> Engine:
    """The server with the first model under version "0", nothing running or paused, no update open."""
    _settle(server)
    return server


@pytest.fixture
def fresh_group(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Group]:
    """A weight-update group of this test."""
    with engine.group(request.node.name) as ours:
        yield ours


@pytest.fixture(scope="session")
def second_server(server: Engine, models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Starts another server of the same kind, with keys."""
    if URL:
        pytest.skip("it needs a server of its own, and the suite is attached to a running one")

    def start(*, api_key: str | None, admin_key: str | None) -> Any:
        if server.kind == "sglang":
            assert PYTHON is not None
            return sglang_server(PYTHON, models[0], tmp_path_factory.mktemp("second") / "server.log", api_key=api_key, admin_key=admin_key)
        return embedded_thread(models[0], api_key=api_key, admin_key=admin_key)

    return start


def _settle(engine: Engine) -> None:
    engine.post("/continue_generation")
    engine.post("/abort_request", abort_all=True)
    engine.post("/end_weight_update")
    reply = engine.from_disk(0, "0")
    assert reply.status_code == 200, reply.text
