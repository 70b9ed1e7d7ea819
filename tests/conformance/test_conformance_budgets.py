"""How long completions get: budgets and the context."""

from __future__ import annotations

import pytest
from conformance_models import CONTEXT_TOKENS, EOS
from engine_calls import generate_body

pytestmark = pytest.mark.slow

ENDS = [68, 80, 41, 90]  # the sixteenth greedy token is the end token


@pytest.mark.parametrize("new", [0, 1, 5])
def test_a_completion_has_the_tokens_it_may_have(engine, new):
    reply = engine.generate(new=new)
    assert len(reply["output_ids"]) == len(reply["meta_info"]["output_token_logprobs"]) == new
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": new}
    assert reply["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": new}]


def test_the_budget_is_128_where_none_is_said(engine):
    reply = engine.post("/generate", input_ids=[68], sampling_params={"ignore_eos": True}).json()
    assert len(reply["output_ids"]) == 128


def test_a_prompt_as_long_as_the_context_is_refused(engine):
    reply = engine.post("/generate", input_ids=[68] * CONTEXT_TOKENS)
    message = f"The input ({CONTEXT_TOKENS} tokens) is longer than the model's context length ({CONTEXT_TOKENS} tokens)."
    assert (reply.status_code, reply.json()) == (400, {"error": {"message": message}})


def test_prompt_and_completion_must_fit_into_the_context(engine):
    reply = engine.post("/generate", **generate_body([68] * 2000, new=CONTEXT_TOKENS - 1999))
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        f"Requested token count exceeds the model's maximum context length of {CONTEXT_TOKENS} tokens. You requested a total of "
        f"{CONTEXT_TOKENS + 1} tokens: 2000 tokens from the input messages and {CONTEXT_TOKENS - 1999} tokens for the completion. Please reduce the "
        "number of tokens in the input messages or the completion to fit within the limit."
    )


def test_the_end_of_the_context(engine):
    usable = engine.differs("the last tokens of the context") == "usable"
    reply = engine.generate([68] * 2000, new=CONTEXT_TOKENS - 2000)
    assert len(reply["output_ids"]) == CONTEXT_TOKENS - 2000 - (0 if usable else 2)
    longest = engine.post("/generate", **generate_body([68] * (CONTEXT_TOKENS - 6), new=1))
    assert longest.status_code == (200 if usable else 400)


def test_the_end_token_ends_a_completion_unless_ignored(engine):
    ignored = engine.generate(ENDS, new=20, temperature=0)
    assert (len(ignored["output_ids"]), ignored["output_ids"].index(EOS)) == (20, 15)
    ended = engine.generate(ENDS, new=20, temperature=0, ignore_eos=False)
    assert ended["output_ids"] == ignored["output_ids"][:16]  # the end token is one of them
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


def test_of_budget_and_end_token_the_end_token_is_told(engine):
    reply = engine.generate(ENDS, new=16, temperature=0, ignore_eos=False)
    assert reply["output_ids"][-1] == EOS
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


@pytest.mark.parametrize("new", [-1, "8", 1.5])
def test_a_budget_that_is_none_is_refused(engine, new):
    assert engine.post("/generate", **generate_body(new=new)).status_code == 400
