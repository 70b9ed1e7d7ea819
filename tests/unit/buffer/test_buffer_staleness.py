"""The bound on staleness: a derived property, attacked with long-tailed episodes, failures and slow learners."""

from __future__ import annotations

import heapq
import random
from pathlib import Path
from typing import Any

import pytest
from buffer_play import Player, open_buffer, settings

from agentrl.types import CloseCause
from agentrl.wire import decode_trajectory

STEPS = 60


def simulate(directory: Path, *, sigma: float, step_s: float, fail: float, seed: int, alike: float = 0.0, **changes: Any) -> list[int]:
    """Play a run in simulated time; returns the staleness of every first token that is trained on for the first time.

    Args:
        alike: share of groups whose rewards are all alike.

    Episodes take lognormal times (mean 1 s), as many run at once as there are tickets; a step takes `step_s`; publishing half of it,
    beside the next step. Whatever may happen, happens at once.
    """
    generator = random.Random(seed)
    player = Player(open_buffer(directory, settings=settings(total_steps=STEPS, debug=False, max_failed_share=1.0, **changes)))
    player.start()
    clock, order, staleness = 0.0, 0, []
    events: list[tuple[float, int, str, Any]] = []

    def later(seconds: float, kind: str, what: Any) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (clock + seconds, order, kind, what))

    training = False
    while player.buffer.state.phase == "training":
        for grant in player.take():
            later(generator.lognormvariate(-sigma * sigma / 2, sigma), "episode", (grant, player.buffer.state.versions.published))
        if not training and (batch := player.take_batch()) is not None and batch.end is None:
            training = True
            uses = [use for _, use, _ in player.buffer.state.batches.by_id[batch.batch].taken.groups]
            new = [decode_trajectory(data) for group, use in zip(batch.groups, uses, strict=True) if use == 0 for data in group]
            staleness += [batch.versions[trajectory.first_version].staleness(batch.step) for trajectory in new]
            later(step_s, "trained", batch)
        clock, _, kind, what = heapq.heappop(events)
        if kind == "episode":
            grant, version = what
            if generator.random() < fail:
                player.fail(grant, CloseCause.TOOL_ERROR)
            else:
                differs = random.Random(grant.ticket.ordinal).random() >= alike
                player.finish(grant, version=version, reward=float(differs and grant.ticket.k))
        elif kind == "trained":
            training = False
            if (version := player.train(what, publish=False)) is not None:
                later(step_s / 2, "published", version)
        else:
            player.publish(what)
    player.buffer.journal.abandon()
    return staleness


@pytest.mark.slow
@pytest.mark.parametrize("publish_every", [1, 3])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize(("sigma", "step_s", "fail"), [(0.5, 0.2, 0.0), (1.5, 0.2, 0.3), (1.5, 3.0, 0.1)])
def test_mean_staleness_of_first_tokens_stays_within_its_bound(
    tmp_path: Path, max_staleness: int, publish_every: int, sigma: float, step_s: float, fail: float
) -> None:
    staleness = simulate(
        tmp_path, sigma=sigma, step_s=step_s, fail=fail, seed=7, max_staleness=max_staleness, publish_every=publish_every, groups_per_batch=4
    )
    assert len(staleness) == STEPS * 4 * 2
    assert sum(staleness) / len(staleness) <= max_staleness + (publish_every - 1) / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"filter": "mixed"}, 1.0),  # K
        ({"filter": "mixed", "over_sample": 0.5}, 2.0),  # 1.5 * (K + 1) - 1
        ({"reuse": 2, "fresh": 0.25}, 3.0),  # 2 * (K + 1) - 1: each group fills two places, whatever `fresh` allows
        ({"reuse": 9, "fresh": 0.5, "filter": "mixed", "over_sample": 0.5}, 5.0),  # 1.5 * 2 * (K + 1) - 1
    ],
)
def test_filters_over_sampling_and_replay_keep_to_the_bounds_that_are_theirs(tmp_path: Path, changes: dict[str, Any], bound: float) -> None:
    staleness = simulate(tmp_path, sigma=1.0, step_s=0.5, fail=0.1, seed=5, alike=0.4, groups_per_batch=4, max_staleness=1, **changes)
    assert sum(staleness) / len(staleness) <= bound


@pytest.mark.slow
def test_k_0_publishing_every_step_is_the_synchronous_trainer(tmp_path: Path) -> None:
    staleness = simulate(tmp_path, sigma=1.5, step_s=0.3, fail=0.2, seed=3, max_staleness=0, groups_per_batch=3)
    assert set(staleness) == {0}
