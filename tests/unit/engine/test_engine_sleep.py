"""Memory that is given away and comes back: keys and values as room, weights as they were, requests as if nothing had been."""

import pytest
import torch
from engine_loop import finish, load_scheduler, rescored, submit
from tiny_qwen2 import write_tiny_qwen2

from agentrl.engine.parking import Parking, storage_bytes
from agentrl.engine.scheduler import PARTS
from agentrl.errors import EngineRefused


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_qwen2(tmp_path_factory.mktemp("model"))


def test_parked_weights_hold_no_memory_and_come_back_bit_for_bit_under_all_their_names(model_dir):
    weights = load_scheduler(model_dir).runner.weights
    before, parking = weights.checksums(), Parking()
    for _ in range(2):
        parking.park(weights.named.values())
        assert storage_bytes(weights.named.values()) == storage_bytes([weights.embedding, weights.layers[0].qkv]) == 0
        assert weights.layers[0].qkv.shape == (sum(weights.named[f"model.layers.0.self_attn.{n}_proj.weight"].shape[0] for n in "qkv"), 32)
        parking.fetch()
        parking.fetch()
        assert weights.checksums() == before
    weights.named["model.layers.0.self_attn.k_proj.weight"].fill_(7.0)
    assert (weights.layers[0].qkv == 7.0).any(), "a name is no view of what is computed with any more"


def test_an_engine_asleep_has_no_keys_and_values_and_goes_on_with_a_retracted_request_exactly(model_dir):
    alone, scheduler = load_scheduler(model_dir), load_scheduler(model_dir)
    expected = submit(alone, "r", [1, 2, 3], new=12, seed=5)
    finish(alone)
    sequence = submit(scheduler, "r", [1, 2, 3], new=12, seed=5)
    for _ in range(4):
        scheduler.step()
    room = scheduler.runner.cache_bytes
    scheduler.pause("retract")
    scheduler.fall_asleep(PARTS)
    assert (room > 0, scheduler.runner.cache_bytes) == (True, 0)
    scheduler.resume()  # by somebody who does not know
    late = submit(scheduler, "late", [4, 5], new=2, seed=6)
    assert not scheduler.busy
    scheduler.wake_up(PARTS)
    assert scheduler.runner.cache_bytes == room
    finish(scheduler)
    assert (sequence.output, late.retractions, sequence.retractions) == (expected.output, 0, 1)
    assert sequence.logprobs == pytest.approx(rescored(scheduler.runner, sequence), abs=1e-5)
    assert 0 < scheduler.counters.asleep_s == scheduler.counted()["asleep_s"]


@pytest.mark.parametrize("mode", [None, "in_place"])
def test_memory_is_released_only_while_no_request_has_keys_and_values(model_dir, mode):
    scheduler = load_scheduler(model_dir)
    if mode:
        scheduler.pause(mode)
    with pytest.raises(EngineRefused, match=f"only; it is paused by {mode!r}"):
        scheduler.fall_asleep(PARTS)
    assert scheduler.asleep == frozenset()


def test_parts_sleep_and_wake_one_by_one_and_any_number_of_times(model_dir):
    scheduler = load_scheduler(model_dir)
    room = scheduler.runner.cache_bytes
    scheduler.pause("abort")
    scheduler.fall_asleep({"weights"})
    assert (scheduler.runner.cache_bytes, scheduler.asleep) == (room, {"weights"})
    scheduler.fall_asleep({"kv_cache", "weights"})
    scheduler.fall_asleep({"kv_cache"})
    scheduler.wake_up({"kv_cache"})
    scheduler.wake_up({"kv_cache"})
    assert (scheduler.runner.cache_bytes, scheduler.asleep) == (room, {"weights"})
    scheduler.wake_up(PARTS)
    assert scheduler.asleep == frozenset()
    scheduler.resume()
    sequence = submit(scheduler, "r", [1, 2, 3], new=3)
    finish(scheduler)
    assert torch.tensor(sequence.logprobs).isfinite().tolist() == [True] * 3
