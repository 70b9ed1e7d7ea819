"""The embedded engine over real HTTP and a real gloo group: what it does beyond SGLang. tests/conformance has what both do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from engine_calls import PROMPT, Running, announcement, generate, group, halves, load, wait_until
from engine_process import engine_process
from tiny_qwen2 import write_tiny_qwen2

from agentrl.collective import broadcast, combined_checksum, flatten_bucket, tensor_checksum
from agentrl.engine.architecture import ModelConfig
from agentrl.engine.runner import Chunk, ModelRunner
from agentrl.engine.weights import Weights, read_tensors

pytestmark = pytest.mark.slow

CONTEXT_TOKENS = 2048  # a request may take seconds: no test waits for the end of one that something is to happen to


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Three models of one architecture, slow enough to be interrupted."""
    directory = tmp_path_factory.mktemp("models")
    sizes = {"hidden": 64, "layers": 8, "intermediate": 96, "context_tokens": CONTEXT_TOKENS}
    return [write_tiny_qwen2(directory / str(seed), **sizes, seed=seed, scale=0.15) for seed in range(3)]


@pytest.fixture(scope="module")
def process(models) -> Iterator[httpx.Client]:
    with engine_process(models[0], context_tokens=CONTEXT_TOKENS) as client:
        yield client


@pytest.fixture
def engine(process, models) -> httpx.Client:
    """The engine with the first model under version "0", awake, nothing paused, no update open."""
    process.post("/resume_memory_occupation")
    process.post("/end_weight_update")
    process.post("/continue_generation")
    process.post("/abort_request", json={"abort_all": True})
    assert process.post("/update_weights_from_disk", json={"model_path": str(models[0]), "weight_version": "0"}).status_code == 200
    return process


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def scored(model_dir: Path, ids: list[int], first: int, temperature: float) -> list[float]:
    """Log-probs of ids[first:], each given everything before it."""
    runner = ModelRunner(Weights.load(model_dir, ModelConfig.load(model_dir)), slots=1, context_tokens=CONTEXT_TOKENS)
    hidden = runner.prefill([Chunk(slot=0, tokens=ids)], every_token=True)
    logprobs = (runner.logits(hidden) / temperature).log_softmax(-1)
    return [logprobs[index - 1, ids[index]].item() for index in range(first, len(ids))]


def test_many_requests_at_once_get_what_each_would_get_alone(engine, pool):
    alone = [generate(engine, [*PROMPT, n], new=10 + n, sampling_seed=n)["output_ids"] for n in range(12)]
    futures = [pool.submit(generate, engine, [*PROMPT, n], new=10 + n, sampling_seed=n) for n in range(12)]
    assert [future.result()["output_ids"] for future in futures] == alone


def test_a_retracted_request_draws_the_tokens_it_would_have_drawn(engine, pool):
    undisturbed = generate(engine, new=200, sampling_seed=5)
    running = Running(engine, pool, new=200, sampling_seed=5).wait(10)
    engine.post("/pause_generation", json={"mode": "retract"})
    engine.post("/continue_generation")
    assert running.result()["output_ids"] == undisturbed["output_ids"]


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "per tensor"])
def test_an_update_without_a_pause_gives_every_token_the_log_prob_of_its_version(engine, pool, models, flat):
    running = [Running(engine, pool, [*PROMPT, n], temperature=0.7, sampling_seed=n).wait(10) for n in range(3)]
    with group(engine, pool, f"unpaused {flat}") as ours:
        assert engine.post("/begin_weight_update").json() == {"success": True, "message": "Success"}
        tensors = read_tensors(models[1])
        first, second = halves(tensors)
        assert ours.send(first, flat=flat).json()["success"]
        last = ours.send(second, flat=flat, weight_version="1")
        assert last.json() == {"success": True, "message": "Succeeded to update parameter online. Weight version updated to 1."}
        assert engine.get("/model_info").json()["weight_version"] == "0"  # nothing is live before the end
        assert engine.post("/end_weight_update").json()["success"]
    assert engine.get("/model_info").json()["weight_version"] == "1"
    expected = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    told = engine.post("/weights_checker", json={"action": "checksum"}).json()
    assert told["ranks"][0]["checksums"] == expected
    assert told["per_engine_checksum"] == combined_checksum(expected)
    for request in running:
        request.wait(request.tokens + 16)
    engine.post("/abort_request", json={"abort_all": True})
    for n, request in enumerate(running):
        reply = request.result()
        before, after = reply["meta_info"]["weight_versions"]
        assert (before["version"], before["start"], after["version"], after["end"]) == ("0", 0, "1", len(reply["output_ids"]))
        seam = before["end"]
        ids = [*PROMPT, n, *reply["output_ids"]]
        logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        assert logprobs[:seam] == pytest.approx(scored(models[0], ids, 5, 0.7)[:seam], abs=1e-4)
        assert logprobs[seam:] == pytest.approx(scored(models[1], ids, 5, 0.7)[seam:], abs=1e-4)


def test_generation_goes_on_while_a_bucket_is_on_its_way(engine, pool, models):
    with group(engine, pool, "slow") as ours:
        engine.post("/begin_weight_update")
        tensors = read_tensors(models[2])
        posted = ours.announce(tensors, weight_version="2")
        assert len(generate(engine, new=50)["output_ids"]) == 50
        assert not posted.done()
        broadcast(flatten_bucket(tensors.values()), ours.process_group)
        assert posted.result().status_code == 200
        assert engine.post("/end_weight_update").status_code == 200
    assert generate(engine)["meta_info"]["weight_version"] == "2"


def test_an_update_that_does_not_fit_is_refused_before_the_collective(engine, pool):
    with group(engine, pool, "refusals"):
        engine.post("/begin_weight_update")
        good = announcement({"model.norm.weight": torch.zeros(64)}, group_name="refusals", weight_version="1")
        for change, message in [
            ({"group_name": "other"}, "group 'other' does not exist"),
            ({"names": ["model.nom.weight"]}, "'model.nom.weight' is not one of this model's"),
            ({"shapes": [[63]]}, "must have shape [64], got [63]"),
            ({"dtypes": ["int8"]}, "dtype must be one of"),
            ({"shapes": []}, "lists of one length"),
            ({"weight_version": 1}, "weight_version must be a non-empty string, got 1"),
            ({"load_format": "direct"}, "load_format must be null or 'flattened_bucket'"),
            ({"piece_bytes": 1000}, "piece_bytes must be a positive multiple of 8192, got 1000"),
        ]:
            refused = engine.post("/update_weights_from_distributed", json=good | change)
            assert refused.status_code == 400
            assert message in refused.json()["message"]
        assert engine.post("/end_weight_update").status_code == 200


def test_an_update_that_was_not_finished_changes_nothing(engine, pool, models):
    before = engine.post("/weights_checker", json={"action": "checksum"}).json()
    first, _ = halves(read_tensors(models[1]))
    with group(engine, pool, "unnamed") as ours:
        engine.post("/begin_weight_update")
        ours.send(first)
        refused = engine.post("/end_weight_update")
        assert refused.status_code == 400
        assert "none of its buckets named a weight_version" in refused.json()["message"]
        engine.post("/begin_weight_update")
        ours.send(first, weight_version="1")
        assert engine.post("/update_weights_from_disk", json={"model_path": str(models[0]), "weight_version": "0"}).status_code == 200
        assert "loaded from disk meanwhile" in engine.post("/end_weight_update").json()["message"]
        engine.post("/begin_weight_update")
        ours.send(first, weight_version="1")
        engine.post("/destroy_weights_update_group", json={"group_name": "unnamed"})
        refused = engine.post("/end_weight_update")
        assert "was destroyed before its end" in refused.json()["message"]
    with group(engine, pool, "silent", timeout_s=1) as ours:
        engine.post("/begin_weight_update")
        posted = ours.announce(first, flat=False, weight_version="1")
        wait_until(lambda: engine.get("/server_info").json()["weight_update"] == "receiving")
        assert "while a bucket was still being received" in engine.post("/end_weight_update").json()["message"]
        assert posted.result().status_code == 400  # when the group's deadline has passed: gloo cannot give up earlier
    assert engine.post("/weights_checker", json={"action": "checksum"}).json() == before
    assert generate(engine)["meta_info"]["weight_version"] == "0"


def test_nobody_at_the_meeting_point_is_a_400_after_the_deadline(engine):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": "lonely", "backend": "gloo"}
    refused = engine.post("/init_weights_update_group", json=body | {"timeout_s": 1})
    assert refused.status_code == 400
    assert "'lonely' of 2" in refused.json()["message"]


def test_weights_of_another_architecture_are_refused(engine, tmp_path):
    other = write_tiny_qwen2(tmp_path / "other", hidden=32)
    assert "architecture" in engine.post("/update_weights_from_disk", json={"model_path": str(other)}).json()["message"]


def test_the_server_counts_what_it_has_done(engine):
    generate(engine)
    info = engine.get("/server_info").json()
    assert (info["version"], info["staged_update"], info["max_req_input_len"]) == ("0.5.23", True, CONTEXT_TOKENS - 1)
    counted = info["embedded"]
    assert set(counted) >= {"generated_tokens", "busy_s", "prefill_tokens", "cached_tokens", "pause_s", "uptime_s", "retractions"}
    assert counted["generated_tokens"] > 0
    assert 0 < counted["busy_s"] < counted["uptime_s"]


def test_an_engine_asleep_keeps_requests_waiting_and_refuses_new_weights_until_it_has_its_memory_again(engine, pool, models):
    before = engine.post("/weights_checker", json={"action": "checksum"}).json()["per_engine_checksum"]
    assert "only; it is paused by None" in engine.post("/release_memory_occupation", json={}).text
    running = Running(engine, pool, new=600).wait(16)
    engine.post("/pause_generation", json={"mode": "retract"})
    for _ in range(2):
        answer = engine.post("/release_memory_occupation", json={})
        assert (answer.status_code, answer.json()) == (200, None)
    engine.post("/continue_generation")
    late = pool.submit(generate, engine)
    wait_until(lambda: load(engine, "num_waiting_reqs") == 2)
    assert (engine.get("/ready").status_code, engine.get("/health").status_code) == (503, 200)
    for path, body in (("/begin_weight_update", {}), ("/update_weights_from_disk", {"model_path": str(models[1])}), ("/weights_checker", {})):
        refusal = engine.post(path, json=body)
        assert refusal.status_code == 400
        assert "the engine is asleep" in refusal.json()["message"]
    assert engine.get("/server_info").json()["asleep"] == ["cuda_graph", "kv_cache", "weights"]
    for _ in range(2):
        assert engine.post("/resume_memory_occupation", json={}).status_code == 200
    reply = running.future.result(30.0)
    assert len(late.result(30.0)["output_ids"]) == 8
    ids, found = PROMPT + reply["output_ids"], [triple[0] for triple in reply["meta_info"]["output_token_logprobs"]]
    assert found == pytest.approx(scored(models[0], ids, len(PROMPT), 1.0), abs=1e-4)
    assert engine.post("/weights_checker", json={"action": "checksum"}).json()["per_engine_checksum"] == before
    assert engine.get("/server_info").json()["embedded"]["asleep_s"] > 0


def test_memory_is_not_released_in_the_middle_of_an_update_and_only_by_names_that_are_known(engine):
    engine.post("/pause_generation", json={"mode": "abort"})
    engine.post("/begin_weight_update")
    assert "end the update first" in engine.post("/release_memory_occupation", json={}).json()["message"]
    engine.post("/end_weight_update")
    assert "some of ['cuda_graph', 'kv_cache', 'weights']" in engine.post("/release_memory_occupation", json={"tags": ["all"]}).json()["message"]
