"""New weights: from disk, by process group, in sessions, in mid-request. tests/conformance/test_conformance_logprobs.py has their numbers."""

from __future__ import annotations

import pytest
import torch
from engine_calls import announcement, halves

from agentrl.engine.weights import read_tensors

pytestmark = pytest.mark.slow

SUCCESS = {"success": True, "message": "Success"}
NORM = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]], "weight_version": "1"}


def versions(reply):
    """The versions of a reply's tokens, whose spans must cover them all."""
    spans = reply["meta_info"]["weight_versions"]
    assert [span["start"] for span in spans] + [len(reply["output_ids"])] == [0, *(span["end"] for span in spans)]
    return [span["version"] for span in spans]


def finish(engine, running, more=16):
    """Some tokens more, then what there is."""
    running.wait(running.tokens + more)
    engine.post("/abort_request", abort_all=True)
    return running.result()


def test_weights_from_disk_have_their_version_and_are_the_same_every_time(engine):
    first = engine.checksum()
    reply = engine.from_disk(1, "1")
    assert reply.json() == {"success": True, "message": "Succeeded to update model weights. Weight version updated to 1.", "num_paused_requests": 0}
    assert (engine.version, engine.checksum() != first) == ("1", True)
    assert engine.generate(new=2)["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 2}]
    engine.from_disk(0, "2")
    assert (engine.version, engine.checksum()) == ("2", first)


def test_a_directory_that_is_none_changes_nothing(engine, tmp_path):
    before = engine.checksum()
    reply = engine.post("/update_weights_from_disk", model_path=str(tmp_path / "none"), weight_version="9")
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    assert (engine.version, engine.checksum()) == ("0", before)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_from_disk_in_mid_request_tokens_carry_the_version_that_made_them(engine, mode):
    running = engine.start().wait(16)
    engine.post("/pause_generation", mode=mode)
    assert engine.from_disk(1, "1", flush_cache=mode == "retract").status_code == 200
    engine.post("/continue_generation")
    reply = finish(engine, running)
    assert versions(reply) == ["0", "1"]
    assert reply["meta_info"]["weight_versions"][0]["end"] >= 16
    assert (reply["meta_info"]["num_retractions"], reply["meta_info"]["weight_version"]) == (int(mode == "retract"), "1")


def test_an_update_can_abort_what_runs(engine):
    running = engine.start().wait(8)
    assert engine.from_disk(1, "1", abort_all_requests=True).status_code == 200
    reply = running.result()
    assert (reply["meta_info"]["finish_reason"]["type"], versions(reply)) == ("abort", ["0"])


def test_an_update_while_not_paused(engine):
    between = engine.differs("an update while not paused").startswith("comes in between")
    running = engine.start(new=1900 if between else 150).wait(8)
    assert engine.from_disk(1, "1").status_code == 200
    reply = finish(engine, running) if between else running.result()
    assert versions(reply) == (["0", "1"] if between else ["0"])
    assert engine.version == "1"


@pytest.mark.parametrize("flat", [True, False], ids=["flattened", "per tensor"])
def test_buckets_of_a_session_bring_a_version_in_mid_request(engine, fresh_group, flat):
    first, second = halves(read_tensors(engine.models[1]))
    running = engine.start().wait(16)
    engine.post("/pause_generation", mode="retract")
    assert engine.post("/begin_weight_update").json() == SUCCESS
    reply = fresh_group.send(first, flat=flat, flush_cache=False)
    assert reply.json() == {"success": True, "message": "Succeeded to update parameter online."}
    assert engine.version == "0"
    reply = fresh_group.send(second, flat=flat, flush_cache=True, weight_version="1")
    assert reply.json() == {"success": True, "message": "Succeeded to update parameter online. Weight version updated to 1."}
    assert engine.version == ("1" if engine.differs("when a bucket is live").startswith("as soon") else "0")
    assert engine.post("/end_weight_update").json() == SUCCESS
    assert engine.version == "1"
    engine.post("/continue_generation")
    assert versions(finish(engine, running)) == ["0", "1"]
    received = engine.checksum()
    engine.from_disk(1, "1")
    assert engine.checksum() == received


def test_a_group_serves_several_updates(engine, fresh_group):
    for version, model in (("1", 1), ("2", 2)):
        engine.post("/begin_weight_update")
        assert fresh_group.send(read_tensors(engine.models[model]), weight_version=version).status_code == 200
        assert engine.post("/end_weight_update").json() == SUCCESS
        received = engine.checksum()
        assert (engine.version, engine.from_disk(model, version).status_code, engine.checksum()) == (version, 200, received)


def test_weights_by_group_need_a_session_and_a_session_is_one(engine, fresh_group):
    outside = engine.post("/update_weights_from_distributed", **NORM, group_name=fresh_group.name)
    message = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
    assert (outside.status_code, outside.json()) == (400, {"success": False, "message": message})
    end = engine.post("/end_weight_update")
    assert (end.status_code, end.json()["success"]) == (400, False)
    assert engine.post("/begin_weight_update").json() == SUCCESS
    again = engine.post("/begin_weight_update")
    assert (again.status_code, again.json()["success"], "already open" in again.json()["message"]) == (400, False, True)
    assert engine.post("/end_weight_update").json() == SUCCESS
    assert engine.post("/end_weight_update").status_code == 400
    assert engine.version == "0"


def test_an_unknown_group_is_refused_at_once(engine):
    engine.post("/begin_weight_update")
    reply = engine.post("/update_weights_from_distributed", **NORM, group_name="nobody")
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    assert engine.post("/end_weight_update").status_code == 200
    gone = engine.post("/destroy_weights_update_group", group_name="nobody")
    assert (gone.status_code, gone.json()) == (400, {"success": False, "message": "The group to be destroyed does not exist."})
    assert engine.version == "0"


def test_a_destroyed_group_is_none_any_more_and_its_name_is_free(engine):
    for _ in range(2):
        with engine.group("again"):
            pass
        assert engine.post("/destroy_weights_update_group", group_name="again").status_code == 400


def test_a_group_without_a_name(engine):
    if engine.differs("a group without a name") == "ends the server":
        pytest.skip("it ends the server")
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    assert engine.post("/init_weights_update_group", **body, group_name="").status_code == 400


def test_a_tensor_of_a_wrong_shape(engine, fresh_group):
    wrong = {"model.norm.weight": torch.zeros(63)}
    before = engine.checksum()
    engine.post("/begin_weight_update")
    if engine.differs("a tensor of a wrong shape").startswith("refused before the broadcast"):
        reply = fresh_group.announce(wrong, weight_version="1").result()
        assert engine.checksum() == before
    else:
        reply = fresh_group.send(wrong, weight_version="1")
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    engine.post("/end_weight_update")
    assert engine.version == "0"
    engine.from_disk(0, "0")
    assert engine.checksum() == before


def test_a_tensor_of_an_unknown_name(engine, fresh_group):
    before = engine.checksum()
    engine.post("/begin_weight_update")
    wrong = {"model.nom.weight": torch.zeros(64)}
    if engine.differs("a tensor of an unknown name").startswith("refused"):
        assert fresh_group.announce(wrong).result().status_code == 400
    else:
        assert fresh_group.send(wrong).status_code == 200
    engine.post("/end_weight_update")
    assert engine.checksum() == before


def test_an_update_that_names_no_version(engine, fresh_group):
    before = engine.checksum()
    engine.post("/begin_weight_update")
    assert fresh_group.send(read_tensors(engine.models[1])).status_code == 200
    refused = engine.differs("an update that names no version").startswith("refused")
    assert engine.post("/end_weight_update").status_code == (400 if refused else 200)
    assert (engine.version, engine.checksum() == before) == ("0", refused)


@pytest.mark.parametrize("way", ["disk", "group"])
def test_a_flush_while_requests_are_frozen_in_place(engine, fresh_group, way):
    before = engine.checksum()
    running = engine.start().wait(8)
    engine.post("/pause_generation", mode="in_place")
    if way == "disk":
        reply = engine.once_from_disk(1, "1")
    else:
        engine.post("/begin_weight_update")
        reply = fresh_group.send(read_tensors(engine.models[1]), weight_version="1", flush_cache=True)
        engine.post("/end_weight_update")
    kept = engine.differs("a flush while requests are frozen in place").endswith("old weights kept")
    assert (reply.status_code, "requests are still running" in reply.json()["message"]) == (400, True)
    assert (engine.version, engine.checksum() == before) == ("0", kept)
    engine.post("/continue_generation")
    assert versions(finish(engine, running)) == (["0"] if kept else ["0", "1"])


def test_malformed_announcements_are_refused(engine, fresh_group):
    engine.post("/begin_weight_update")
    good = announcement({"model.norm.weight": torch.zeros(64)}, group_name=fresh_group.name)
    for change in ({"names": "x"}, {"weight_version": 1}, {"group_name": None}):
        assert engine.post("/update_weights_from_distributed", **good | change).status_code == 400
    assert engine.post("/end_weight_update").status_code == 200


@pytest.mark.parametrize("mode", [None, "retract", "in_place"])
def test_a_version_can_be_renamed_in_mid_request(engine, mode):
    running = engine.start().wait(8)
    if mode:
        engine.post("/pause_generation", mode=mode)
    reply = engine.post("/update_weight_version", new_version="42", abort_all_requests=False)
    assert reply.json() == {"success": True, "message": "Weight version updated to 42", "new_version": "42"}
    if mode:
        engine.post("/continue_generation")
    assert versions(finish(engine, running)) == ["0", "42"]
    assert engine.version == "42"


def test_renaming_a_version_aborts_what_runs_unless_told_otherwise(engine):
    running = engine.start().wait(8)
    assert engine.post("/update_weight_version", new_version="43").status_code == 200
    assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_request_that_came_during_the_update_is_made_by_the_new_version_alone(engine):
    engine.post("/pause_generation", mode="retract")
    waiting = engine.pool.submit(engine.generate, new=4)
    assert engine.from_disk(1, "1").status_code == 200
    engine.post("/continue_generation")
    assert versions(waiting.result()) == ["1"]
