"""Groups that are complete and not trained on: filters of rewards, treatments of stops, and over-sampling to make up for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from buffer_play import Player, open_buffer, settings, taken_ordinals, trained_keys

from agentrl.buffer.admission import group_limit
from agentrl.buffer.buffer import BufferSettings
from agentrl.buffer.filters import CompleteGroup, mixed, resolve_filter
from agentrl.buffer.summary import TrajectorySummary
from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError
from agentrl.types import StopReason


def begun(directory: Path, **changes: Any) -> Player:
    player = Player(open_buffer(directory, settings=settings(**changes)))
    player.start()
    return player


def restarted(player: Player, **options: Any) -> Player:
    player.buffer.commit()
    player.buffer.journal.abandon()
    player.buffer = open_buffer(player.buffer._directory, incarnation=2, settings=player.buffer.settings, **options)
    return player


def group_of(*rewards: float, **parts: tuple[float, ...]) -> CompleteGroup:
    named = [{name: values[k] for name, values in parts.items()} for k in range(len(rewards))]
    trajectories = tuple(TrajectorySummary(k=k, reward=reward, parts=named[k]) for k, reward in enumerate(rewards))
    return CompleteGroup(ordinal=0, task="t0", source="default", trajectories=trajectories)


def short_ones(group: CompleteGroup) -> bool:
    """A recipe's own filter: no trajectory of five generated tokens or more."""
    return all(trajectory.generated < 5 for trajectory in group.trajectories)


def forgetful(group: CompleteGroup) -> bool:
    print(group.task)  # and no answer


def broken(group: CompleteGroup) -> bool:
    return group.trajectories[99].reward > 0


def test_mixed_keeps_groups_whose_rewards_differ_by_more_than_rounding():
    assert mixed(group_of(1.0, 0.0))
    assert not mixed(group_of(1.0, 1.0, 1.0))
    assert not mixed(group_of(0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1))  # 0.6000000000000001 and 0.6
    assert not mixed(group_of(1.0, 0.9, right=(1.0, 1.0), over_long=(0.0, -0.1)), "right")
    assert mixed(group_of(1.0, 0.9, right=(1.0, 1.0), over_long=(0.0, -0.1)), "over_long")


def test_a_filtered_group_leaves_admission_at_once_and_the_next_takes_its_place(tmp_path: Path) -> None:
    player = begun(tmp_path, filter="mixed", max_staleness=0)
    player.take()
    player.finish_group(1.0, 1.0)
    groups = player.buffer.state.groups
    assert groups.ledger.dropped() == {"filtered": 2}
    assert (groups.admission.running, groups.admission.buffered) == (1, 0)
    assert [grant.ticket.ordinal for grant in player.take()] == [2, 2]
    player.finish_group(0.0, 1.0)
    player.finish_group(1.0, 0.0)
    grant = player.take_batch()
    assert taken_ordinals(grant) == [1, 2]
    player.train(grant)
    step = next(event for event in player.buffer.events(0) if event["kind"] == "step")
    assert (step["completed"], step["filtered"], step["dropped"]) == (3, 1, {"filtered": 2})
    assert player.buffer.status()["filter"] == {"completed": 3, "filtered": 1, "in_row": 0}


def test_a_restarted_buffer_remembers_what_was_filtered_and_why(tmp_path: Path) -> None:
    player = begun(tmp_path, filter="mixed", dropped_stops=("turn_limit",), group_size=3)
    player.take()
    player.finish_group(0.0, 0.0, 0.0)
    player.finish(player.open[0], reward=0.0)
    before = player.buffer.status()["ledger"]
    restarted(player)
    assert player.buffer.status()["ledger"] == before
    assert player.buffer.status()["filter"] == {"completed": 1, "filtered": 1, "in_row": 1}
    player.finish(player.open[0], reward=1.0, stop=StopReason.TURN_LIMIT)  # the first one's reward and stop come from the journal
    player.finish(player.open[0], reward=0.0)
    assert player.buffer.state.groups.ledger.dropped() == {"filtered": 5, "stop_turn_limit": 1}


def test_a_recipes_own_filter_sees_the_group_and_decides(tmp_path: Path) -> None:
    player = begun(tmp_path, filter=f"{__name__}:short_ones")
    player.take()
    player.finish_group(1.0, 1.0, versions=(0, 0, 0, 0))
    player.finish_group(1.0, 1.0, versions=(0, 0, 0, 0, 0))
    player.finish_group(1.0, 1.0)
    assert taken_ordinals(player.take_batch()) == [0, 2]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("forgetful", "returned None for group 0: expected True (keep it) or False"),
        ("broken", "failed: IndexError: tuple index out of range"),
    ],
)
def test_a_filter_that_fails_ends_the_run_with_its_name_and_loses_nothing(tmp_path: Path, function: str, reason: str) -> None:
    player = begun(tmp_path, filter=f"{__name__}:{function}")
    player.take()
    player.finish_group(1.0, 0.0)
    halt = player.buffer.status()["halt"]
    assert halt["phase"] == "failed"
    assert halt["reason"] == f"RecipeCodeError: buffer.filter {__name__}:{function} {reason}"
    assert player.buffer.state.groups.admission.buffered == 1
    assert player.buffer.take_tickets(player.worker, request=50, want=1).ended


def test_a_run_whose_groups_are_all_filtered_ends_with_the_reason_and_a_resume_counts_anew(tmp_path: Path) -> None:
    player = begun(tmp_path, filter="mixed", filter_part="right", max_filtered_in_row=3)
    player.take()
    for _ in range(3):
        player.finish_group(1.0, 0.0, parts={"exact": 1.0})
    reason = player.buffer.status()["halt"]["reason"]
    assert "the last 3 complete groups were dropped before training, 3 of 3 in all (samples dropped by cause: {'filtered': 6})" in reason
    assert "buffer.filter is mixed of right" in reason
    restarted(player, run=2)
    assert player.buffer.status()["halt"] is None
    assert player.buffer.status()["filter"] == {"completed": 3, "filtered": 3, "in_row": 0}


def test_the_bound_is_64_batches_in_a_row_and_a_group_that_is_kept_starts_it_anew(tmp_path: Path) -> None:
    assert settings(groups_per_batch=2).filtered_limit == 128
    player = begun(tmp_path, filter="mixed", max_filtered_in_row=2)
    player.take()
    for rewards in ((1.0, 1.0), (1.0, 0.0), (1.0, 1.0)):
        player.finish_group(*rewards)
    assert player.buffer.status()["filter"]["in_row"] == 1
    assert player.buffer.status()["halt"] is None


def test_trajectories_whose_stop_is_dropped_leave_their_group_by_cause(tmp_path: Path) -> None:
    player = begun(tmp_path, group_size=3, groups_per_batch=1, dropped_stops=("turn_limit", "context_limit"))
    grants = player.take(3)
    player.finish(grants[0])
    player.finish(grants[1], stop=StopReason.TURN_LIMIT)
    assert player.buffer.state.groups.ledger.dropped() == {}  # the group is not complete
    player.finish(grants[2], stop=StopReason.COMPLETION_LIMIT)
    grant = player.take_batch()
    assert grant is not None
    assert trained_keys(grant) == [(0, 0), (0, 2)]
    player.train(grant)
    ledger = player.buffer.state.groups.ledger
    assert (ledger["trained"], ledger.dropped()) == (2, {"stop_turn_limit": 1})


def test_a_group_of_which_fewer_than_two_are_left_is_dropped_whole(tmp_path: Path) -> None:
    player = begun(tmp_path, group_size=3, dropped_stops=("turn_limit",))
    grants = player.take(3)
    player.finish(grants[0], reward=1.0)
    for grant in grants[1:]:
        player.finish(grant, stop=StopReason.TURN_LIMIT)
    assert player.buffer.state.groups.ledger.dropped() == {"stop_turn_limit": 2, "group_incomplete": 1}
    assert player.buffer.status()["filter"]["filtered"] == 1


def test_a_group_of_one_is_dropped_with_its_only_trajectory(tmp_path: Path) -> None:
    player = begun(tmp_path, group_size=1, dropped_stops=("turn_limit",), max_filtered_in_row=2)
    player.take()
    for grant in list(player.open)[:2]:
        player.finish(grant, stop=StopReason.TURN_LIMIT)
    assert player.buffer.state.groups.ledger.dropped() == {"stop_turn_limit": 2}
    assert "buffer.stops drops turn_limit" in player.buffer.status()["halt"]["reason"]


def test_stops_are_dropped_before_the_filter_looks(tmp_path: Path) -> None:
    player = begun(tmp_path, group_size=3, filter="mixed", dropped_stops=("turn_limit",))
    grants = player.take(3)
    for grant, reward, stop in zip(grants, (1.0, 0.0, 1.0), ("answered", "turn_limit", "answered"), strict=True):
        player.finish(grant, reward=reward, stop=StopReason(stop))
    assert player.buffer.state.groups.ledger.dropped() == {"stop_turn_limit": 1, "filtered": 2}


def test_a_partial_group_is_filtered_when_its_last_sample_is_given_up(tmp_path: Path) -> None:
    player = begun(tmp_path, group_size=3, filter="mixed", partial_groups=True, max_attempts=1)
    grants = player.take(3)
    player.finish(grants[0], reward=1.0)
    player.finish(grants[1], reward=1.0)
    player.fail(grants[2])
    assert player.buffer.state.groups.ledger.dropped() == {"sample_exhausted": 1, "filtered": 2}


def test_over_sampling_admits_more_groups_and_rounds_up(tmp_path: Path) -> None:
    assert group_limit(max_staleness=1, groups_per_batch=10) == 20
    assert group_limit(max_staleness=1, groups_per_batch=10, over_sample=0.1) == 22  # not 23, as 1.1 * 20 in floating point would be
    assert group_limit(max_staleness=0, groups_per_batch=4, over_sample=0.1) == 5  # at least one more
    player = begun(tmp_path, filter="mixed", over_sample=0.5)  # K=1, G=2
    assert len({grant.ticket.ordinal for grant in player.take()}) == 6


def test_a_filter_that_is_not_there_is_a_mistake_of_the_recipe() -> None:
    with pytest.raises(ConfigError, match=r"buffer.filter: agentrl.seeds:nothing: .* has no nothing"):
        resolve_filter("agentrl.seeds:nothing", None)
    with pytest.raises(ConfigError, match=r"buffer.filter: agentrl.seeds:_MASK is not a function"):
        resolve_filter("agentrl.seeds:_MASK", None)


def test_the_recipes_keys_reach_the_settings() -> None:
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "run": {"steps": 1},
            "model": {"path": "m"},
            "tasks": {"train": [{"path": "t.jsonl"}]},
            "env": {"factory": "my:Env"},
            "algorithm": {"advantage": {"estimator": "remax"}},
            "buffer": {
                "filter": "mixed",
                "filter_part": "right",
                "max_filtered_in_row": 9,
                "over_sample": 0.25,
                "stops": {"turn_limit": "drop", "context_limit": "mask"},
            },
        }
    )
    found = BufferSettings.of(recipe, total_steps=1)
    assert (found.filter, found.filter_part, found.filtered_limit, found.over_sample) == ("mixed", "right", 9, 0.25)
    assert (found.dropped_stops, found.greedy_baseline, found.samples_per_group) == (("turn_limit",), True, 9)
