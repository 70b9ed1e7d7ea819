"""Turns at an engine: sampled, broken off, gone on with, sent elsewhere, given up."""

import numpy as np
import pytest
import trio
import trio.testing

from agentrl.buffer_api import EngineEntry
from agentrl.engine_api import EngineClient
from agentrl.env import Observation
from agentrl.errors import EngineError, EngineRefused, EngineUnavailable
from agentrl.rollout.completion import first_stop
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.fleet import Fleet
from agentrl.seeds import turn_seed
from agentrl.testing.engine import FakeEngine, turns
from agentrl.testing.tokenizer import byte_encoder, word_encoder

ENCODER = word_encoder(["one", "two", "three", "four", "five"])
PROMPT = np.array([3, 4, 5], dtype=np.int32)
STOPS = ("</search>", "</answer>")
SAID = "one two three <answer> four </answer>"


def fake(*texts, encoder=ENCODER, **options):
    return FakeEngine(turns(encoder, *(texts or (SAID,))), encoder=encoder, **options)


def clients(*engines):
    return [engine.client(index) for index, engine in enumerate(engines)]


def complete(engines, *, encoder=ENCODER, beside=None, budget=100, seed=7, deadline_s=120.0, stops=STOPS, turns_played=1):
    """The completions of an episode at `engines`, `beside` running along; the clock jumps."""

    async def main():
        done = []
        async with trio.open_nursery() as nursery:
            if beside is not None:
                nursery.start_soon(beside)
            with Fleet(clients(*engines)).seat() as seat:
                policy = EnginePolicy(seat, name="train/0/0/0", seed=seed, temperature=0.7, decode=encoder.decode, deadline_s=deadline_s)
                for _ in range(turns_played):
                    done.append(await policy.complete(PROMPT, stop_strings=stops, budget=budget))
            nursery.cancel_scope.cancel()
        return done

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def logprobs(count):
    return pytest.approx([-0.01 * (position + 1) for position in range(count)])


def test_a_turn_is_asked_for_by_ids_with_its_own_seed_and_comes_back_whole():
    engine = fake("one <search> two </search>", "three")
    first, second = complete([engine], turns_played=2, budget=50)
    assert (ENCODER.decode(first.token_ids), first.text, first.stop) == ("one <search> two </search>",) * 2 + ("</search>",)
    assert (second.text, second.stop, second.engine) == ("three", "eos", "http://engine-0")
    assert first.logprobs.tolist() == logprobs(4)
    assert first.versions.tolist() == [0, 0, 0, 0]
    assert engine.requests[0] == {
        "rid": "train/0/0/0/0/0",
        "input_ids": [3, 4, 5],
        "sampling_params": {
            "max_new_tokens": 50,
            "temperature": 0.7,
            "stop": list(STOPS),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "custom_params": {"position": 0},
            "sampling_seed": turn_seed(7, 0),
        },
        "return_logprob": True,
        "stream": False,
    }
    assert engine.requests[1]["sampling_params"]["sampling_seed"] == turn_seed(7, 1)
    assert len({request["rid"] for request in engine.requests}) == 2


def test_weights_that_change_in_mid_turn_show_in_the_versions_of_its_tokens():
    engine = fake(token_s=1.0, version=3)

    async def publish():
        await trio.sleep(2.5)
        control = engine.client()
        await control.pause("retract")
        await trio.sleep(30)
        await control.begin_update()
        await control.update_from_disk("weights", version=4)
        await control.end_update()
        await control.continue_()

    [completion] = complete([engine], beside=publish)
    assert completion.versions.tolist() == [3, 3, 4, 4, 4, 4]
    assert len(engine.requests) == 1


def test_an_aborted_turn_goes_on_where_it_broke_off_under_a_new_id_and_the_position_of_its_next_token():
    engine = fake()
    engine.break_off(2, 0, 3)
    [completion] = complete([engine], budget=6)
    assert completion.text == SAID
    assert completion.logprobs.tolist() == logprobs(6)
    asked = [(request["rid"], len(request["input_ids"]), request["sampling_params"]) for request in engine.requests]
    assert [rid for rid, _, _ in asked] == [f"train/0/0/0/0/{n}" for n in range(4)]
    assert [length for _, length, _ in asked] == [3, 5, 5, 8]
    assert [sampling["custom_params"]["position"] for _, _, sampling in asked] == [0, 2, 2, 5]
    assert [sampling["max_new_tokens"] for _, _, sampling in asked] == [6, 4, 4, 1]
    assert {sampling["sampling_seed"] for _, _, sampling in asked} == {turn_seed(7, 0)}


def test_an_engine_that_dies_hands_its_turn_to_another_from_the_last_token_that_came():
    first, second = fake(version=1), fake(version=2)
    first.break_off(2)

    async def die():
        await trio.sleep(0.05)  # between its partial answer and the next request
        first.dead = True

    [completion] = complete([first, second], beside=die)
    assert (completion.text, completion.engine) == (SAID, "http://engine-1")
    assert completion.versions.tolist() == [1, 1, 2, 2, 2, 2]
    assert completion.logprobs.tolist() == logprobs(6)
    assert second.requests[0]["sampling_params"]["custom_params"] == {"position": 2}


def test_a_turn_whose_only_engine_comes_back_in_time_is_not_lost():
    engine = fake()
    engine.dead = True

    async def restart():
        await trio.sleep(40)
        engine.dead = False

    [completion] = complete([engine], beside=restart)
    assert completion.text == SAID


def test_a_connection_that_breaks_in_mid_answer_is_asked_again_from_the_turns_prompt():
    engine = fake()
    engine.fail("disconnect")
    [completion] = complete([engine])
    assert completion.text == SAID
    assert [request["sampling_params"]["custom_params"]["position"] for request in engine.requests] == [0, 0]
    assert engine.aborted == ["train/0/0/0/0/0"]


def test_engines_that_stay_dead_fail_the_turn_after_its_deadline():
    engine = fake()
    engine.dead = True

    async def main():
        with Fleet(clients(engine)).seat() as seat:
            policy = EnginePolicy(seat, name="n", seed=0, temperature=1.0, decode=ENCODER.decode, deadline_s=20.0)
            with pytest.raises(EngineUnavailable):
                await policy.complete(PROMPT, stop_strings=(), budget=5)
        return trio.current_time()

    assert 20.0 <= trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0)) <= 25.0 + 1.0


def test_a_frozen_engine_is_left_after_the_deadline_of_a_request():
    frozen, healthy = fake(), fake()
    frozen.frozen = True
    [completion] = complete([frozen, healthy], deadline_s=10.0)
    assert (completion.text, completion.engine) == (SAID, "http://engine-1")


def test_a_refusal_is_never_tried_again():
    engine = fake()
    engine.fail("refuse")
    with pytest.raises(ExceptionGroup) as raised:
        complete([engine])
    assert raised.group_contains(EngineRefused, match="refused as told")
    assert len(engine.requests) == 1


def test_a_stop_string_across_the_seam_of_two_replies_is_found_and_what_was_written_after_it_dropped():
    encoder = byte_encoder(chat=False)  # every byte a token
    engine = fake("ab</answer>xyz</search>", encoder=encoder)
    engine.break_off(6)  # "ab</an": no engine sees "</answer>" whole
    [completion] = complete([engine], encoder=encoder)
    assert (completion.text, completion.stop) == ("ab</answer>", "</answer>")
    assert encoder.decode(completion.token_ids) == "ab</answer>"
    assert completion.logprobs.tolist() == logprobs(11)
    assert len(completion.versions) == 11


def test_the_token_that_completes_a_stop_string_across_the_seam_is_kept_whole():
    encoder = byte_encoder(["></answer>."] * 9, vocab_size=300, chat=False)
    ids = encoder.encode_start(Observation.frame("a</answer>.b")).ids.tolist()
    engine = FakeEngine(lambda body: ids, encoder=encoder)
    engine.break_off(2)
    [completion] = complete([engine], encoder=encoder)
    assert completion.text == "a</answer>"
    assert encoder.decode(completion.token_ids) == "a</answer>."


def test_a_turn_that_uses_its_budget_ends_by_length_also_when_it_was_broken_off():
    engine = fake("one two three four five")
    engine.break_off(1)
    [completion] = complete([engine], budget=3)
    assert (completion.text, completion.stop) == ("one two three", "length")
    engine = fake("one two three four five")
    engine.break_off(3)
    [completion] = complete([engine], budget=3)
    assert (completion.stop, len(engine.requests)) == ("length", 1)


def test_an_answer_that_contradicts_itself_is_an_engine_error():
    engine = fake()
    engine.fail("garbage")
    with pytest.raises(ExceptionGroup) as raised:
        complete([engine])
    assert raised.group_contains(EngineError, match="7 tokens with 6 log-probs")


def test_a_cancelled_turn_tells_its_engine():
    engine = fake(token_s=1.0)

    async def main():
        with trio.move_on_after(2.5), Fleet(clients(engine)).seat() as seat:
            policy = EnginePolicy(seat, name="n", seed=0, temperature=1.0, decode=ENCODER.decode, deadline_s=20.0)
            await policy.complete(PROMPT, stop_strings=STOPS, budget=10)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert (engine.aborted, engine.running) == (["n/0/0"], 0)


def test_new_episodes_go_to_the_engine_with_the_fewest_and_stay():
    fleet = Fleet(clients(fake(), fake(), fake()), first=1)

    async def main():
        with fleet.seat() as a, fleet.seat() as b, fleet.seat() as c:
            assert [seat.engine.index for seat in (a, b, c)] == [1, 2, 0]
            with fleet.seat() as d:
                assert d.engine.index == 1
            b.move()
            assert (b.engine.index, fleet.episodes) == (1, (1, 2, 0))
            with fleet.seat() as e:  # the engine that failed is avoided though it is empty
                assert e.engine.index == 0
            await trio.sleep(6)
            with fleet.seat() as f:
                assert f.engine.index == 2
        assert fleet.episodes == (0, 0, 0)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_stop_string_that_is_complete_first_wins():
    assert first_stop("a</search>b</answer>", ("</answer>", "</search>")) == ("</search>", "a</search>")
    assert first_stop("a###", ("###", "#")) == ("#", "a#")
    assert first_stop("a", ("b",)) is None
    assert first_stop("a", ()) is None


def test_token_ids_beyond_the_vocabulary_never_reach_an_engine():
    engine = fake()

    async def main():
        client = EngineClient("http://e", 0, vocab_size=5, transport=engine)
        with Fleet([client]).seat() as seat:
            policy = EnginePolicy(seat, name="n", seed=0, temperature=1.0, decode=ENCODER.decode, deadline_s=20.0)
            await policy.complete(PROMPT, stop_strings=(), budget=5)

    with pytest.raises(EngineRefused, match=r"\[0, 5\), got 3 to 5"):
        trio.run(main)
    assert engine.requests == []


def test_an_episode_that_is_kept_apart_asks_under_the_version_it_began_with_also_after_an_update():
    engine = fake("one <search> two </search>", "three")

    def entry(version):
        return EngineEntry(index=0, incarnation=1, url="http://engine-0", version=version, current=True)

    async def main():
        fleet = Fleet(connect=lambda url, index: engine.client(index))
        fleet.update([entry(4)])
        with fleet.seat() as seat:
            policy = EnginePolicy(seat, name="train/0/0/0", seed=7, temperature=0.7, decode=ENCODER.decode, deadline_s=120.0, apart=True)
            await policy.complete(PROMPT, stop_strings=STOPS, budget=50)
            fleet.update([entry(5)])
            await policy.complete(PROMPT, stop_strings=STOPS, budget=50)

    trio.run(main)
    assert [request["extra_key"] for request in engine.requests] == ["began-4", "began-4"]
