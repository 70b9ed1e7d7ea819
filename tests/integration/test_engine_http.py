"""The engine over real HTTP and a real gloo group: shapes, errors, and weights that change in mid-request."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_process import engine_process
from tiny_qwen2 import write_tiny_qwen2

from agentrl.collective import broadcast, combined_checksum, flatten_bucket, join_update_group, leave_update_group, tensor_checksum
from agentrl.engine.architecture import ModelConfig
from agentrl.engine.runner import Chunk, ModelRunner
from agentrl.engine.weights import Weights, read_tensors

pytestmark = pytest.mark.slow

LONG = 400  # tokens of a request that is still running when something happens to it
PROMPT = [5, 17, 80, 41]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Three models of one architecture, slow enough to be interrupted."""
    directory = tmp_path_factory.mktemp("models")
    return [write_tiny_qwen2(directory / str(seed), hidden=64, layers=8, intermediate=96, seed=seed, scale=0.15) for seed in range(3)]


@pytest.fixture(scope="module")
def process(models) -> Iterator[httpx.Client]:
    with engine_process(models[0]) as client:
        yield client


@pytest.fixture
def engine(process, models) -> httpx.Client:
    """The engine with the first model under version "0", nothing paused, no update open."""
    process.post("/end_weight_update")
    process.post("/continue_generation")
    process.post("/abort_request", json={"abort_all": True})
    assert process.post("/update_weights_from_disk", json={"model_path": str(models[0]), "weight_version": "0"}).status_code == 200
    return process


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def generate(engine: httpx.Client, ids: list[int] | None = None, *, new: int = 8, rid: str | None = None, **sampling: Any) -> dict[str, Any]:
    params = {"max_new_tokens": new, "ignore_eos": True, "sampling_seed": 1, **sampling}
    reply = engine.post("/generate", json={"rid": rid, "input_ids": ids or PROMPT, "sampling_params": params, "return_logprob": True})
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def wait_until(condition: Any, deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"


def load(engine: httpx.Client, name: str) -> int:
    return int(engine.get("/v1/loads").json()["loads"][0][name])


def generated(engine: httpx.Client) -> float:
    return float(engine.get("/server_info").json()["embedded"]["generated_tokens"])


def start_long(engine: httpx.Client, pool: ThreadPoolExecutor, count: int = 3, **sampling: Any) -> list[Future[dict[str, Any]]]:
    """Requests that are all running, with some tokens each, when this returns."""
    before = generated(engine)
    futures = [pool.submit(generate, engine, [*PROMPT, n], new=LONG, rid=f"long{n}", sampling_seed=n, **sampling) for n in range(count)]
    wait_until(lambda: load(engine, "num_running_reqs") == count and generated(engine) > before + 10 * count)
    return futures


def scored(model_dir: Path, ids: list[int], first: int, temperature: float) -> list[float]:
    """Log-probs of ids[first:], each given everything before it."""
    runner = ModelRunner(Weights.load(model_dir, ModelConfig.load(model_dir)), slots=1, context_tokens=512)
    hidden = runner.prefill([Chunk(slot=0, tokens=ids)], every_token=True)
    logprobs = (runner.logits(hidden) / temperature).log_softmax(-1)
    return [logprobs[index - 1, ids[index]].item() for index in range(first, len(ids))]


@contextmanager
def group(engine: httpx.Client, pool: ThreadPoolExecutor, name: str, *, timeout_s: float = 20) -> Iterator[Any]:
    """Rank 0 of a gloo group with the engine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": name, "backend": "gloo"}
    joining = pool.submit(engine.post, "/init_weights_update_group", json=body | {"timeout_s": timeout_s})
    ours = join_update_group(master_address="127.0.0.1", master_port=port, rank=0, world_size=2, group_name=name, timeout_s=timeout_s)
    assert joining.result().json() == {"success": True, "message": "Succeeded to initialize custom process group."}
    try:
        yield ours
    finally:
        engine.post("/destroy_weights_update_group", json={"group_name": name})
        leave_update_group(ours)


def announcement(tensors: dict[str, torch.Tensor], **more: Any) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        **more,
    }


def send(engine: httpx.Client, pool: ThreadPoolExecutor, ours: Any, tensors: dict[str, torch.Tensor], *, flat: bool, **more: Any) -> httpx.Response:
    """One bucket, both ends of it."""
    body = announcement(tensors, load_format="flattened_bucket" if flat else None, flush_cache=True, **more)
    posted = pool.submit(engine.post, "/update_weights_from_distributed", json=body)
    for tensor in [flatten_bucket(tensors.values())] if flat else tensors.values():
        broadcast(tensor, ours)
    return posted.result()


def halves(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    names = list(tensors)
    middle = len(names) // 2
    return {name: tensors[name] for name in names[:middle]}, {name: tensors[name] for name in names[middle:]}


def test_a_reply_has_the_fields_of_sglang(engine):
    reply = generate(engine, new=3, rid="fields")
    assert list(reply) == ["text", "output_ids", "meta_info"]
    meta = reply["meta_info"]
    assert set(meta) == {
        "id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "input_token_logprobs", "output_token_logprobs",
        "output_token_logprobs_length", "reasoning_tokens", "completion_tokens", "cached_tokens", "weight_versions", "cached_tokens_details",
        "dp_rank", "e2e_latency", "response_sent_to_client_ts",
    }  # fmt: skip
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == ("fields", 4, 3, "0")
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]


def test_log_probs_of_prompt_and_completion_are_those_of_a_full_forward(engine, models):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 20, "temperature": 0.7, "ignore_eos": True}}
    reply = engine.post("/generate", json={**body, "return_logprob": True, "logprob_start_len": 0}).json()
    ids, meta = PROMPT + reply["output_ids"], reply["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 5, None]
    assert [entry[0] for entry in meta["input_token_logprobs"][1:]] == pytest.approx(scored(models[0], PROMPT, 1, 1.0), abs=1e-4)
    assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx(scored(models[0], ids, 4, 0.7), abs=1e-4)


def test_a_batch_is_answered_by_a_list_in_order(engine):
    reply = engine.post("/generate", json={"input_ids": [[5, 6], [7]], "rid": ["a", "b"], "sampling_params": {"max_new_tokens": 2}}).json()
    assert [(part["meta_info"]["id"], part["meta_info"]["prompt_tokens"]) for part in reply] == [("a", 2), ("b", 1)]
    assert "output_token_logprobs" not in reply[0]["meta_info"]


def test_text_is_encoded_and_trimmed_at_what_stopped_it(engine):
    whole = generate(engine, new=6)
    stop = whole["text"].split()[3]
    reply = engine.post(
        "/generate",
        json={"text": "w5 w17 w80 w41".replace("w5", "<answer>"), "sampling_params": {"max_new_tokens": 6, "sampling_seed": 1, "stop": stop}},
    ).json()
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["output_ids"] == whole["output_ids"][:4]
    assert reply["text"].split() == whole["text"].split()[:3]
    kept = generate(engine, new=6, stop=[stop], no_stop_trim=True)
    assert kept["text"].split() == whole["text"].split()[:4]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": [1], "text": "w1"}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"input_ids": [1, 96]}, "token id 96 is outside the vocabulary of 96"),
        ({"input_ids": [-1]}, "token id -1 is outside the vocabulary of 96"),
        ({"input_ids": [1] * 512}, "The input (512 tokens) is longer than the model's context length (512 tokens)."),
        ({"input_ids": [1], "stream": True}, "stream is not supported by the embedded engine"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0.9}}, "sampling parameter top_p=0.9 is not supported by the embedded engine"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature must be non-negative, got -1."),
        ({"input_ids": [1], "sampling_params": {"stop": ["x"] * 33}}, "at most 32 stop strings are allowed, got 33"),
    ],
)
def test_a_request_that_cannot_be_served_is_a_400_that_says_why(engine, body, message):
    reply = engine.post("/generate", json=body)
    assert (reply.status_code, reply.json()) == (400, {"error": {"message": message}})


def test_the_other_shapes_of_errors(engine):
    too_many = engine.post("/generate", json={"input_ids": [1] * 500, "sampling_params": {"max_new_tokens": 13}})
    assert too_many.status_code == 400
    assert too_many.json()["error"]["message"].startswith("Requested token count exceeds the model's maximum context length of 512 tokens.")
    unknown = engine.post("/generate", json={"input_ids": [1], "sampling_params": {"max_tokens": 3}})
    assert unknown.status_code == 400
    assert unknown.json()["error"].startswith("unknown field `max_tokens`, expected one of ")
    for content in (b"{", b"[1]", b'{"input_ids": "w1"}', b'{"input_ids": [1.5]}', b'{"input_ids": [1], "sampling_params": {"max_new_tokens": "8"}}'):
        malformed = engine.post("/generate", content=content)
        assert (malformed.status_code, malformed.json()["object"], malformed.json()["code"]) == (400, "error", 400)
    assert engine.get("/get_load").status_code == 404


def test_many_requests_at_once_get_what_each_would_get_alone(engine, pool):
    alone = [generate(engine, [*PROMPT, n], new=10 + n, sampling_seed=n)["output_ids"] for n in range(12)]
    futures = [pool.submit(generate, engine, [*PROMPT, n], new=10 + n, sampling_seed=n) for n in range(12)]
    assert [future.result()["output_ids"] for future in futures] == alone


def test_a_later_turn_finds_its_prefix(engine):
    first = generate(engine, [30, 31, 32], new=6)
    turn = generate(engine, [30, 31, 32, *first["output_ids"], 33, 34])
    assert turn["meta_info"]["cached_tokens"] == 8
    assert turn["meta_info"]["cached_tokens_details"] == {"device": 8, "host": 0}


def test_a_request_id_in_flight_is_refused(engine, pool):
    [running] = start_long(engine, pool, 1)
    again = engine.post("/generate", json={"rid": "long0", "input_ids": [1]})
    assert (again.status_code, again.json()) == (400, {"error": {"message": "Duplicate request ID detected: long0"}})
    engine.post("/abort_request", json={"rid": "long0"})
    running.result()
    assert generate(engine, rid="long0")["meta_info"]["id"] == "long0"


def test_an_aborted_running_request_answers_with_what_it_has(engine, pool):
    running = start_long(engine, pool, 2)
    reply = engine.post("/abort_request", json={"rid": "long1"})
    assert (reply.status_code, reply.content) == (200, b"")
    aborted = running[1].result()
    assert aborted["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 10 < len(aborted["output_ids"]) == len(aborted["meta_info"]["output_token_logprobs"]) < LONG
    assert len(running[0].result()["output_ids"]) == LONG
    assert engine.post("/abort_request", json={"rid": "nobody"}).status_code == 200
    assert engine.post("/abort_request", json={}).status_code == 200


def test_aborted_in_the_queue_a_request_answers_with_the_reduced_meta_and_all_its_tokens(engine, pool):
    running = start_long(engine, pool, 1)
    engine.post("/pause_generation", json={"mode": "retract"})
    waiting = pool.submit(generate, engine, rid="waiting")
    wait_until(lambda: load(engine, "num_waiting_reqs") == 2)
    engine.post("/abort_request", json={"abort_all": True})
    retracted, fresh = running[0].result(), waiting.result()
    for reply in (retracted, fresh):
        assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & set(reply["meta_info"])
    assert len(retracted["output_ids"]) == len(retracted["meta_info"]["output_token_logprobs"]) > 10
    assert retracted["meta_info"]["weight_versions"][0]["end"] == len(retracted["output_ids"])
    assert fresh["output_ids"] == []


def test_while_paused_requests_wait_and_ready_says_no(engine, pool):
    assert engine.post("/pause_generation", json={"mode": "abort"}).json() == {"message": "Generation paused successfully.", "status": "ok"}
    waiting = pool.submit(generate, engine)
    wait_until(lambda: load(engine, "num_waiting_reqs") == 1)
    assert (engine.get("/ready").status_code, engine.get("/health").status_code) == (503, 200)
    assert engine.post("/continue_generation").json() == {"message": "Generation continued successfully.", "status": "ok"}
    assert len(waiting.result()["output_ids"]) == 8
    assert engine.get("/ready").status_code == 200
    refused = engine.post("/pause_generation", json={"mode": "in_place"})
    assert (refused.status_code, refused.json()["success"]) == (400, False)


def test_a_retracted_request_goes_on_as_if_nothing_had_been(engine, pool):
    undisturbed = generate(engine, [*PROMPT, 0], new=LONG, sampling_seed=0)
    [running] = start_long(engine, pool, 1)
    engine.post("/pause_generation", json={"mode": "retract"})
    assert engine.post("/flush_cache").text.startswith("Cache flushed.")
    engine.post("/continue_generation")
    reply = running.result()
    assert reply["output_ids"] == undisturbed["output_ids"]
    assert (reply["meta_info"]["num_retractions"], reply["meta_info"]["cached_tokens"]) == (1, 0)


def test_the_cache_is_not_flushed_while_requests_run(engine, pool):
    [running] = start_long(engine, pool, 1)
    assert (engine.post("/flush_cache").status_code, engine.get("/flush_cache").text) == (400, "Flush cache failed.\n")
    running.result()
    assert engine.get("/flush_cache").status_code == 200


def test_a_client_that_leaves_takes_its_request_along(engine):
    host, port = engine.base_url.host, engine.base_url.port
    body = b'{"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 500, "ignore_eos": true}}'
    with socket.create_connection((host, port)) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: engine\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: load(engine, "num_running_reqs") == 1)
    before = generated(engine)
    wait_until(lambda: load(engine, "num_running_reqs") == 0)
    assert generated(engine) - before < 450


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "per tensor"])
@pytest.mark.parametrize("pause", [True, False], ids=["paused", "unpaused"])
def test_an_update_in_mid_request_gives_every_token_the_log_prob_of_its_version(engine, pool, models, flat, pause):
    running = start_long(engine, pool, temperature=0.7)
    with group(engine, pool, f"update-{flat}-{pause}") as ours:
        if pause:
            engine.post("/pause_generation", json={"mode": "retract"})
        assert engine.post("/begin_weight_update").json() == {"success": True, "message": "Success"}
        tensors = read_tensors(models[1])
        first, second = halves(tensors)
        assert send(engine, pool, ours, first, flat=flat, group_name=f"update-{flat}-{pause}").json()["success"]
        assert engine.get("/model_info").json()["weight_version"] == "0"  # nothing is live before the end
        last = send(engine, pool, ours, second, flat=flat, group_name=f"update-{flat}-{pause}", weight_version="1")
        assert last.json() == {"success": True, "message": "Succeeded to update parameter online. Weight version updated to 1."}
        assert engine.post("/end_weight_update").json()["success"]
        if pause:
            engine.post("/continue_generation")
    assert engine.get("/model_info").json()["weight_version"] == "1"
    expected = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
    told = engine.post("/weights_checker", json={"action": "checksum"}).json()
    assert told["ranks"][0]["checksums"] == expected
    assert told["per_engine_checksum"] == combined_checksum(expected)
    for n, future in enumerate(running):
        reply = future.result()
        before, after = reply["meta_info"]["weight_versions"]
        assert (before["version"], before["start"], after["version"], after["end"]) == ("0", 0, "1", LONG)
        seam = before["end"]
        assert 0 < seam == after["start"] < LONG
        ids = [*PROMPT, n, *reply["output_ids"]]
        logprobs = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        assert logprobs[:seam] == pytest.approx(scored(models[0], ids, 5, 0.7)[:seam], abs=1e-4)
        assert logprobs[seam:] == pytest.approx(scored(models[1], ids, 5, 0.7)[seam:], abs=1e-4)


def test_generation_goes_on_while_a_bucket_is_on_its_way(engine, pool, models):
    with group(engine, pool, "slow") as ours:
        engine.post("/begin_weight_update")
        tensors = read_tensors(models[2])
        body = announcement(tensors, group_name="slow", load_format="flattened_bucket", weight_version="2")
        posted = pool.submit(engine.post, "/update_weights_from_distributed", json=body)
        assert len(generate(engine, new=50)["output_ids"]) == 50
        assert not posted.done()
        broadcast(flatten_bucket(tensors.values()), ours)
        assert posted.result().status_code == 200
        assert engine.post("/end_weight_update").status_code == 200
    assert generate(engine)["meta_info"]["weight_version"] == "2"


def test_an_update_that_does_not_fit_is_refused_before_the_collective(engine, pool):
    good = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "group_name": "refusals", "weight_version": "1"}
    outside = engine.post("/update_weights_from_distributed", json=good)
    assert (outside.status_code, outside.json()) == (
        400,
        {"success": False, "message": "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"},
    )
    with group(engine, pool, "refusals"):
        engine.post("/begin_weight_update")
        assert "already open" in engine.post("/begin_weight_update").json()["message"]
        for change, message in [
            ({"group_name": "other"}, "group 'other' does not exist"),
            ({"names": ["model.nom.weight"]}, "'model.nom.weight' is not one of this model's"),
            ({"shapes": [[63]]}, "must have shape [64], got [63]"),
            ({"dtypes": ["int8"]}, "dtype must be one of"),
            ({"shapes": []}, "lists of one length"),
            ({"weight_version": 1}, "weight_version must be a non-empty string, got 1"),
            ({"load_format": "direct"}, "load_format must be null or 'flattened_bucket'"),
        ]:
            refused = engine.post("/update_weights_from_distributed", json=good | change)
            assert refused.status_code == 400
            assert message in refused.json()["message"]
        assert engine.post("/end_weight_update").status_code == 200
    assert engine.post("/end_weight_update").status_code == 400
    assert engine.post("/destroy_weights_update_group", json={"group_name": "refusals"}).json()["message"] == (
        "The group to be destroyed does not exist."
    )


def test_an_update_that_was_not_finished_changes_nothing(engine, pool, models):
    before = engine.post("/weights_checker", json={"action": "checksum"}).json()
    first, _ = halves(read_tensors(models[1]))
    with group(engine, pool, "unnamed") as ours:
        engine.post("/begin_weight_update")
        send(engine, pool, ours, first, flat=True, group_name="unnamed")
        refused = engine.post("/end_weight_update")
        assert refused.status_code == 400
        assert "none of its buckets named a weight_version" in refused.json()["message"]
        engine.post("/begin_weight_update")
        send(engine, pool, ours, first, flat=True, group_name="unnamed", weight_version="1")
        engine.post("/destroy_weights_update_group", json={"group_name": "unnamed"})
        refused = engine.post("/end_weight_update")
        assert "was destroyed before its end" in refused.json()["message"]
    with group(engine, pool, "silent", timeout_s=1):
        engine.post("/begin_weight_update")
        posted = pool.submit(engine.post, "/update_weights_from_distributed", json=announcement(first, group_name="silent", weight_version="1"))
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
    assert engine.post("/init_weights_update_group", json=body | {"group_name": ""}).status_code == 400


def test_weights_from_disk_replace_all_or_nothing(engine, pool, models, tmp_path):
    running = start_long(engine, pool, 1)
    bad = engine.post("/update_weights_from_disk", json={"model_path": str(tmp_path / "none"), "weight_version": "9"})
    assert (bad.status_code, bad.json()["success"]) == (400, False)
    other = write_tiny_qwen2(tmp_path / "other", hidden=32)
    assert "architecture" in engine.post("/update_weights_from_disk", json={"model_path": str(other)}).json()["message"]
    good = engine.post("/update_weights_from_disk", json={"model_path": str(models[2]), "weight_version": "2"})
    assert good.json() == {"success": True, "message": "Succeeded to update model weights. Weight version updated to 2.", "num_paused_requests": 0}
    spans = running[0].result()["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "2"]


def test_a_version_can_be_renamed(engine):
    reply = engine.post("/update_weight_version", json={"new_version": "42", "abort_all_requests": False})
    assert reply.json() == {"success": True, "message": "Weight version updated to 42", "new_version": "42"}
    assert generate(engine)["meta_info"]["weight_versions"] == [{"version": "42", "start": 0, "end": 8}]
    assert engine.post("/update_weight_version", json={"new_version": 43}).status_code == 400


def test_the_server_tells_what_it_is_and_has_done(engine):
    generate(engine)
    info = engine.get("/server_info").json()
    assert (info["version"], info["tp_size"], info["staged_update"], info["max_req_input_len"]) == ("0.5.23", 1, True, 511)
    counted = info["embedded"]
    assert set(counted) >= {"generated_tokens", "busy_s", "prefill_tokens", "cached_tokens", "pause_s", "uptime_s", "retractions"}
    assert counted["generated_tokens"] > 0
    assert 0 < counted["busy_s"] < counted["uptime_s"]
    model = engine.get("/model_info").json()
    assert (model["model_type"], model["weight_version"], model["is_generation"]) == ("qwen2", "0", True)
