"""What `POST /generate` accepts, and the shape of what it answers."""

from __future__ import annotations

import pytest
from engine_calls import PROMPT, generate_body

pytestmark = pytest.mark.slow

META = {
    "id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "reasoning_tokens", "completion_tokens", "cached_tokens",
    "weight_versions", "cached_tokens_details", "dp_rank", "e2e_latency", "response_sent_to_client_ts",
}  # fmt: skip
LOGPROBS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}
WORDS = "who is the king"


def test_a_reply_has_the_fields_of_sglang(engine):
    reply = engine.generate(new=3, rid="fields")
    meta = reply["meta_info"]
    assert list(reply) == ["text", "output_ids", "meta_info"]
    assert set(meta) == META | LOGPROBS
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == ("fields", 4, 3, "0")
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in reply["output_ids"]]
    assert (meta["input_token_logprobs"], meta["output_token_logprobs_length"]) == ([], 3)
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert (meta["num_retractions"], meta["reasoning_tokens"], meta["dp_rank"]) == (0, 0, None)
    assert 0 < meta["e2e_latency"] < 60


def test_log_probs_come_where_they_are_asked_for(engine):
    assert set(engine.generate(new=1, return_logprob=False)["meta_info"]) == META
    [entry] = engine.generate([97, *PROMPT], new=1, return_text_in_logprobs=True)["meta_info"]["output_token_logprobs"]
    assert isinstance(entry[2], str)


def test_without_a_name_a_request_gets_one(engine):
    names = [engine.generate(new=1)["meta_info"]["id"] for _ in range(2)]
    assert len(set(names)) == 2
    assert all(len(name) == 32 for name in names)


def test_text_is_the_same_as_its_ids(engine):
    reply = engine.post("/generate", text=WORDS, sampling_params={"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}).json()
    ids = [90, 75, 82, 282, 285, 224, 277]  # w h o _is _the _ king
    assert reply["meta_info"]["prompt_tokens"] == len(ids)
    assert reply["output_ids"] == engine.generate(ids, new=12, temperature=0)["output_ids"]


def test_text_or_ids_must_be_there_and_not_empty(engine):
    neither = engine.post("/generate", sampling_params={"max_new_tokens": 1})
    assert (neither.status_code, neither.json()) == (400, {"error": {"message": "Either text, input_ids or input_embeds should be provided."}})
    empty = engine.post("/generate", input_ids=[])
    assert (empty.status_code, empty.json()) == (400, {"error": {"message": "input_ids cannot be empty."}})


def test_text_and_ids_together(engine):
    reply = engine.post("/generate", text=WORDS, **generate_body(new=1))
    if engine.differs("text and input_ids in one request") == "refused":
        assert reply.status_code == 400
    else:
        assert reply.json()["meta_info"]["prompt_tokens"] == len(PROMPT)


def test_a_batch_is_answered_by_a_list_in_its_order(engine):
    params = {"max_new_tokens": 2, "ignore_eos": True}
    reply = engine.post("/generate", input_ids=[[68, 69], [70]], rid=["a", "b"], sampling_params=params).json()
    assert [(part["meta_info"]["id"], part["meta_info"]["prompt_tokens"]) for part in reply] == [("a", 2), ("b", 1)]
    assert "output_token_logprobs" not in reply[0]["meta_info"]
    assert [part["meta_info"]["prompt_tokens"] for part in engine.post("/generate", text=["a", WORDS], sampling_params=params).json()] == [1, 7]
    assert isinstance(engine.post("/generate", input_ids=[[68]], sampling_params=params).json(), list)


def test_a_batch_with_one_name_numbers_it(engine):
    reply = engine.post("/generate", input_ids=[[68], [69], [70]], rid="a", sampling_params={"max_new_tokens": 1}).json()
    assert [part["meta_info"]["id"] for part in reply] == ["a_0", "a_1", "a_2"]


def test_each_prompt_of_a_batch_may_have_its_own_parameters(engine):
    params = [{"max_new_tokens": new, "ignore_eos": True} for new in (1, 3)]
    reply = engine.post("/generate", input_ids=[[68], [69]], sampling_params=params).json()
    assert [len(part["output_ids"]) for part in reply] == [1, 3]


@pytest.mark.parametrize(
    ("rid", "message"),
    [
        (["a", "a"], "Duplicate request IDs detected within the request: ['a']"),
        (["a"], "The specified rids length mismatch with the batch_size for batch processing."),
    ],
)
def test_the_names_of_a_batch_are_as_many_as_its_prompts_and_differ(engine, rid, message):
    reply = engine.post("/generate", input_ids=[[68], [69]], rid=rid, sampling_params={"max_new_tokens": 1})
    assert (reply.status_code, reply.json()) == (400, {"error": {"message": message}})


def test_a_name_in_flight_is_refused_alone_and_in_a_batch_and_free_afterwards(engine):
    running = engine.start(rid="taken").wait(1)
    expected = (400, {"error": {"message": "Duplicate request ID detected: taken"}})
    again = engine.post("/generate", **generate_body(rid="taken"))
    assert (again.status_code, again.json()) == expected
    batch = engine.post("/generate", input_ids=[[68], [69]], rid=["other", "taken"], sampling_params={"max_new_tokens": 1})
    assert (batch.status_code, batch.json()) == expected
    assert engine.generate(rid="other")["meta_info"]["id"] == "other"  # nothing of the refused batch is left
    engine.post("/abort_request", rid="taken")
    assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.generate(rid="taken")["meta_info"]["id"] == "taken"


def test_unknown_keys_are_ignored_in_the_body_and_refused_among_the_sampling_parameters(engine):
    assert engine.post("/generate", **generate_body(new=1), no_such_key=1).status_code == 200
    reply = engine.post("/generate", **generate_body(max_tokens=3))
    assert reply.status_code == 400
    assert reply.json()["error"].startswith("unknown field `max_tokens`, expected one of ")
    assert "`max_new_tokens`" in reply.json()["error"]


def test_custom_params_are_taken_whatever_is_in_them(engine):
    assert engine.generate(new=2, custom_params={"position": 2, "of_somebody_else": "x"})["meta_info"]["completion_tokens"] == 2


def test_temperature_0_takes_the_likeliest_token_every_time(engine):
    first, second = (engine.generate(new=16, temperature=0)["output_ids"] for _ in range(2))
    assert first == second


def test_a_sampling_seed(engine):
    first, second = (engine.generate(new=16, sampling_seed=7)["output_ids"] for _ in range(2))
    assert (first == second) is (engine.differs("sampling_seed") == "gives the same tokens again")


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"frequency_penalty": 0.5}, {"regex": "a+"}, {"n": 2}], ids=str)
def test_sampling_other_than_from_the_models_own_distribution(engine, params):
    reply = engine.post("/generate", **generate_body(new=2, **params))
    if engine.differs("top_p, top_k, min_p, penalties, n, grammars") == "served":
        assert reply.status_code == 200
    else:
        assert reply.status_code == 400
        assert "is not supported by the embedded engine" in reply.json()["error"]["message"]


@pytest.mark.parametrize("params", [{"top_p": 1.0}, {"top_k": -1}, {"min_p": 0.0}, {"repetition_penalty": 1.0}, {"n": 1}], ids=str)
def test_neutral_values_of_other_sampling_parameters_are_accepted(engine, params):
    assert engine.generate(new=1, **params)["meta_info"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("a token id outside the vocabulary", [68, 320]),
        ("a token id outside the vocabulary", [-1]),
        ("an empty prompt in a batch", [[68], []]),
    ],
)
def test_what_would_end_a_server(engine, name, ids):
    if engine.differs(name) == "ends the server":
        pytest.skip("it ends the server")
    reply = engine.post("/generate", input_ids=ids)
    assert reply.status_code == 400
    assert engine.get("/health").status_code == 200
