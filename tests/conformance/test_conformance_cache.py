"""Prefixes that are used again, and the namespaces that keep them apart."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

TURN = [70, 71, 72]


def cached(engine, ids, **fields):
    meta = engine.generate(ids, new=4, **fields)["meta_info"]
    assert meta["cached_tokens_details"] == ({"device": meta["cached_tokens"], "host": 0} if meta["cached_tokens"] else None)
    return meta["cached_tokens"]


def test_a_later_turn_finds_its_prefix_and_after_a_flush_it_does_not(engine):
    engine.post("/flush_cache")
    first = engine.generate(TURN, new=6)
    ids = [*TURN, *first["output_ids"], 73, 74]
    assert cached(engine, ids) == 8  # all but the last token, whose keys nothing has needed yet
    engine.post("/flush_cache")
    assert cached(engine, ids) == 0


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_prefixes_are_found_within_their_namespace_only(engine, field):
    engine.post("/flush_cache")
    first = engine.generate(TURN, new=6, **{field: "mine"})
    ids = [*TURN, *first["output_ids"], 73, 74]
    assert cached(engine, ids, **{field: "other"}) == 0
    assert cached(engine, ids, **{field: "mine"}) == 8


def test_a_shared_prefix(engine):
    engine.post("/flush_cache")
    engine.generate([*TURN, 80, 81], new=4)
    found = cached(engine, [*TURN, 90, 91])
    assert found == (3 if engine.differs("cached_tokens of a shared prefix") == "any shared prefix" else 0)


def test_new_weights_with_a_flush_forget_every_prefix(engine):
    first = engine.generate(TURN, new=6)
    ids = [*TURN, *first["output_ids"], 73]
    engine.from_disk(1, "1", flush_cache=True)
    assert cached(engine, ids) == 0


def test_new_weights_without_a_flush(engine):
    engine.post("/flush_cache")
    first = engine.generate(TURN, new=6)
    ids = [*TURN, *first["output_ids"], 73]
    engine.from_disk(1, "1", flush_cache=False)
    kept = engine.differs("flush_cache false in an update") == "prefixes of the old weights are used again"
    assert (cached(engine, ids) > 0) is kept
    engine.post("/flush_cache")


def test_in_place_the_namespace_of_a_version_keeps_old_prefixes_out(engine):
    engine.post("/flush_cache")
    running = engine.start(TURN, extra_key="0").wait(16)
    engine.post("/pause_generation", mode="in_place")
    engine.from_disk(1, "1", flush_cache=False)
    engine.post("/continue_generation")
    engine.post("/abort_request", abort_all=True)
    ids = [*TURN, *running.result()["output_ids"], 73]
    assert cached(engine, ids, extra_key="1") == 0
    assert cached(engine, ids, extra_key="0") > 0
    engine.post("/flush_cache")
