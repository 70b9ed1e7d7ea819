"""The three ways to pause, what can be done meanwhile, and how it goes on."""

from __future__ import annotations

import pytest
from engine_calls import PROMPT, load

pytestmark = pytest.mark.slow

PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}
MODES = ["retract", "in_place", "abort"]


@pytest.mark.parametrize("mode", MODES)
def test_a_paused_engine_is_alive_but_not_ready_and_new_requests_wait(engine, mode):
    assert engine.post("/pause_generation", mode=mode).json() == PAUSED
    waiting = engine.pool.submit(engine.generate, new=4)
    for _ in range(10):
        assert (engine.get("/ready").status_code, engine.get("/health").status_code, engine.get("/model_info").status_code) == (503, 200, 200)
        assert not waiting.done()
    assert engine.post("/continue_generation").json() == CONTINUED
    assert engine.get("/ready").status_code == 200
    assert len(waiting.result()["output_ids"]) == 4


def test_pausing_aborts_by_default_and_answers_when_nothing_is_in_flight(engine):
    running = [engine.start([*PROMPT, n]).wait(8) for n in range(2)]
    assert engine.post("/pause_generation").json() == PAUSED
    for request in running:
        reply = request.result()
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(reply["output_ids"]) >= 8
    assert load(engine.http, "num_running_reqs") == 0


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
def test_a_request_goes_on_after_the_pause_as_if_nothing_had_been(engine, mode, retractions):
    undisturbed = engine.generate(new=120, temperature=0)["output_ids"]
    running = engine.start(temperature=0).wait(16)
    engine.post("/pause_generation", mode=mode)
    engine.post("/pause_generation", mode=mode)  # a second pause adds nothing
    assert not running.future.done()
    engine.post("/continue_generation")
    running.wait(120)
    engine.post("/abort_request", abort_all=True)
    reply = running.result()
    assert reply["output_ids"][:120] == undisturbed
    assert reply["meta_info"]["num_retractions"] == retractions


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_nothing_is_generated_while_paused(engine, mode):
    running = engine.start(stream_interval=1).wait(8)
    engine.post("/pause_generation", mode=mode)
    engine.post("/update_weight_version", new_version="paused", abort_all_requests=False)
    for _ in range(10):
        engine.get("/model_info")
    engine.post("/update_weight_version", new_version="after", abort_all_requests=False)
    engine.post("/continue_generation")
    running.wait(running.tokens + 8)
    engine.post("/abort_request", abort_all=True)
    assert [span["version"] for span in running.result()["meta_info"]["weight_versions"]] == ["0", "after"]


def test_a_pause_can_be_made_deeper(engine):
    running = engine.start().wait(8)
    engine.post("/pause_generation", mode="in_place")
    assert engine.post("/flush_cache").status_code == 400
    engine.post("/pause_generation", mode="retract")
    assert engine.post("/flush_cache").status_code == 200
    engine.post("/continue_generation")
    running.wait(running.tokens + 8)
    engine.post("/abort_request", abort_all=True)
    assert running.result()["meta_info"]["num_retractions"] == 1


def test_going_on_where_nothing_is_paused_is_harmless(engine):
    running = engine.start().wait(1)
    assert engine.post("/continue_generation").json() == CONTINUED
    running.wait(running.tokens + 8)


def test_the_cache_is_flushed_when_nothing_holds_it(engine):
    for method in ("GET", "POST"):
        reply = engine.http.request(method, "/flush_cache")
        assert reply.status_code == 200
        assert reply.text.startswith("Cache flushed.\n")
    running = engine.start().wait(1)
    refused = engine.post("/flush_cache")
    assert (refused.status_code, refused.text) == (400, "Flush cache failed.\n")
    engine.post("/pause_generation", mode="retract")
    assert engine.post("/flush_cache").status_code == 200
    engine.post("/continue_generation")
    running.wait(running.tokens + 8)
    engine.post("/pause_generation", mode="in_place")
    assert engine.post("/flush_cache").status_code == 400
    engine.post("/continue_generation")
    engine.post("/pause_generation", mode="abort")
    assert engine.post("/flush_cache").status_code == 200
