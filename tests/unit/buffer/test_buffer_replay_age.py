"""How long after its first use a group is used again: what docs/staleness.md says of reuse x fresh."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from buffer_play import Player, open_buffer, settings

STEPS = 48
GROUPS = 4


def lags_and_new_share(directory: Path, *, reuse: int, fresh: float, max_token_age: int | None = None) -> tuple[list[int], float]:
    """Steps from the first use of each reused group to its later ones, and the share of new groups, over the second half of a run."""
    options = {"group_size": 1, "total_steps": STEPS, "max_staleness": 0, "groups_per_batch": GROUPS, "debug": False}
    player = Player(open_buffer(directory, settings=settings(**options, reuse=reuse, fresh=fresh, max_token_age=max_token_age)))
    player.start()
    for _ in range(STEPS):
        player.step()
    taken = [batch.taken for batch in player.buffer.state.batches.by_id.values()]
    first = {ordinal: batch.step for batch in taken for ordinal, use, _ in batch.groups if use == 0}
    late = [(batch.step - first[ordinal], use) for batch in taken[STEPS // 2 :] for ordinal, use, _ in batch.groups]
    return [lag for lag, use in late if use], sum(use == 0 for _, use in late) / len(late)


def test_uses_that_fit_into_the_batches_are_taken_at_once(tmp_path: Path) -> None:
    # a group brings one further use, three of four places wait for one: half of every batch is new instead of a quarter
    lags, new = lags_and_new_share(tmp_path, reuse=2, fresh=0.25)
    assert set(lags) == {1}
    assert new == 0.5


@pytest.mark.parametrize("reuse", [2, 4])
def test_uses_that_just_fit_come_as_many_steps_later_as_there_are_uses(tmp_path: Path, reuse: int) -> None:
    lags, new = lags_and_new_share(tmp_path, reuse=reuse, fresh=1 / reuse)
    assert mean(lags) == pytest.approx(reuse, abs=0.25)
    assert new == 1 / reuse


def test_more_uses_than_fit_grow_old_unless_tokens_may_not(tmp_path: Path) -> None:
    lags, _ = lags_and_new_share(tmp_path / "free", reuse=4, fresh=0.5)
    assert mean(lags) > STEPS / 4
    lags, _ = lags_and_new_share(tmp_path / "bound", reuse=4, fresh=0.5, max_token_age=8)
    assert max(lags) <= 8
