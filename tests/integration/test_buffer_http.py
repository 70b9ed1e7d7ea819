"""The replay buffer over HTTP: the real client, a real server in a process of its own, and what a kill -9 leaves."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from agentrl.buffer import journal as journals
from agentrl.buffer.records import BatchTaken, TaskIssued, TicketsIssued, TrajectoryAdded
from agentrl.buffer_api import BufferClient, Grant, Outcome
from agentrl.errors import BufferUnavailable, CheckpointError, ReplayBufferError, StaleIncarnation, WireError
from agentrl.types import CloseCause, Purpose, Reward, StopReason, Ticket, Trajectory
from agentrl.wire import decode_trajectory, encode_trajectory

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("buffer_program.py")
OPTIONS: dict[str, Any] = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 1, "total_steps": 3, "debug": True}


class Server:
    """The buffer's process."""

    def __init__(self, journal: Path, **options: Any) -> None:
        self.journal, self.options, self.port, self.incarnation = journal, OPTIONS | options, 0, 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, run: int = 1, faults: str = "") -> None:
        self.incarnation += 1
        arguments = [str(self.journal), str(self.port), str(self.incarnation), str(run), json.dumps(self.options)]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments], stdout=subprocess.PIPE, text=True, env=os.environ | {"AGENTRL_FAULTS": faults}
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().split()[1])

    def died(self) -> int:
        assert self.process is not None
        code = self.process.wait(timeout=10)
        self.end()
        return code

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)
            if self.process.stdout is not None:
                self.process.stdout.close()
            self.process = None


@contextmanager
def serving(journal: Path, **options: Any) -> Iterator[Server]:
    server = Server(journal, **options)
    server.start(faults=options.pop("faults", ""))
    try:
        yield server
    finally:
        server.end()


def worker(server: Server, **options: Any) -> BufferClient:
    return BufferClient(server.url, role="worker", index=0, incarnation=1, **options)


def learner(server: Server, **options: Any) -> BufferClient:
    return BufferClient(server.url, role="learner", index=0, incarnation=1, **options)


def driver(server: Server, **options: Any) -> BufferClient:
    return BufferClient(server.url, role="driver", index=0, incarnation=1, **options)


def play(main: Callable[[], Any]) -> Any:
    async def bounded() -> Any:
        with trio.fail_after(30):
            return await main()

    return trio.run(bounded)


def trajectory_of(ticket: Ticket, version: int = 0) -> bytes:
    return encode_trajectory(
        Trajectory(
            ticket=ticket,
            task_id=f"t{ticket.ordinal}",
            source="default",
            token_ids=np.array([1, 2, 3], dtype=np.int32),
            loss_mask=np.array([0, 0, 1], dtype=np.uint8),
            behaviour_logprobs=np.array([0, 0, -0.5], dtype=np.float32),
            versions=np.array([-1, -1, version], dtype=np.int32),
            turns=(),
            reward=Reward(total=1.0, tokens=(2,), amounts=(1.0,)),
            stop=StopReason.ANSWERED,
            dispatched_s=0.0,
            finished_s=1.0,
            worker=0,
            incarnation=1,
        )
    )


def played(grants: tuple[Grant, ...], version: int = 0) -> list[Outcome]:
    return [Outcome(ticket=grant.ticket, trajectory=trajectory_of(grant.ticket, version)) for grant in grants]


def test_a_worker_a_learner_and_a_driver_finish_a_run_with_evaluations(tmp_path: Path) -> None:
    async def work(server: Server) -> int:
        request = played_tickets = 0
        async with worker(server) as client:
            while True:
                granted = await client.take_tickets(request=request, want=3, wait_s=5.0)
                request += 1
                if granted.ended:
                    return played_tickets
                version = (await client.status())["versions"]["published"]
                assert all(await client.close_tickets(played(granted.grants, version)))
                played_tickets += len(granted.grants)

    async def learn(server: Server) -> None:
        async with learner(server) as client:
            version = await client.reserve_version(reason="initial")
            await client.version_published(version=version, engines=[0], seconds=0.1, bytes=1)
            number = 0
            while (grant := await client.take_batch(number=number, wait_s=5.0)) is None or grant.end is None:
                if grant is None:
                    continue
                assert [decode_trajectory(data).ticket.sample for group in grant.groups for data in group] == [
                    (ordinal, k) for ordinal in (2 * number, 2 * number + 1) for k in range(2)
                ]
                assert grant.progress == pytest.approx(number / 3)
                assert all(info.staleness(grant.step) <= 1 for info in grant.versions.values())
                reply = await client.batch_trained(batch=grant.batch, updates_done=1, updates_skipped=0, seconds=(0.0, 1.0), metrics={"loss": 0.5})
                assert reply.step == number + 1
                assert reply.version == number + 1
                mark = await client.sync_journal()
                manifest = {"id": f"step-{mark.step}", "step": mark.step, "consumed": mark.consumed, "offset": mark.offset}
                await client.checkpoint_committed(manifest)
                await client.version_published(version=reply.version, engines=[0], seconds=0.1, bytes=1)
                number += 1
            assert grant.end == "finished"

    async def watch(server: Server) -> list[dict[str, Any]]:
        seen: list[dict[str, Any]] = []
        async with driver(server) as client:
            after = 0
            while not any(event.get("phase") == "finished" for event in seen):
                events, after = await client.events(after=after, wait_s=5.0)
                seen += events
            assert [event["seq"] for event in seen] == list(range(1, len(seen) + 1))
            assert (await client.status())["ledger"]["trained"] == 12
        return seen

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, server)
            nursery.start_soon(learn, server)
            events.extend(await watch(server))

    events: list[dict[str, Any]] = []
    with serving(tmp_path, eval_sets={"heldout": {"n": 2}}, eval_every=2) as server:
        play(main)
    evaluations = [(event["stage"], event["step"], event["payload"]) for event in events if event["kind"] == "evaluation"]
    assert evaluations == [(stage, step, {"set": "heldout", "played": 6}) for stage, step in (("initial", 0), ("periodic", 2), ("final", 3))]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3]


def test_a_buffer_killed_between_the_journal_and_the_reply_gives_the_same_answers_after_its_restart(tmp_path: Path) -> None:
    async def call_while_it_dies(server: Server, call: Callable[[], Any]) -> Any:
        """Make a call whose record kills the server; restart it while the client tries again."""
        answer: list[Any] = []

        async def calling() -> None:
            answer.append(await call())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(calling)
            assert await trio.to_thread.run_sync(server.died) == -signal.SIGKILL
            await trio.to_thread.run_sync(server.start)
        return answer[0]

    async def restart(server: Server, passage: int) -> None:
        server.end()
        await trio.to_thread.run_sync(partial(server.start, faults=f"journal.appended=kill@{passage}"))

    async def main(server: Server) -> None:
        async with worker(server) as working, learner(server) as learning:
            await learning.reserve_version(reason="initial")
            await learning.version_published(version=0, engines=[0], seconds=0.0, bytes=0)
            await restart(server, 2)  # passage 1 is the opening's own
            tickets = await call_while_it_dies(server, partial(working.take_tickets, request=0, want=4, wait_s=1.0))
            assert [grant.ticket.name for grant in tickets.grants] == [f"train/{i}/{k}/0" for i in range(2) for k in range(2)]
            await restart(server, 2)
            assert await call_while_it_dies(server, partial(working.close_tickets, played(tickets.grants))) == (True,) * 4
            await restart(server, 2)
            batch = await call_while_it_dies(server, partial(learning.take_batch, number=0, wait_s=1.0))
            assert (batch.batch, len(batch.groups)) == (0, 2)
            await restart(server, 2)
            trained = partial(learning.batch_trained, batch=0, updates_done=1, updates_skipped=0, seconds=(0.0, 1.0), metrics={})
            reply = await call_while_it_dies(server, trained)
            assert (reply.version, reply.step) == (1, 1)
            status = await working.status()
            assert status["ledger"]["trained"] == 4
            assert status["tickets"]["late"] == {}

    with serving(tmp_path) as server:
        play(partial(main, server))
    records = [record for _, record in journals.read(tmp_path)]
    assert [type(record) for record in records if isinstance(record, TicketsIssued | TrajectoryAdded | BatchTaken)] == [
        TicketsIssued,
        *[TrajectoryAdded] * 4,
        BatchTaken,
    ]


def test_a_group_is_filtered_once_also_where_the_buffer_dies_between_the_record_and_the_reply(tmp_path: Path) -> None:
    async def main(server: Server) -> None:
        async with worker(server) as working, learner(server) as learning:
            await learning.reserve_version(reason="initial")
            await learning.version_published(version=0, engines=[0], seconds=0.0, bytes=0)
            tickets = await working.take_tickets(request=0, want=3, wait_s=1.0)
            assert [(grant.ticket.k, grant.temperature) for grant in tickets.grants] == [(0, 1.0), (1, 1.0), (2, 0.0)]
            server.end()
            await trio.to_thread.run_sync(partial(server.start, faults="journal.appended=kill@2"))  # passage 1 is the opening's own
            answers: list[Any] = []

            async def closing() -> None:
                answers.append(await working.close_tickets(played(tickets.grants)))  # all earn 1: nothing to learn

            async with trio.open_nursery() as nursery:
                nursery.start_soon(closing)
                assert await trio.to_thread.run_sync(server.died) == -signal.SIGKILL
                await trio.to_thread.run_sync(server.start)
            assert answers == [(True,) * 3]
            status = await working.status()
            assert status["filter"] == {"completed": 1, "filtered": 1, "in_row": 1}
            assert status["dropped"] == {"filtered": 3}
            assert status["tickets"]["late"] == {}

    with serving(tmp_path, filter="mixed", greedy_baseline=True) as server:
        play(partial(main, server))


@pytest.mark.parametrize("acknowledge", ["memory", "wal", "fsync"])
def test_many_calls_at_once_are_all_answered_at_every_acknowledgement_level(tmp_path: Path, acknowledge: str) -> None:
    async def one(client: BufferClient, request: int) -> None:
        granted = await client.take_tickets(request=request, want=4, wait_s=5.0)
        assert await client.close_tickets(played(granted.grants)) == (True,) * len(granted.grants)

    async def main(server: Server) -> None:
        async with worker(server) as client, learner(server) as learning:
            await learning.reserve_version(reason="initial")
            await learning.version_published(version=0, engines=[0], seconds=0.0, bytes=0)
            async with trio.open_nursery() as nursery:
                for request in range(25):
                    nursery.start_soon(one, client, request)
            assert (await client.status())["ledger"]["buffered"] == 100

    with serving(tmp_path, acknowledge=acknowledge, groups_per_batch=25) as server:
        play(partial(main, server))


def test_refusals_come_back_as_the_errors_they_are(tmp_path: Path) -> None:
    async def main(server: Server) -> None:
        async with driver(server) as driving, worker(server) as working, learner(server) as learning:
            unknown = Ticket(purpose=Purpose.TRAIN, ordinal=5, k=0, attempt=0)
            with pytest.raises(ReplayBufferError, match="never issued"):
                await working.close_tickets([Outcome(ticket=unknown, cause=CloseCause.TOOL_ERROR)])
            with pytest.raises(CheckpointError, match="surviving history"):
                await learning.rollback({"id": "x", "step": 3, "consumed": [[0, 2]]})
            with pytest.raises(WireError, match="manifest"):
                await learning.rollback({"step": 3})
            await driving.register(role="worker", index=0, incarnation=2)
            with pytest.raises(StaleIncarnation, match="replaced by incarnation 2"):
                await working.take_tickets(request=0, want=1, wait_s=0.0)

    with serving(tmp_path) as server:
        play(partial(main, server))


def test_a_long_poll_of_a_worker_that_was_replaced_gets_no_tickets(tmp_path: Path) -> None:
    async def refused_in_the_end(working: BufferClient) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(polling, working)
            await working.heartbeat({"polls": True})

    async def polling(working: BufferClient) -> None:
        with pytest.raises(StaleIncarnation):
            await working.take_tickets(request=0, want=1, wait_s=10.0)

    async def main(server: Server) -> None:
        async with driver(server) as driving, worker(server) as working, learner(server) as learning:
            await learning.reserve_version(reason="initial")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(refused_in_the_end, working)
                while "worker-0" not in (await driving.status())["heartbeats"]:
                    pass
                await driving.register(role="worker", index=0, incarnation=2)
                await learning.version_published(version=0, engines=[0], seconds=0.0, bytes=0)
            assert (await driving.status())["tickets"]["issued"] == 0

    with serving(tmp_path) as server:
        play(partial(main, server))


def test_a_buffer_that_is_not_there_is_said_to_be_unavailable_at_the_deadline(tmp_path: Path) -> None:
    async def main(server: Server) -> None:
        server.end()
        async with worker(server, deadline_s=0.3) as client:
            with pytest.raises(BufferUnavailable, match=r"status: the buffer at .* gave no answer within 0.3 s; last: Connect"):
                await client.status()

    with serving(tmp_path) as server:
        play(partial(main, server))


def test_a_full_disk_closes_admission_and_the_calls_it_holds_up_succeed_when_there_is_room(tmp_path: Path) -> None:
    async def take(client: BufferClient, taken: list[str]) -> None:
        granted = await client.take_tickets(request=0, want=4, wait_s=0.0)
        taken += [grant.ticket.name for grant in granted.grants]

    async def main(server: Server) -> None:
        assert server.process is not None
        async with driver(server) as driving, worker(server, deadline_s=1.0) as working, learner(server) as learning:
            await learning.reserve_version(reason="initial")
            await learning.version_published(version=0, engines=[0], seconds=0.0, bytes=0)
            size = (await driving.status())["journal"]["bytes"]
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
            taken: list[str] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take, working, taken)
                while (await driving.status())["journal"]["trouble"] is None:
                    pass
                await trio.sleep(1.5)  # longer than the worker's deadline: the buffer's answers keep it waiting
                assert taken == []
                assert await driving.heartbeat({})
                resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert taken == ["train/0/0/0", "train/0/1/0", "train/1/0/0", "train/1/1/0"]
            assert (await driving.status())["journal"]["trouble"] is None
        assert [type(record) for _, record in journals.read(tmp_path)][-3:] == [TaskIssued, TaskIssued, TicketsIssued]

    with serving(tmp_path) as server:
        play(partial(main, server))


def test_whoever_follows_the_roster_hears_of_every_change_at_once_and_nothing_while_there_is_none(tmp_path: Path) -> None:
    async def main(server: Server) -> None:
        async with driver(server) as driving, worker(server) as working, learner(server) as learning:

            async def hears(change: Callable[[], Any], after: int) -> Any:
                """What a long poll answers that began before the change."""
                heard = []
                async with trio.open_nursery() as nursery:

                    async def listen() -> None:
                        heard.append(await working.engines(after=after, wait_s=20.0))

                    nursery.start_soon(listen)
                    await trio.sleep(0.05)
                    assert heard == []
                    await change()
                return heard[0]

            await driving.register(role="engine", index=0, incarnation=3)
            began = await hears(lambda: driving.register(role="engine", index=0, incarnation=3, url="http://zero"), 0)
            assert [(entry.url, entry.current) for entry in began.engines] == [("http://zero", False)]
            current = await hears(lambda: learning.engine_current(0, 3, 7), began.revision)
            assert [(entry.version, entry.current) for entry in current.engines] == [(7, True)]
            assert not await learning.engine_current(0, 2, 8)
            fenced = await hears(lambda: learning.engine_fenced(0, 3, "late", give_up=True), current.revision)
            assert [(entry.current, entry.reason, entry.given_up) for entry in fenced.engines] == [(False, "late", True)]
            assert (await driving.status())["engines"] == [asdict(fenced.engines[0])]
            gone = await hears(lambda: driving.engine_died(0, 3), fenced.revision)
            assert gone.engines == ()
            assert await working.engines(after=gone.revision, wait_s=0.1) == gone

    with serving(tmp_path) as server:
        play(partial(main, server))
