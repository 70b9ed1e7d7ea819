"""Every shape in which a request is refused, and that the server lives on."""

from __future__ import annotations

import pytest
from engine_calls import generate_body

pytestmark = pytest.mark.slow

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"new": -1}, "max_new_tokens must be at least 0, got -1."),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_an_error_with_a_message(engine, fields, message):
    reply = engine.post("/generate", **generate_body(**fields))
    assert (reply.status_code, reply.json()) == (400, {"error": {"message": message}})


@pytest.mark.parametrize("params", [{"max_new_tokens": "8"}, {"stop": 3}, {"temperature": "hot"}, {"stop_token_ids": ["a"]}], ids=str)
def test_a_sampling_parameter_of_a_wrong_type_is_an_error_that_is_a_string(engine, params):
    reply = engine.post("/generate", input_ids=[68], sampling_params=params)
    assert reply.status_code == 400
    assert reply.json()["error"].startswith("invalid type: ")


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[1]",
        b'"x"',
        b'{"input_ids": "w1"}',
        b'{"input_ids": [1.5]}',
        b'{"text": 3}',
        b'{"input_ids": [68], "sampling_params": [1]}',
        b'{"input_ids": [68], "rid": 3}',
        b'{"input_ids": [68], "return_logprob": "x"}',
        b'{"input_ids": [68], "logprob_start_len": "a"}',
    ],
    ids=str,
)
def test_a_body_of_the_wrong_form_is_an_error_object(engine, content):
    reply = engine.http.post("/generate", content=content, headers=JSON)
    told = reply.json()
    assert (reply.status_code, told["object"], told["type"], told["param"], told["code"]) == (400, "error", "Bad Request", None, 400)
    assert isinstance(told["message"], str)


def test_a_path_that_is_none_and_a_method_that_is_not_its_own(engine):
    missing = engine.get("/get_load")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    method = engine.get("/generate")
    assert (method.status_code, method.json()) == (405, {"detail": "Method Not Allowed"})


@pytest.mark.parametrize("path", ["/abort_request", "/pause_generation", "/continue_generation", "/begin_weight_update"])
def test_a_control_call_without_a_body(engine, path):
    refused = engine.differs("a control call without a body") == "refused"
    assert engine.http.post(path).status_code == (400 if refused else 200)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", {"mode": "gently"}),
        ("/update_weight_version", {"new_version": 3}),
        ("/update_weight_version", {}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"model_path": "x", "weight_version": 3}),
        ("/init_weights_update_group", {"master_address": "127.0.0.1"}),
    ],
    ids=str,
)
def test_a_control_call_of_the_wrong_form_changes_nothing(engine, path, body):
    reply = engine.post(path, **body)
    assert reply.status_code == 400
    if engine.differs("a control call of the wrong form").endswith('{"object": "error", ...}'):
        assert reply.json()["object"] == "error"
    else:
        assert reply.json()["success"] is False
    assert (engine.get("/ready").status_code, engine.version) == (200, "0")


def test_refusals_leave_nothing_behind(engine):
    for _ in range(20):
        engine.post("/generate", **generate_body(rid="again", temperature=-1))
    assert engine.generate(rid="again", new=1)["meta_info"]["completion_tokens"] == 1
