"""A curriculum in the replay buffer: what it is told, and that crashes and resumes change nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from buffer_play import Player, open_buffer, settings

from agentrl.data.curriculum import Curriculum, CurriculumOrder
from agentrl.errors import DataError
from agentrl.types import CloseCause, Task

TASKS = tuple(Task(id=f"t{index}", prompt="?") for index in range(6))


class Frontier(Curriculum):
    """The task whose mean reward so far is nearest to one half, of those played least; ties by a draw of the ordinal's own."""

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0) -> None:
        super().__init__(tasks)
        self.seed = seed
        self.played = [0] * len(tasks)
        self.rewards: list[list[float]] = [[] for _ in tasks]
        self.told: list[Any] = []

    def next(self, ordinal: int) -> int:
        draw = random.Random(f"{self.seed}/{ordinal}")
        return min(range(len(self.tasks)), key=lambda index: (self.played[index], self.distance(index), draw.random()))

    def distance(self, index: int) -> float:
        seen = self.rewards[index]
        return abs(sum(seen) / len(seen) - 0.5) if seen else 0.0

    def issued(self, ordinal: int, index: int) -> None:
        self.played[index] += 1
        self.told.append((ordinal, index))

    def finished(self, index: int, rewards: Sequence[float]) -> None:
        self.rewards[index] += rewards
        self.told.append((index, tuple(rewards)))


def opened(directory: Path, curriculum: Curriculum, *, incarnation: int = 1, run: int = 1, **changes: Any) -> Player:
    order = CurriculumOrder(TASKS, curriculum)
    return Player(open_buffer(directory, incarnation=incarnation, run=run, tasks=order, settings=settings(**({"total_steps": 99} | changes))))


def killed(player: Player, curriculum: Curriculum, *, incarnation: int, run: int = 1) -> Player:
    player.buffer.commit()
    player.buffer.journal.abandon()
    order = CurriculumOrder(TASKS, curriculum)
    player.buffer = open_buffer(player.buffer._directory, incarnation=incarnation, run=run, tasks=order, settings=player.buffer.settings)
    return player


def test_it_decides_what_comes_next_and_is_told_of_every_group_in_order(tmp_path: Path) -> None:
    frontier = Frontier(TASKS)
    player = opened(tmp_path, frontier, filter="mixed", max_attempts=1)
    player.start()
    grants = player.take()
    issued = [(ordinal, frontier.told[ordinal][1]) for ordinal in range(4)]
    assert [grant.task.id for grant in grants[::2]] == [f"t{index}" for _, index in issued]
    first, second, third, _ = (index for _, index in issued)
    player.finish(grants[2], reward=1.0)
    player.fail(grants[3], CloseCause.TOOL_ERROR)  # dropped with one trajectory
    player.open.remove(grants[0])
    player.open.remove(grants[1])
    player.open = [grants[0], grants[1], *player.open]
    player.finish_group(0.5, 0.5)  # filtered
    player.finish_group(1.0, 0.0)  # kept
    assert frontier.told == [*issued, (second, (1.0,)), (first, (0.5, 0.5)), (third, (1.0, 0.0))]


def test_a_new_process_is_told_the_same_and_decides_the_same(tmp_path: Path) -> None:
    frontier, again = Frontier(TASKS, seed=3), Frontier(TASKS, seed=3)
    player = opened(tmp_path, frontier)
    player.start()
    for rewards in ((1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        player.take(2)
        player.finish_group(*rewards)
        if player.buffer.state.groups.ready == 2:
            player.train(player.take_batch())
    player.take(2)
    killed(player, again, incarnation=2)
    assert again.told == frontier.told
    assert [again.next(ordinal) for ordinal in range(6, 30)] == [frontier.next(ordinal) for ordinal in range(6, 30)]
    assert [grant.task.id for grant in player.take(2)] == [f"t{frontier.next(6)}"] * 2


def test_a_retry_after_a_resume_plays_the_task_that_the_journal_names(tmp_path: Path) -> None:
    player = opened(tmp_path, Frontier(TASKS, seed=1))
    player.start()
    names = [grant.task.id for grant in player.take(4)]
    killed(player, Frontier(TASKS, seed=2), incarnation=2, run=2)  # another seed would have chosen others
    player.start("restored")
    assert [grant.task.id for grant in player.take(4)] == names


def test_a_rollback_that_reads_the_whole_journal_again_tells_nothing_twice(tmp_path: Path) -> None:
    frontier = Frontier(TASKS)
    player = opened(tmp_path, frontier, keep_checkpoints=1)
    zero = {"id": "zero", "step": 0, "consumed": ()}
    player.start()
    player.buffer.checkpoint_committed(zero)
    player.step()
    mark = player.buffer.mark()
    player.buffer.checkpoint_committed({"id": "one", "step": 1, "consumed": mark.consumed})
    told = list(frontier.told)
    player.buffer.rollback(player.learner, zero)
    assert player.buffer.state.groups.ledger["buffered"] > 4
    assert frontier.told == told


def test_a_curriculum_that_fails_ends_the_run_with_its_name(tmp_path: Path) -> None:
    class Lost(Frontier):
        def next(self, ordinal: int) -> int:
            return 6

    class Stumbling(Frontier):
        def finished(self, index: int, rewards: Sequence[float]) -> None:
            raise KeyError(index)

    player = opened(tmp_path / "lost", Lost(TASKS))
    player.start()
    assert player.take() == []
    assert player.buffer.status()["halt"]["reason"].endswith("next(0) returned 6: expected an index of the 6 tasks")
    player = opened(tmp_path / "stumbling", Stumbling(TASKS))
    player.start()
    player.take()
    player.finish_group(1.0, 0.0)
    player.finish_group(1.0, 0.0)
    assert "tasks.curriculum: finished of ordinal 0 failed: KeyError" in player.buffer.status()["halt"]["reason"]
    assert player.buffer.state.groups.admission.buffered == 2
    killed(player, frontier := Frontier(TASKS), incarnation=2, run=2)  # put right, it is told all of it
    assert [told for told in frontier.told if isinstance(told[1], tuple)] == [(frontier.told[0][1], (1.0, 0.0)), (frontier.told[1][1], (1.0, 0.0))]


def test_task_files_that_lost_a_task_are_noticed_at_once(tmp_path: Path) -> None:
    player = opened(tmp_path, Frontier(TASKS))
    player.start()
    player.take()
    player.buffer.commit()
    player.buffer.journal.abandon()
    with pytest.raises(DataError, match=r"task \d of the run was 't\d', which is not among the 1 tasks any more"):
        open_buffer(tmp_path, incarnation=2, tasks=CurriculumOrder(TASKS[:1], Frontier(TASKS[:1])))
