"""What a request may say."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.request import Limits, RequestRefused, parse_generate

LIMITS = Limits(vocabulary=100, context_tokens=50, eos_ids=frozenset({1}))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SAMPLING_FIELDS = ["max_new_tokens", "temperature", "stop_token_ids", "sampling_seed", "custom_params", "ignore_eos", "top_p", "n", "stop"]
FIELDS = ["input_ids", "text", "rid", "sampling_params", "return_logprob", "logprob_start_len", "extra_key", "stream"]


def parse(**body):
    [request], _ = parse_generate({"input_ids": [5], **body}, LIMITS, None)
    return request


@settings(max_examples=20)
@given(st.one_of(JSON, st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON))))
def test_any_json_is_served_or_refused(body):
    with suppress(RequestRefused):
        requests, _ = parse_generate(body, LIMITS, None)
        assert all(0 <= token < 100 for request in requests for token in request.input_ids)


@settings(max_examples=20)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(SAMPLING_FIELDS, JSON)))
def test_any_sampling_parameters_are_served_or_refused(sampling):
    with suppress(RequestRefused):
        params = parse(sampling_params=sampling).params
        assert params.temperature >= 0
        assert 0 <= params.seed < 2**64
        assert 0 <= params.position + params.max_new_tokens < 2**63


def test_what_is_not_said_has_the_defaults_of_sglang_except_that_the_context_bounds_it():
    with pytest.raises(
        RequestRefused, match="You requested a total of 129 tokens: 1 tokens from the input messages and 128 tokens for the completion"
    ):
        parse()
    params = parse(sampling_params={"max_new_tokens": 49}).params
    assert (params.temperature, params.stop_ids, params.no_stop_trim, params.skip_special_tokens) == (1.0, {1}, False, True)


def test_end_tokens_of_the_model_stop_like_other_stop_tokens_and_ignore_eos_ignores_both():
    sampling = {"max_new_tokens": 4, "stop_token_ids": [7]}
    assert parse(sampling_params=sampling).params.stop_ids == {1, 7}
    assert parse(sampling_params=sampling | {"ignore_eos": True}).params.stop_ids == frozenset()


def test_a_tiny_temperature_is_greedy():
    assert parse(sampling_params={"max_new_tokens": 4, "temperature": 1e-30}).params.temperature == 0.0


def test_values_that_mean_off_are_accepted():
    off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "n": 1, "repetition_penalty": 1.0, "regex": None}
    assert parse(sampling_params={"max_new_tokens": 4} | off).params.max_new_tokens == 4


def test_a_batch_with_one_name_numbers_it():
    requests, batched = parse_generate({"input_ids": [[1], [2]], "rid": "a", "sampling_params": {"max_new_tokens": 4}}, LIMITS, None)
    assert ([request.rid for request in requests], batched) == (["a_0", "a_1"], True)
    with pytest.raises(RequestRefused, match="rids length mismatch with the batch_size"):
        parse_generate({"input_ids": [[1], [2]], "rid": ["a"]}, LIMITS, None)
    with pytest.raises(RequestRefused, match=r"Duplicate request IDs detected within the request: \['a'\]"):
        parse_generate({"input_ids": [[1], [2]], "rid": ["a", "a"]}, LIMITS, None)


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(RequestRefused, match=r"no tokenizer\.json"):
        parse(sampling_params={"max_new_tokens": 4, "stop": ["x"]})
