"""Groups that are trained on more than once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from buffer_play import Player, open_buffer, settings, taken_ordinals

from agentrl.buffer.buffer import Caller
from agentrl.buffer.replay import Candidate, choose, resolve_select
from agentrl.errors import ConfigError, RecipeCodeError


def newest_first(candidates: Sequence[Candidate], count: int, seed: int) -> list[int]:
    """A recipe's own choice."""
    return [candidate.ordinal for candidate in reversed(candidates)][:count]


def begun(directory: Path, **changes: Any) -> Player:
    options = {"group_size": 1, "total_steps": 9, "max_staleness": 0, "reuse": 2, "fresh": 0.5} | changes
    player = Player(open_buffer(directory, settings=settings(**options)))
    player.start()
    return player


def test_half_of_every_batch_is_new_and_no_group_is_used_more_often_than_allowed(tmp_path: Path) -> None:
    player = begun(tmp_path)
    assert [taken_ordinals(player.step()) for _ in range(5)] == [[0, 1], [0, 2], [1, 3], [2, 4], [3, 5]]
    assert player.buffer.state.groups.ledger["trained"] == 6
    assert [event["reused"] for event in player.buffer.events(0) if event["kind"] == "step"] == [0, 1, 1, 1, 1]


def test_every_use_is_recorded_with_its_staleness(tmp_path: Path) -> None:
    player = begun(tmp_path, reuse=3)
    for _ in range(4):
        player.step()
    batches = player.buffer.state.batches.by_id
    assert [batch.taken.groups for batch in batches.values()] == [
        ((0, 0, 0), (1, 0, 0)),  # (ordinal, use, staleness)
        ((0, 1, 1), (2, 0, 0)),
        ((0, 2, 2), (3, 0, 1)),  # group 3 was admitted with 2 and waited for a step
        ((1, 1, 3), (4, 0, 1)),
    ]


def test_groups_with_a_token_older_than_max_token_age_are_not_used_again(tmp_path: Path) -> None:
    player = begun(tmp_path, reuse=9, max_token_age=1)
    assert [taken_ordinals(player.step()) for _ in range(4)] == [[0, 1], [0, 2], [2, 3], [4, 5]]


def test_a_recipes_own_function_chooses(tmp_path: Path) -> None:
    player = begun(tmp_path, reuse=9, select=f"{__name__}:newest_first")
    assert [taken_ordinals(player.step()) for _ in range(4)] == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_a_rollback_gives_back_first_uses_and_takes_back_later_ones(tmp_path: Path) -> None:
    player = begun(tmp_path, reuse=3)
    player.step()
    mark = player.buffer.mark()
    player.step()
    player.step()
    player.learner, player.batches = Caller(role="learner", index=0, incarnation=2), 0
    player.buffer.rollback(player.learner, {"id": "one", "step": 1, "consumed": mark.consumed})
    player.start("restored")
    groups = player.buffer.state.groups
    assert {ordinal: group.uses for ordinal, group in groups.by_ordinal.items() if group.state == "trained"} == {0: 1, 1: 1}
    assert groups.admission.buffered >= 2
    assert taken_ordinals(player.step()) == [0, 2]


def rewarding(candidates: Sequence[Candidate], count: int, seed: int) -> list[int]:
    """The candidates with the highest mean rewards: a choice by what a group earned."""
    best = sorted(candidates, key=lambda candidate: -sum(candidate.rewards) / len(candidate.rewards))
    return [candidate.ordinal for candidate in best][:count]


def stumbling(candidates: Sequence[Candidate], count: int, seed: int) -> list[int]:
    return [candidates[99].ordinal]


def test_a_choice_may_depend_on_what_the_groups_earned(tmp_path: Path) -> None:
    player = begun(tmp_path, reuse=9, select=f"{__name__}:rewarding")
    for expected in ([0, 1], [1, 2], [2, 3]):
        while player.open or player.take():
            player.finish_group(float(player.open[0].ticket.ordinal))
        grant = player.take_batch()
        assert taken_ordinals(grant) == expected
        player.train(grant)


def test_a_choice_that_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    player = begun(tmp_path, select=f"{__name__}:stumbling")
    player.step()
    player.finish_all()
    grant = player.take_batch()
    assert grant is not None
    assert grant.end == "stopped"
    assert player.buffer.status()["halt"]["reason"] == "RecipeCodeError: buffer.replay.select failed: IndexError: list index out of range"


def test_reused_groups_hold_no_place_in_admission(tmp_path: Path) -> None:
    player = begun(tmp_path)  # K=0, G=2: at most 2 groups alive
    player.step()
    admission = player.buffer.state.groups.admission
    player.finish_all()
    assert (admission.buffered, admission.room) == (2, 0)
    grant = player.take_batch()
    assert taken_ordinals(grant) == [0, 2]
    assert (admission.training, admission.buffered) == (1, 1)  # group 0 is in the batch as well
    player.train(grant)
    assert (admission.training, admission.room) == (0, 1)


def test_groups_too_old_to_be_used_again_are_forgotten_once_no_checkpoint_can_give_them_back(tmp_path: Path) -> None:
    player = begun(tmp_path, reuse=9, max_token_age=1, keep_checkpoints=1)
    groups = player.buffer.state.groups
    for step in range(1, 4):
        player.step()
        mark = player.buffer.mark()
        player.buffer.checkpoint_committed({"id": str(step), "step": step, "consumed": mark.consumed})
    assert {0, 1}.isdisjoint(groups.by_ordinal)
    groups.check()


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ("newest", "must be oldest, uniform or module:function, got 'newest'"),
        ("no.such.module:f", "no.such.module:f: module no.such.module cannot be imported"),
        ("agentrl.seeds:nothing", "has no nothing"),
        ("agentrl.seeds:_MASK", "is not a function"),
    ],
)
def test_a_select_that_is_not_there_is_a_mistake_of_the_recipe(tmp_path: Path, select: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        begun(tmp_path, select=select)


def test_choices_are_checked_and_uniform_ones_depend_on_the_seed_alone() -> None:
    candidates = [Candidate(ordinal=ordinal, uses=1, staleness=1) for ordinal in range(20)]
    uniform = resolve_select("uniform")
    chosen = choose(uniform, candidates, 5, seed=1, batch=3)
    assert chosen == choose(uniform, list(reversed(candidates)), 5, seed=1, batch=3)
    assert chosen != choose(uniform, candidates, 5, seed=1, batch=4)
    assert choose(resolve_select("oldest"), candidates, 30, seed=1, batch=3) == list(range(20))
    for wrong in ([1, 1], [1], [1, 99]):
        with pytest.raises(RecipeCodeError, match="expected 2 distinct ordinals"):
            choose(lambda *_, wrong=wrong: wrong, candidates, 2, seed=1, batch=3)  # type: ignore[misc]
