"""What ends a completion before its budget, and what of it is in the text. Greedy: known tokens, the same at every engine."""

from __future__ import annotations

import pytest
from engine_calls import generate_body

pytestmark = pytest.mark.slow

PROMPT = [72, 80, 41, 90]
TOKENS = [9, 9, 281, 93, 177, 281, 275, 45]  # "&" "&" " i" "z" (half a character) " i" "ki" "J"
OTHER = [76, 80, 41, 90]  # e m F w
OTHER_TOKENS = [52, 95, 95, 95, 95, 95, 95, 186, 24, 41]  # "Q" six times "|", half a character, "5" "F"


def complete(engine, prompt=PROMPT, *, new=12, **params):
    return engine.generate(prompt, new=new, temperature=0, **params)


def test_undisturbed_it_goes_on(engine):
    assert complete(engine)["output_ids"][:8] == TOKENS
    assert complete(engine, OTHER)["output_ids"][:10] == OTHER_TOKENS


@pytest.mark.parametrize("stop", ["iz", ["iz"], ["never", "iz"], "& iz", "&& iz"], ids=str)
def test_a_stop_string_may_be_spelled_by_several_tokens(engine, stop):
    reply = complete(engine, stop=stop)
    matched = stop if isinstance(stop, str) else stop[-1]
    assert reply["output_ids"] == TOKENS[:4]  # never trimmed
    assert len(reply["meta_info"]["output_token_logprobs"]) == 4
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
    assert reply["text"] == "&& iz".removesuffix(matched)


def test_no_stop_trim_leaves_the_stop_string_in_the_text(engine):
    assert complete(engine, stop="iz", no_stop_trim=True)["text"] == "&& iz"


def test_a_stop_string_may_end_inside_a_token(engine):
    reply = complete(engine, stop="k")
    assert reply["output_ids"] == TOKENS[:7]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "k"}
    assert reply["text"].endswith(" i")
    assert complete(engine, stop="k", no_stop_trim=True)["output_ids"] == TOKENS[:7]


@pytest.mark.parametrize("stops", [["z", "iz"], ["iz", "z"]], ids=str)
def test_of_two_stop_strings_that_one_token_completes_the_first_is_told(engine, stops):
    assert complete(engine, stop=stops)["meta_info"]["finish_reason"] == {"type": "stop", "matched": stops[0]}


def test_of_two_stop_strings_the_one_that_comes_first_ends_it(engine):
    reply = complete(engine, stop=["J", "z"])
    assert (reply["output_ids"], reply["meta_info"]["finish_reason"]["matched"]) == (TOKENS[:4], "z")


def test_a_stop_string_in_the_prompt_ends_nothing(engine):
    reply = complete(engine, OTHER, stop="F")
    assert (reply["output_ids"], reply["meta_info"]["finish_reason"]) == (OTHER_TOKENS, {"type": "stop", "matched": "F"})


def test_a_stop_string_may_not_begin_in_the_prompt(engine):
    assert complete(engine, OTHER, new=6, stop="wQ")["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


@pytest.mark.parametrize(("trim", "text"), [(False, "&& i"), (True, "&&")], ids=["untrimmed", "trimmed"])
def test_a_stop_token_ends_it_and_is_told_by_its_id(engine, trim, text):
    reply = complete(engine, stop_token_ids=[281, 45], no_stop_trim=not trim, ignore_eos=False)
    assert reply["output_ids"] == TOKENS[:3]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 281}
    assert reply["text"] == text


def test_ignore_eos_ignores_stop_tokens_too(engine):
    assert len(complete(engine, stop_token_ids=[281, 45])["output_ids"]) == 12


@pytest.mark.parametrize(("stop", "matched"), [({"stop": "iz"}, "iz"), ({"stop_token_ids": [93]}, 93)], ids=["string", "token"])
def test_of_budget_and_stop_the_stop_is_told(engine, stop, matched):
    reply = complete(engine, new=4, ignore_eos=False, **stop)
    assert (reply["output_ids"], reply["meta_info"]["finish_reason"]) == (TOKENS[:4], {"type": "stop", "matched": matched})


def test_of_stop_token_and_stop_string_the_string_is_told(engine):
    reply = complete(engine, stop="z", stop_token_ids=[93], ignore_eos=False)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "z"}


def test_stop_strings_are_at_most_32(engine):
    assert complete(engine, stop=[f"never{n}" for n in range(31)] + ["z"])["output_ids"] == TOKENS[:4]
    reply = engine.post("/generate", **generate_body(stop=["x"] * 33))
    assert (reply.status_code, reply.json()) == (400, {"error": {"message": "at most 32 stop strings are allowed, got 33"}})


def test_an_empty_stop_string(engine):
    reply = engine.post("/generate", **generate_body(stop=""))
    if engine.differs("an empty stop string") == "refused":
        assert reply.status_code == 400
    else:
        assert len(reply.json()["output_ids"]) == 1


def test_concurrent_requests_stop_each_for_itself(engine):
    stops = ["z", "J", "never", "k", "& i"]
    params = [{"max_new_tokens": 8, "temperature": 0, "ignore_eos": True, "stop": stop} for stop in stops]
    replies = engine.post("/generate", input_ids=[PROMPT] * len(stops), sampling_params=params).json()
    assert [len(reply["output_ids"]) for reply in replies] == [4, 8, 8, 7, 3]
