"""Log-probs are those of transformers, in float32, to 1e-4."""

from __future__ import annotations

import pytest
import torch
from engine_calls import PROMPT

from agentrl.engine.weights import read_tensors

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def reference(models):
    """Log-probs by transformers of ids[first:], each given everything before it, under one of the models."""
    from transformers import Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded = [Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in models]

    @torch.no_grad()
    def score(ids, first, *, temperature=1.0, model=0):
        logprobs = (loaded[model](torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
        return [logprobs[index - 1, ids[index]].item() for index in range(first, len(ids))]

    score.models = loaded
    return score


def told(reply):
    return [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_a_sampled_tokens_log_prob_is_at_the_temperature_it_was_sampled_with(engine, reference, temperature):
    reply = engine.generate(new=64, temperature=temperature)
    assert told(reply) == pytest.approx(reference(PROMPT + reply["output_ids"], 4, temperature=temperature), abs=TOLERANCE)


def test_a_greedy_tokens_log_prob_is_at_temperature_1_and_the_highest(engine, reference):
    reply = engine.generate(new=48, temperature=0)
    ids = PROMPT + reply["output_ids"]
    assert told(reply) == pytest.approx(reference(ids, 4), abs=TOLERANCE)
    with torch.no_grad():
        logits = reference.models[0](torch.tensor([ids])).logits[0]
    assert reply["output_ids"] == logits.argmax(-1)[3:-1].tolist()


def test_requests_side_by_side_have_the_log_probs_each_would_have_alone(engine, reference):
    prompts = [[68 + n] * (1 + 5 * n) for n in range(7)]
    params = [{"max_new_tokens": 8 + 5 * n, "temperature": 0.7, "ignore_eos": True} for n in range(7)]
    replies = engine.post("/generate", input_ids=prompts, sampling_params=params, return_logprob=True).json()
    for n, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        assert len(reply["output_ids"]) == 8 + 5 * n
        assert told(reply) == pytest.approx(reference(prompt + reply["output_ids"], len(prompt), temperature=0.7), abs=TOLERANCE)


def test_a_turn_that_continues_another_has_the_log_probs_of_a_whole_forward(engine, reference):
    first = engine.generate([70, 71, 72], new=20, extra_key="turns")
    ids = [70, 71, 72, *first["output_ids"], 73, 74]
    second = engine.generate(ids, new=20, extra_key="turns", temperature=0.7)
    assert second["meta_info"]["cached_tokens"] >= 22
    assert told(second) == pytest.approx(reference(ids + second["output_ids"], len(ids), temperature=0.7), abs=TOLERANCE)


def test_a_prompt_is_scored_at_temperature_1_with_or_without_a_completion(engine, reference):
    ids = [68 + n % 50 for n in range(60)]
    for new in (0, 5):
        reply = engine.generate(ids, new=new, temperature=0.7, logprob_start_len=0)
        entries = reply["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == ids
        assert entries[0] == [None, ids[0], None]
        assert [entry[0] for entry in entries[1:]] == pytest.approx(reference(ids, 1), abs=TOLERANCE)
        assert (len(reply["output_ids"]), reply["meta_info"]["cached_tokens"]) == (new, 0)  # the prefix is computed again: all of it is wanted


def test_scores_may_begin_in_the_prompt_and_the_first_of_them_is_null(engine, reference):
    ids = [68 + n for n in range(12)]
    entries = engine.generate(ids, new=1, logprob_start_len=5)["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == ids[5:]
    assert entries[0][0] is None
    assert [entry[0] for entry in entries[1:]] == pytest.approx(reference(ids, 6), abs=TOLERANCE)


def test_after_an_update_log_probs_are_those_of_the_new_weights(engine, reference):
    assert engine.from_disk(1, "1").status_code == 200
    reply = engine.generate(new=32, temperature=0.7)
    ids = PROMPT + reply["output_ids"]
    assert told(reply) == pytest.approx(reference(ids, 4, temperature=0.7, model=1), abs=TOLERANCE)
    assert max(abs(a - b) for a, b in zip(told(reply), reference(ids, 4, temperature=0.7), strict=True)) > 0.1


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "per tensor"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_on_both_sides_of_an_update_in_mid_request_log_probs_are_those_of_the_version(engine, fresh_group, reference, mode, flat):
    running = [engine.start([*PROMPT, n], temperature=0.7).wait(12) for n in range(2)]
    engine.post("/pause_generation", mode=mode)
    engine.post("/begin_weight_update")
    reply = fresh_group.send(read_tensors(engine.models[1]), flat=flat, weight_version="1", flush_cache=mode == "retract")
    assert reply.status_code == 200, reply.text
    assert engine.post("/end_weight_update").status_code == 200
    engine.post("/continue_generation")
    for request in running:
        request.wait(request.tokens + 24)
    engine.post("/abort_request", abort_all=True)
    for n, request in enumerate(running):
        result = request.result()
        before, after = result["meta_info"]["weight_versions"]
        assert (before["version"], before["start"], after["version"], after["end"]) == ("0", 0, "1", len(result["output_ids"]))
        seam = before["end"]
        ids = [*PROMPT, n, *result["output_ids"]]
        assert told(result)[:seam] == pytest.approx(reference(ids, 5, temperature=0.7)[:seam], abs=TOLERANCE)
        new = reference(ids, 5, temperature=0.7, model=1)[seam:]
        if mode == "retract":  # in place, the keys and values before the seam are those of the old weights
            assert told(result)[seam:] == pytest.approx(new, abs=TOLERANCE)
        else:
            assert max(abs(a - b) for a, b in zip(told(result)[seam:], new, strict=True)) > TOLERANCE


def test_weights_sent_in_bfloat16_are_cast(engine, fresh_group, reference):
    sent = {name: tensor.bfloat16() for name, tensor in read_tensors(engine.models[1]).items()}
    engine.post("/begin_weight_update")
    assert fresh_group.send(sent, weight_version="1").status_code == 200
    assert engine.post("/end_weight_update").status_code == 200
    reply = engine.generate(new=16)
    model = reference.models[2]
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        model.load_state_dict({name: tensor.float() for name, tensor in sent.items()} | {"lm_head.weight": sent["model.embed_tokens.weight"].float()})
        assert told(reply) == pytest.approx(reference(PROMPT + reply["output_ids"], 4, model=2), abs=TOLERANCE)
    finally:
        model.load_state_dict(kept)


def test_a_tied_head_follows_the_embedding_and_is_no_tensor_of_its_own(engine, fresh_group, reference):
    tensors = read_tensors(engine.models[1])
    assert "lm_head.weight" not in tensors
    wrong = torch.zeros_like(tensors["model.embed_tokens.weight"])
    engine.post("/begin_weight_update")
    assert fresh_group.send(tensors | {"lm_head.weight": wrong}, weight_version="1").status_code == 200
    assert engine.post("/end_weight_update").status_code == 200
    reply = engine.generate(new=16)
    assert told(reply) == pytest.approx(reference(PROMPT + reply["output_ids"], 4, model=1), abs=TOLERANCE)
