"""Continuous batching changes nothing about what any one request gets."""

import math

import pytest
import torch
from engine_loop import finish, load_runner, load_scheduler, plain_completion, rescored, submit
from tiny_qwen2 import write_tiny_qwen2

from agentrl.engine.scheduler import Scheduler
from agentrl.engine.weights import read_tensors
from agentrl.errors import EngineError

PROMPTS = [[5, 17, 80], [41], [3, 66, 29, 90, 12, 54, 7, 31], [9, 9], [77, 20, 33, 61], [88, 2, 13, 40, 55], [71, 64], [10, 11, 12]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory):
    return write_tiny_qwen2(tmp_path_factory.mktemp("other"), seed=1)


def close(sequence, logprobs):
    return sequence.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_more_requests_than_slots_get_what_a_plain_loop_gives(model_dir):
    scheduler = load_scheduler(model_dir, slots=3)
    sequences = [submit(scheduler, str(n), prompt, new=3 + n, seed=n) for n, prompt in enumerate(PROMPTS)]
    finish(scheduler)
    runner = load_runner(model_dir)
    for n, sequence in enumerate(sequences):
        tokens, logprobs = plain_completion(runner, PROMPTS[n], new=3 + n, seed=n)
        assert sequence.output == tokens
        assert close(sequence, logprobs)
        assert sequence.finish == {"type": "length", "length": 3 + n}
        assert sequence.version_spans() == [{"version": "0", "start": 0, "end": 3 + n}]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_log_probs_are_those_of_the_temperature(model_dir, temperature):
    scheduler = load_scheduler(model_dir)
    sequences = [submit(scheduler, str(n), prompt, seed=n, temperature=temperature) for n, prompt in enumerate(PROMPTS)]
    finish(scheduler)
    runner = load_runner(model_dir)
    assert all(close(sequence, rescored(runner, sequence)) for sequence in sequences)


def test_half_a_completion_resubmitted_with_its_position_goes_on_with_the_same_tokens(model_dir):
    scheduler = load_scheduler(model_dir)
    whole = submit(scheduler, "whole", PROMPTS[0], new=10, seed=5)
    finish(scheduler)
    rest = submit(scheduler, "rest", PROMPTS[0] + whole.output[:4], new=6, seed=5, position=4)
    finish(scheduler)
    assert rest.output == whole.output[4:]


def test_a_turn_that_extends_a_finished_one_continues_in_its_slot(model_dir):
    scheduler = load_scheduler(model_dir, slots=3)
    first = submit(scheduler, "first", PROMPTS[2], new=5, seed=1)
    other = submit(scheduler, "other", PROMPTS[4], new=5, seed=2)
    finish(scheduler)
    turn = submit(scheduler, "turn", [*first.tokens, 30, 31, 32], new=5, seed=3)
    finish(scheduler)
    # 8 prompt tokens and 4 of 5 output tokens: nothing has followed the last, so it was never computed
    assert (turn.cached_tokens, other.cached_tokens) == (12, 0)
    assert turn.output == plain_completion(load_runner(model_dir), [*first.tokens, 30, 31, 32], new=5, seed=3)[0]
    assert scheduler.counters.cached_tokens == 12
    assert scheduler.counters.prefill_tokens == 8 + 4 + 4


def test_a_prefix_is_not_shared_between_extra_keys(model_dir):
    scheduler = load_scheduler(model_dir)
    first = submit(scheduler, "first", PROMPTS[2], extra_key="a")
    finish(scheduler)
    turn = submit(scheduler, "turn", [*first.tokens, 30], extra_key="b")
    finish(scheduler)
    assert turn.cached_tokens == 0


def test_the_oldest_kept_prefix_makes_room_and_continuations_go_before_strangers(model_dir):
    scheduler = load_scheduler(model_dir, slots=2)
    old = submit(scheduler, "old", PROMPTS[0], new=2, seed=0)
    finish(scheduler)
    new = submit(scheduler, "new", PROMPTS[2], new=2, seed=0)
    finish(scheduler)
    stranger = submit(scheduler, "stranger", PROMPTS[4], new=2, seed=0)
    turn = submit(scheduler, "turn", [*new.tokens, 4], new=2, seed=0)
    finish(scheduler)
    assert (stranger.cached_tokens, turn.cached_tokens) == (0, 9)
    again = submit(scheduler, "again", [*old.tokens, 4], new=2, seed=0)
    finish(scheduler)
    assert again.cached_tokens == 0


def test_flushing_forgets_prefixes_and_is_refused_while_requests_run(model_dir):
    scheduler = load_scheduler(model_dir)
    first = submit(scheduler, "first", PROMPTS[2])
    scheduler.step()
    assert not scheduler.flush()
    finish(scheduler)
    assert scheduler.flush()
    turn = submit(scheduler, "turn", [*first.tokens, 4])
    finish(scheduler)
    assert turn.cached_tokens == 0


@pytest.mark.parametrize("pause", [True, False], ids=["paused", "unpaused"])
def test_tokens_on_both_sides_of_an_update_have_the_log_probs_of_their_versions(model_dir, other_dir, pause):
    scheduler = load_scheduler(model_dir)
    kept = submit(scheduler, "kept", PROMPTS[5], new=2, seed=9)
    sequences = [submit(scheduler, str(n), prompt, new=9, seed=n, temperature=0.7) for n, prompt in enumerate(PROMPTS[:3])]
    for _ in range(3):
        scheduler.step()
    if pause:
        scheduler.pause("retract")
        assert not scheduler.busy
    scheduler.commit(read_tensors(other_dir), "1")
    scheduler.resume()
    finish(scheduler)
    before, after = load_runner(model_dir), load_runner(other_dir)
    for sequence in sequences:
        # the first step prefills, which gives a token, and decodes one
        assert sequence.version_spans() == [{"version": "0", "start": 0, "end": 4}, {"version": "1", "start": 4, "end": 9}]
        assert sequence.retractions == 1
        assert close(sequence, rescored(before, sequence)[:4] + rescored(after, sequence)[4:])
        assert max(abs(a - b) for a, b in zip(rescored(before, sequence), rescored(after, sequence), strict=True)) > 0.1
    turn = submit(scheduler, "turn", [*kept.tokens, 4], new=2)
    finish(scheduler)
    assert turn.cached_tokens == 0
    assert close(turn, rescored(after, turn))


def test_a_renamed_version_marks_the_tokens_from_there_on(model_dir):
    scheduler = load_scheduler(model_dir)
    sequence = submit(scheduler, "a", PROMPTS[0], new=6, seed=0)
    scheduler.step()
    scheduler.rename("7")
    finish(scheduler)
    assert sequence.version_spans() == [{"version": "0", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 6}]
    assert sequence.output == plain_completion(load_runner(model_dir), PROMPTS[0], new=6, seed=0)[0]


def test_aborts_keep_what_was_generated_in_every_state(model_dir):
    scheduler = load_scheduler(model_dir, slots=1)
    running, waiting = submit(scheduler, "running", PROMPTS[0]), submit(scheduler, "waiting", PROMPTS[1])
    scheduler.step()
    scheduler.abort("waiting")
    scheduler.abort("unknown")
    assert (waiting.finish, waiting.output) == ({"type": "abort", "message": "Abort in waiting queue"}, [])
    assert waiting.version_spans() == []
    scheduler.abort("running")
    assert running.finish == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert len(running.output) == 2
    retracted = submit(scheduler, "retracted", PROMPTS[2])
    scheduler.step()
    scheduler.pause("retract")
    scheduler.abort("retracted")
    assert retracted.finish == {"type": "abort", "message": "Abort in waiting queue"}
    assert len(retracted.output) == len(retracted.logprobs) == 2
    assert retracted.version_spans() == [{"version": "0", "start": 0, "end": 2}]


def test_pausing_by_abort_ends_everything_and_holds_newcomers(model_dir):
    scheduler = load_scheduler(model_dir)
    running = submit(scheduler, "running", PROMPTS[0])
    scheduler.step()
    scheduler.pause("abort")
    assert running.finish is not None
    late = submit(scheduler, "late", PROMPTS[1])
    assert not scheduler.busy
    scheduler.resume()
    finish(scheduler)
    assert late.finish == {"type": "length", "length": 8}


def test_end_tokens_and_stop_strings_end_a_completion_and_stay_in_it(model_dir):
    runner = load_runner(model_dir)
    tokens, _ = plain_completion(runner, PROMPTS[0], new=8, seed=4)
    scheduler = load_scheduler(model_dir)
    by_token = submit(scheduler, "token", PROMPTS[0], seed=4, stop_ids=frozenset({tokens[3]}))
    by_string = submit(scheduler, "string", PROMPTS[0], seed=4, stop=(f"w{tokens[4]} w{tokens[5]}",))
    on_the_last = submit(scheduler, "last", PROMPTS[0], new=4, seed=4, stop_ids=frozenset({tokens[3]}))
    finish(scheduler)
    assert (by_token.output, by_token.finish) == (tokens[:4], {"type": "stop", "matched": tokens[3]})
    assert (by_string.output, by_string.finish) == (tokens[:6], {"type": "stop", "matched": f"w{tokens[4]} w{tokens[5]}"})
    assert on_the_last.finish == {"type": "stop", "matched": tokens[3]}  # SGLang looks at the length last


def test_scoring_a_prompt_gives_its_log_probs_and_uses_no_cached_prefix(model_dir):
    scheduler = load_scheduler(model_dir)
    submit(scheduler, "first", PROMPTS[2][:6], new=1)
    finish(scheduler)
    scored = submit(scheduler, "scored", PROMPTS[2], new=0, logprob_start=0)
    both = submit(scheduler, "both", PROMPTS[2], new=3, seed=2, logprob_start=4)
    finish(scheduler)
    runner = load_runner(model_dir)
    expected = [plain_logprob(runner, PROMPTS[2][:end], PROMPTS[2][end]) for end in range(1, 8)]
    assert scored.prompt_logprobs == pytest.approx(expected, abs=1e-4)
    assert (scored.output, scored.finish, scored.cached_tokens) == ([], {"type": "length", "length": 0}, 0)
    assert both.prompt_logprobs == pytest.approx(expected[3:], abs=1e-4)
    assert both.output == plain_completion(runner, PROMPTS[2], new=3, seed=2)[0]


def plain_logprob(runner, prefix, token):
    from agentrl.engine.runner import Chunk

    return runner.logits(runner.prefill([Chunk(slot=0, tokens=prefix)])).log_softmax(-1)[0, token].item()


def test_running_requests_move_to_low_slots_and_get_what_they_would_have(model_dir):
    scheduler = load_scheduler(model_dir, slots=16)
    sequences = [submit(scheduler, str(n), [*PROMPTS[n % 8], n], new=3 if n < 12 else 20, seed=n) for n in range(16)]
    finish(scheduler)
    runner = load_runner(model_dir)
    for n in (12, 13, 14, 15):
        assert sequences[n].output == plain_completion(runner, [*PROMPTS[n % 8], n], new=20, seed=n)[0]
    turns = [submit(scheduler, f"turn{n}", [*sequence.tokens, 6], new=2, seed=n) for n, sequence in enumerate(sequences)]
    finish(scheduler)
    assert all(turn.cached_tokens == len(sequence.computed_tokens) for turn, sequence in zip(turns, sequences, strict=True))
    assert all(close(turn, rescored(runner, turn)) for turn in turns)


def test_weights_that_overflow_are_an_error_and_leave_nothing_behind(model_dir):
    scheduler = load_scheduler(model_dir, context_tokens=1536)
    sequence = submit(scheduler, "a", PROMPTS[0])
    long = [submit(scheduler, f"long{n}", [n] * 1500, new=5) for n in range(3)]  # more than one forward's worth
    scheduler.step()
    good = {name: tensor.clone() for name, tensor in scheduler.runner.weights.named.items()}
    scheduler.commit({"model.norm.weight": torch.full((32,), float("nan"))}, "1")
    finish(scheduler)
    assert sequence.finish == {
        "type": "abort",
        "message": "the model's logits are not finite",
        "status_code": 500,
        "err_type": "InternalServerError",
    }
    assert all(broken.finish == sequence.finish for broken in long)
    scheduler.commit(good, "2")
    after = submit(scheduler, "b", PROMPTS[0], seed=3)
    finish(scheduler)
    assert after.output == plain_completion(load_runner(model_dir), PROMPTS[0], new=8, seed=3)[0]
    assert all(math.isfinite(logprob) for logprob in after.logprobs)


def test_in_deterministic_mode_company_and_order_change_not_one_bit(model_dir):
    alone = [run_deterministic(model_dir, [n])[n] for n in range(len(PROMPTS))]
    forward = run_deterministic(model_dir, list(range(8)))
    backward = run_deterministic(model_dir, [7, 2, 5, 0, 3, 6, 1, 4])
    assert [forward[n] for n in range(8)] == alone
    assert [backward[n] for n in range(8)] == alone


def run_deterministic(model_dir, order):
    """Tokens and log-probs by prompt, the requests coming in this order, some of them later."""
    scheduler = load_scheduler(model_dir, slots=5, context_tokens=48, deterministic=True)
    sequences = {}
    for n in order:
        sequences[n] = submit(scheduler, str(n), PROMPTS[n], new=12, seed=n)
        if n % 3 == 0:
            scheduler.step()
    finish(scheduler)
    return {n: (sequence.output, sequence.logprobs) for n, sequence in sequences.items()}


def test_deterministic_mode_reuses_no_prefix_and_needs_four_slots(model_dir):
    scheduler = load_scheduler(model_dir, slots=4, deterministic=True)
    first = submit(scheduler, "first", PROMPTS[2])
    finish(scheduler)
    turn = submit(scheduler, "turn", [*first.tokens, 4])
    finish(scheduler)
    assert turn.cached_tokens == 0
    with pytest.raises(EngineError, match="at least 4 slots"):
        load_scheduler(model_dir, slots=3, deterministic=True)


def test_paused_in_place_requests_go_on_from_their_keys_and_values_under_the_new_weights(model_dir, other_dir):
    scheduler = load_scheduler(model_dir)
    sequence = submit(scheduler, "frozen", [5, 17, 80], new=20, seed=3)
    for _ in range(8):
        scheduler.step()
    scheduler.pause("in_place")
    assert (scheduler.busy, scheduler.frozen, scheduler.flush()) == (False, True, False)
    scheduler.commit(read_tensors(other_dir), "1")
    computed = scheduler.counters.prefill_tokens
    scheduler.resume()
    finish(scheduler)
    assert scheduler.counters.prefill_tokens == computed
    assert sequence.version_spans() == [{"version": "0", "start": 0, "end": 9}, {"version": "1", "start": 9, "end": 20}]
    assert sequence.retractions == 0


def test_an_abort_while_paused_in_place_takes_effect_when_the_pause_ends(model_dir):
    for end in (Scheduler.resume, lambda each: each.pause("retract")):
        scheduler = load_scheduler(model_dir, slots=1)
        running = submit(scheduler, "running", [5, 17], new=20)
        waiting = submit(scheduler, "waiting", [5, 18], new=20)
        scheduler.step()
        scheduler.pause("in_place")
        scheduler.abort_all()
        assert (running.finish, waiting.finish) == (None, {"type": "abort", "message": "Abort in waiting queue"})
        end(scheduler)
        assert running.finish == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        assert scheduler.load()["running"] == 0
