"""What an engine tells of itself."""

from __future__ import annotations

import re

import pytest
from conformance_models import CONTEXT_TOKENS
from conformance_servers import SLOTS
from engine_calls import PROMPT, load, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready"])
def test_probes_answer_200_without_a_body(engine, path):
    reply = engine.get(path)
    assert (reply.status_code, reply.content) == (200, b"")


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_model(engine, path):
    told = engine.get(path).json()
    assert {name: told[name] for name in ("is_generation", "weight_version", "model_type", "architectures")} == {
        "is_generation": True,
        "weight_version": "0",
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
    }
    paths = {told[name] for name in ("model_path", "tokenizer_path", "served_model_name")}
    assert str(engine.models[0]) in paths


def test_the_models_path_after_an_update_from_disk(engine):
    engine.from_disk(1, "1")
    new = engine.differs("model_path of /model_info after an update from disk") == "the new directory"
    assert engine.get("/model_info").json()["model_path"] == str(engine.models[1 if new else 0])


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_the_server(engine, path):
    told = engine.get(path).json()
    assert re.match(r"0\.5\.\d+", told["version"])
    assert (told["tp_size"], told["dp_size"], told["max_running_requests"], told["context_length"]) == (1, 1, SLOTS, CONTEXT_TOKENS)
    assert told["weight_version"] == "0"  # what it was started with
    assert CONTEXT_TOKENS - 8 < told["max_req_input_len"] < CONTEXT_TOKENS
    assert told["max_total_num_tokens"] >= CONTEXT_TOKENS
    assert isinstance(told["internal_states"], list)


def test_its_load(engine):
    told = engine.get("/v1/loads").json()
    assert isinstance(told["timestamp"], str)
    [idle] = told["loads"]
    assert (idle["dp_rank"], idle["num_running_reqs"], idle["num_waiting_reqs"], idle["max_running_requests"]) == (0, 0, 0, SLOTS)
    assert 0 <= idle["token_usage"] <= 1
    running = [engine.start([*PROMPT, n]).wait(8) for n in range(SLOTS)]
    more = [engine.start([*PROMPT, n]) for n in range(2)]
    wait_until(lambda: load(engine.http, "num_waiting_reqs") == 2)
    assert load(engine.http, "num_running_reqs") == SLOTS
    assert load(engine.http, "num_used_tokens") >= SLOTS * len(PROMPT)
    engine.post("/abort_request", abort_all=True)
    for request in running + more:
        request.result()
    wait_until(lambda: load(engine.http, "num_running_reqs") + load(engine.http, "num_waiting_reqs") == 0)


def test_checksums_of_its_weights(engine):
    told = engine.post("/weights_checker", action="checksum").json()
    assert (told["success"], told["message"]) == (True, "Success.")
    [rank] = told["ranks"]
    names = set(rank["checksums"])
    assert all(re.fullmatch("[0-9a-f]{16}", value) for value in rank["checksums"].values())
    assert re.fullmatch("[0-9a-f]+", told["per_engine_checksum"])
    fused = engine.differs("names in /weights_checker") == "fused parameters"
    assert ("model.layers.0.self_attn.qkv_proj.weight" in names) is fused
    assert ("model.layers.0.self_attn.q_proj.weight" in names) is not fused
    refused = engine.post("/weights_checker", action="guess")
    assert (refused.status_code, refused.json()["success"]) == (400, False)


def test_a_checksum_tells_one_changed_weight(engine):
    before = engine.post("/weights_checker", action="checksum").json()
    engine.from_disk(1, "1")
    after = engine.post("/weights_checker", action="checksum").json()
    assert set(before["ranks"][0]["checksums"]) == set(after["ranks"][0]["checksums"])
    assert before["per_engine_checksum"] != after["per_engine_checksum"]
