"""A run through the replay buffer, from the first version to the last evaluation."""

from __future__ import annotations

from pathlib import Path

from buffer_play import EVAL_TASKS, Player, open_buffer, settings, taken_ordinals, trained_keys

from agentrl.buffer.buffer import EvalSettings


def test_a_run_of_three_steps_goes_through_its_phases_and_trains_every_group_once(tmp_path: Path) -> None:
    buffer = open_buffer(tmp_path, settings=settings(eval_sets={"heldout": EvalSettings()}))
    player = Player(buffer)
    assert buffer.state.phase == "starting"
    assert player.take() == []
    player.start()
    assert buffer.state.phase == "initial_eval"
    assert [grant.ticket.name for grant in player.take()] == [f"eval:heldout@0/{i}/0/0" for i in range(3)]
    player.finish_all()
    trained = []
    for step in range(3):
        assert buffer.state.phase == "training"
        grant = player.step()
        assert grant.step == step
        trained += trained_keys(grant)
    assert trained == [(ordinal, k) for ordinal in range(6) for k in range(2)]
    assert buffer.state.phase == "final_eval"
    end = player.take_batch()
    assert end is not None
    assert end.end == "finished"
    player.finish_all()
    assert buffer.state.phase == "finished"
    assert buffer.take_tickets(player.worker, request=99, want=1).ended
    phases = [event["phase"] for event in buffer.events(0) if event["kind"] == "phase"]
    assert phases == ["initial_eval", "training", "final_eval", "finished"]
    assert len(EVAL_TASKS["heldout"]) == 3


def test_admission_keeps_running_buffered_and_training_groups_within_k_plus_1_batches(tmp_path: Path) -> None:
    player = Player(open_buffer(tmp_path, settings=settings(group_size=1)))  # K=1, G=2: at most 4 groups
    player.start()
    assert len(player.take()) == 4
    assert player.take() == []
    player.finish(player.open[0])
    player.finish(player.open[0])
    assert player.take() == []  # buffered groups hold their place
    grant = player.take_batch()
    assert taken_ordinals(grant) == [0, 1]
    assert player.take() == []  # so does a batch in training
    version = player.train(grant, publish=False)
    assert version == 1
    assert player.take() == []  # ... until its version is published
    player.publish(version)
    assert [g.ticket.ordinal for g in player.take()] == [4, 5]
