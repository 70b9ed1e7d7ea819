"""Server-sent events: cumulative chunks, their end, and errors inside of them."""

from __future__ import annotations

import itertools
import json

import pytest
from engine_calls import generate_body

pytestmark = pytest.mark.slow


def events(engine, **body):
    """Status, content type and data of a whole stream. SGLang breaks the connection of a refused one seconds later: it must not be used again."""
    with engine.http.stream("POST", "/generate", json={**body, "stream": True}, headers={"connection": "close"}) as reply:
        text = reply.read().decode()
    return reply.status_code, reply.headers["content-type"], [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def chunks(engine, **fields):
    """The chunks of a stream that must be one."""
    status, kind, data = events(engine, **generate_body(**fields))
    assert (status, kind, data[-1]) == (200, "text/event-stream; charset=utf-8", "[DONE]")
    return [json.loads(each) for each in data[:-1]]


def test_chunks_are_cumulative_and_the_last_is_the_reply(engine):
    told = chunks(engine, new=12, rid="streamed", temperature=0, ids=[72, 80, 41, 90])
    last = told[-1]
    for earlier, later in itertools.pairwise(told):
        have = len(earlier["output_ids"])
        assert 0 < have < len(later["output_ids"])
        assert later["output_ids"][:have] == earlier["output_ids"]
        assert later["meta_info"]["output_token_logprobs"][:have] == earlier["meta_info"]["output_token_logprobs"]
        assert last["text"].startswith(earlier["text"])
    whole = engine.generate([72, 80, 41, 90], new=12, temperature=0)
    assert (last["output_ids"], last["text"]) == (whole["output_ids"], whole["text"])
    assert set(whole["meta_info"]) - set(last["meta_info"]) <= {"response_sent_to_client_ts"}
    assert last["meta_info"]["id"] == "streamed"


def test_only_the_last_chunk_tells_the_end_and_the_versions(engine):
    *before, last = chunks(engine, new=6)
    assert before
    for chunk in before:
        assert chunk["meta_info"]["finish_reason"] is None
        assert not {"weight_versions", "e2e_latency"} & set(chunk["meta_info"])
        assert chunk["meta_info"]["completion_tokens"] == chunk["meta_info"]["output_token_logprobs_length"] == len(chunk["output_ids"])
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert last["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]


def test_the_interval_between_chunks_can_be_chosen(engine):
    counts = [len(chunk["output_ids"]) for chunk in chunks(engine, new=30, stream_interval=10)]
    assert (counts[0] <= 2, counts[-1]) == (True, 30)
    assert all(later - earlier >= 10 for earlier, later in itertools.pairwise(counts[:-1]))


def test_a_completion_without_tokens_has_one_chunk(engine):
    [only] = chunks(engine, new=0)
    assert (only["output_ids"], only["meta_info"]["finish_reason"]) == ([], {"type": "length", "length": 0})


def test_a_streamed_stop_string_is_trimmed_at_the_end(engine):
    last = chunks(engine, ids=[72, 80, 41, 90], new=12, temperature=0, stop="iz")[-1]
    assert (last["output_ids"], last["text"], last["meta_info"]["finish_reason"]) == ([9, 9, 281, 93], "&& ", {"type": "stop", "matched": "iz"})


def test_chunks_of_a_batch_say_whose_they_are(engine):
    status, _, data = events(engine, input_ids=[[68], [69, 70]], sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    told = [json.loads(each) for each in data[:-1]]
    assert (status, data[-1]) == (200, "[DONE]")
    for index, prompt_tokens in enumerate((1, 2)):
        own = [chunk for chunk in told if chunk["index"] == index]
        assert [chunk["meta_info"]["finish_reason"] for chunk in own][-1] == {"type": "length", "length": 3}
        assert {chunk["meta_info"]["prompt_tokens"] for chunk in own} == {prompt_tokens}


def test_an_abort_ends_a_stream_with_what_it_has(engine):
    running = engine.start(rid="cut").wait(8)
    engine.post("/abort_request", rid="cut")
    last = running.result()
    assert last["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert last["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": len(last["output_ids"])}]
    assert len(last["output_ids"]) == len(last["meta_info"]["output_token_logprobs"]) >= 8


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"input_ids": [68] * 2048}, "The input (2048 tokens) is longer than the model's context length (2048 tokens)."),
        ({"input_ids": [68], "sampling_params": {"temperature": -1}}, "temperature must be a non-negative finite number, got -1."),
    ],
    ids=["empty", "long", "temperature"],
)
def test_an_error_of_a_stream_is_told_in_it(engine, body, message):
    status, kind, data = events(engine, **body)
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    assert (status, kind, json.loads(data[0]), data[1:]) == (200, "text/event-stream; charset=utf-8", {"error": error}, ["[DONE]"])


def test_a_name_in_flight_is_refused_in_the_stream(engine):
    engine.start(rid="taken").wait(1)
    status, _, data = events(engine, rid="taken", input_ids=[68])
    assert (status, json.loads(data[0])["error"]["message"]) == (200, "Duplicate request ID detected: taken")


@pytest.mark.parametrize("body", [{"input_ids": [68], "sampling_params": {"max_tokens": 1}}, {"input_ids": "x"}], ids=["unknown key", "no list"])
def test_a_body_of_the_wrong_form_is_refused_before_the_stream(engine, body):
    status, kind, _ = events(engine, **body)
    assert (status, kind) == (400, "application/json")
