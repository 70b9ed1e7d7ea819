"""Aborts in every state a request can be in, and clients that leave."""

from __future__ import annotations

import socket
import time

import pytest
from conformance_servers import SLOTS
from engine_calls import PROMPT, generate_body, load, wait_until

pytestmark = pytest.mark.slow

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
WAITED = {"type": "abort", "message": "Abort in waiting queue"}
REDUCED = {
    "id", "finish_reason", "weight_version", "e2e_latency", "weight_versions", "input_token_logprobs", "output_token_logprobs",
    "output_token_logprobs_length", "completion_tokens", "response_sent_to_client_ts",
}  # fmt: skip
GONE_S = 20.0  # SGLang looks every 4 s whether a client is still there


def is_reduced(reply, tokens):
    """Aborted where it waited: what it has, and less about it."""
    meta = reply["meta_info"]
    assert meta["finish_reason"] == WAITED
    assert set(meta) - {"response_sent_to_client_ts"} == REDUCED - {"response_sent_to_client_ts"}
    assert len(reply["output_ids"]) == len(meta["output_token_logprobs"]) == meta["output_token_logprobs_length"] == meta["completion_tokens"]
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": meta["completion_tokens"]}]
    return meta["completion_tokens"] >= tokens


def test_a_running_request_answers_with_what_it_has_and_others_run_on(engine):
    one, other = (engine.start([*PROMPT, n], rid=f"run{n}").wait(8) for n in range(2))
    reply = engine.post("/abort_request", rid="run0")
    assert (reply.status_code, reply.content) == (200, b"")
    aborted = one.result()
    assert aborted["meta_info"]["finish_reason"] == ABORTED
    assert 8 <= len(aborted["output_ids"]) == len(aborted["meta_info"]["output_token_logprobs"])
    other.wait(other.tokens + 16)
    assert not other.future.done()


def test_a_running_request_that_is_not_a_stream_is_answered_200(engine):
    future = engine.pool.submit(engine.post, "/generate", **generate_body(new=1500, rid="whole"))
    wait_until(lambda: load(engine.http, "num_running_reqs") == 1)
    engine.post("/abort_request", rid="whole")
    reply = future.result()
    assert (reply.status_code, reply.json()["meta_info"]["finish_reason"]["type"]) == (200, "abort")
    assert len(reply.json()["output_ids"]) < 1500


def test_a_waiting_request_answers_at_once_without_tokens(engine):
    running = [engine.start([*PROMPT, n]).wait(1) for n in range(SLOTS)]
    waiting = engine.start(rid="waiting")
    wait_until(lambda: load(engine.http, "num_waiting_reqs") == 1)
    engine.post("/abort_request", rid="waiting")
    reply = waiting.result()
    assert is_reduced(reply, 0)
    assert reply["output_ids"] == []
    assert not any(request.future.done() for request in running)


def test_a_retracted_request_answers_at_once_with_all_its_tokens(engine):
    running = engine.start(rid="retracted").wait(24)
    engine.post("/pause_generation", mode="retract")
    engine.post("/abort_request", rid="retracted")
    assert is_reduced(running.result(), 24)
    assert engine.get("/ready").status_code == 503


def test_a_request_frozen_in_place_ends_when_the_pause_does(engine):
    running = engine.start(rid="frozen").wait(16)
    engine.post("/pause_generation", mode="in_place")
    engine.post("/abort_request", rid="frozen")
    for _ in range(5):
        assert load(engine.http, "num_running_reqs") == 1
        assert not running.future.done()
    engine.post("/continue_generation")
    reply = running.result()
    assert reply["meta_info"]["finish_reason"] == ABORTED
    assert len(reply["output_ids"]) >= 16


def test_a_request_that_waits_behind_frozen_ones_ends_at_once(engine):
    running = [engine.start([*PROMPT, n]).wait(1) for n in range(SLOTS)]
    waiting = engine.start(rid="waiting")
    wait_until(lambda: load(engine.http, "num_waiting_reqs") == 1)
    engine.post("/pause_generation", mode="in_place")
    engine.post("/abort_request", abort_all=True)
    assert is_reduced(waiting.result(), 0)
    assert not any(request.future.done() for request in running)
    engine.post("/continue_generation")
    assert [request.result()["meta_info"]["finish_reason"] for request in running] == [ABORTED] * SLOTS


def test_a_request_that_came_during_a_pause(engine):
    engine.post("/pause_generation", mode="retract")
    late = engine.pool.submit(engine.generate, new=5, rid="late")
    if engine.differs("an abort of a request that came during a pause") == "ends it at once":
        wait_until(lambda: load(engine.http, "num_waiting_reqs") == 1)
        engine.post("/abort_request", rid="late")
        assert is_reduced(late.result(), 0)
    else:
        engine.post("/abort_request", rid="late")
        engine.post("/continue_generation")
        assert late.result()["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


def test_all_of_them_running_and_waiting(engine):
    running = [engine.start([*PROMPT, n]).wait(8) for n in range(SLOTS)]
    waiting = [engine.start([*PROMPT, n]) for n in range(SLOTS, SLOTS + 2)]
    wait_until(lambda: load(engine.http, "num_waiting_reqs") == 2)
    engine.post("/abort_request", abort_all=True)
    assert [request.result()["meta_info"]["finish_reason"] for request in running] == [ABORTED] * SLOTS
    assert {request.result()["meta_info"]["finish_reason"]["type"] for request in waiting} == {"abort"}


def test_an_unknown_name_or_none_is_no_error_and_ends_nothing(engine):
    running = engine.start().wait(1)
    for body in ({"rid": "nobody"}, {}, {"rid": ""}, {"abort_all": False}):
        reply = engine.post("/abort_request", **body)
        assert (reply.status_code, reply.content) == (200, b"")
    running.wait(running.tokens + 16)


def test_a_request_of_a_batch_can_be_aborted_by_its_name(engine):
    params = {"max_new_tokens": 1500, "ignore_eos": True}
    future = engine.pool.submit(engine.post, "/generate", input_ids=[[68], [69]], rid=["first", "second"], sampling_params=params)
    wait_until(lambda: load(engine.http, "num_running_reqs") == 2)
    engine.post("/abort_request", rid="second")
    wait_until(lambda: load(engine.http, "num_running_reqs") == 1)
    engine.post("/abort_request", rid="first")
    assert [part["meta_info"]["finish_reason"]["type"] for part in future.result().json()] == ["abort", "abort"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_takes_its_request_along(engine, stream):
    """By a bare socket: closed, and not returned to a pool."""
    body = engine.http.build_request("POST", "/generate", json=generate_body(new=2000, rid="left", stream=stream))
    head = f"POST /generate HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\nContent-Length: {len(body.content)}\r\n\r\n"
    with socket.create_connection((engine.http.base_url.host, engine.http.base_url.port)) as connection:
        connection.sendall(head.encode() + body.content)
        wait_until(lambda: load(engine.http, "num_running_reqs") == 1)
    left = time.monotonic()
    wait_until(lambda: load(engine.http, "num_running_reqs") == 0, GONE_S)
    assert time.monotonic() - left < GONE_S
    # SGLang holds the name a moment longer than the request
    wait_until(lambda: engine.post("/generate", **generate_body(new=1, rid="left")).status_code == 200, GONE_S)
