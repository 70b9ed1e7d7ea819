"""batch_metrics against numbers worked out by hand."""

from __future__ import annotations

import time

import pytest
from metrics_episodes import episode

from agentrl.buffer_api import VersionInfo
from agentrl.errors import TrajectoryError
from agentrl.metrics.batch import batch_metrics
from agentrl.metrics.catalogue import unknown
from agentrl.types import StopReason, Trajectory

VERSIONS = {4: VersionInfo(step=4), 5: VersionInfo(step=5), 7: VersionInfo(step=6, abandoned=True, age_versions=3)}


def _two_groups() -> list[list[Trajectory]]:
    """8 + 2 + 4 + 4 = 18 generated tokens: 11 of version 5, 5 of version 4, 2 of the abandoned version 7."""
    right = episode(("search", [4, 4, 5, 5]), ("answer", [5, 5, 5, 5]), reward=1.0, parts={"exact_match": 1.0}, seconds=2.0)
    wrong = episode(("invalid", [4, 4]), reward=0.0, parts={"exact_match": 0.0, "format": -0.2}, stop=StopReason.INVALID_LIMIT, sample=(0, 1))
    third = episode(("search", [5]), ("search", [5]), ("answer", [5, 4]), reward=0.0, sample=(1, 0), seconds=4.0)
    fourth = episode(("answer", [5, 5, 7, 7]), reward=0.4, sample=(1, 1), seconds=1.0)
    return [[right, wrong], [third, fourth]]


def test_rewards_parts_and_groups_by_hand() -> None:
    metrics = batch_metrics(_two_groups(), VERSIONS, step=6)
    assert metrics["batch/reward_mean"] == pytest.approx(1.4 / 4)
    assert metrics["batch/reward_std"] == pytest.approx(0.4092676)  # deviations .65 -.35 -.35 .05
    assert (metrics["batch/reward_min"], metrics["batch/reward_max"]) == (0.0, 1.0)
    assert metrics["batch/reward/exact_match"] == 0.25
    assert metrics["batch/reward/format"] == pytest.approx(-0.05)
    assert (metrics["batch/groups_all_right"], metrics["batch/groups_mixed"], metrics["batch/groups_all_wrong"]) == (0.0, 0.5, 0.5)
    assert (metrics["batch/groups"], metrics["batch/trajectories"]) == (2.0, 4.0)


def test_lengths_turns_searches_and_stops_by_hand() -> None:
    metrics = batch_metrics(_two_groups(), VERSIONS, step=6)
    assert metrics["batch/prompt_tokens"] == 3.0
    assert metrics["batch/response_tokens"] == 18 / 4
    assert metrics["batch/info_tokens"] == (2 + 0 + 4 + 0) / 4
    assert metrics["batch/turns"] == (2 + 1 + 3 + 1) / 4
    assert metrics["batch/searches"] == 3 / 4
    assert metrics["batch/valid_action_share"] == pytest.approx(6 / 7)
    assert metrics["batch/stop/answered"] == 0.75
    assert metrics["batch/stop/invalid_limit"] == 0.25
    assert metrics["batch/stop/turn_limit"] == 0.0
    assert metrics["batch/episode_s"] == 2.0


def test_staleness_is_the_step_minus_the_step_of_each_tokens_version() -> None:
    metrics = batch_metrics(_two_groups(), VERSIONS, step=6)
    assert metrics["batch/staleness/0"] == 0.0
    assert metrics["batch/staleness/1"] == pytest.approx(11 / 18)
    assert metrics["batch/staleness/2"] == pytest.approx(5 / 18)
    assert metrics["batch/staleness/3"] == pytest.approx(2 / 18), "a token of an abandoned version is as old as the versions reserved since"
    assert metrics["batch/staleness_mean"] == pytest.approx((11 * 1 + 5 * 2 + 2 * 3) / 18)
    assert metrics["batch/staleness_max"] == 3.0


def test_versions_are_counted_by_trajectory() -> None:
    metrics = batch_metrics(_two_groups(), VERSIONS, step=6)
    assert metrics["batch/versions_mean"] == (2 + 1 + 2 + 2) / 4
    assert metrics["batch/multi_version_share"] == 0.75


def test_an_episode_without_a_generated_token_counts_but_has_no_version() -> None:
    silent = episode(stop=StopReason.CONTEXT_LIMIT)
    metrics = batch_metrics([[silent, episode(("answer", [5]), reward=1.0, sample=(0, 1))]], VERSIONS, step=5)
    assert metrics["batch/response_tokens"] == 0.5
    assert metrics["batch/prompt_tokens"] == 3.0
    assert metrics["batch/versions_mean"] == 1.0
    assert "batch/staleness_mean" not in batch_metrics([[silent]], VERSIONS, step=5)


def test_no_trajectory_leaves_only_the_counts() -> None:
    assert batch_metrics([], {}, step=1) == {"batch/groups": 0.0, "batch/trajectories": 0.0}


def test_turns_the_environment_named_no_action_for_are_left_out_of_the_valid_share() -> None:
    metrics = batch_metrics([[episode(("", [5]), ("invalid", [5]), ("answer", [5]))]], VERSIONS, step=5)
    assert metrics["batch/valid_action_share"] == 0.5


def test_a_version_of_which_nothing_is_known_is_refused_by_name() -> None:
    with pytest.raises(TrajectoryError, match=r"step 9 holds tokens of versions \[8\]"):
        batch_metrics([[episode(("answer", [5, 8]))]], VERSIONS, step=9)


def test_the_catalogue_defines_every_name() -> None:
    assert unknown(batch_metrics(_two_groups(), VERSIONS, step=6)) == []


def test_a_batch_of_the_quickstart_takes_less_than_fifteen_milliseconds() -> None:
    groups = [[episode(("search", [4] * 9), ("answer", [5] * 9), sample=(g, k)) for k in range(16)] for g in range(24)]
    fastest = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        batch_metrics(groups, VERSIONS, step=6)
        fastest = min(fastest, time.perf_counter() - started)
    assert fastest < 0.015
