"""A learner rank's program: takes batches, trains, publishes beside training, checkpoints at step boundaries.

    take_batch ─> train ─> batch_trained ─> gather ─> (publish loop, rank 0) ─> checkpoint every n steps ─┐
        ^                        └─ an alarm ─> back to a good checkpoint ─> gather ─> (publish loop) ────┤
        └─────────────────────────────────────────────────────────────────────────────────────────────────┘

Every rank asks for the same batch by the same number and gets the same bytes; rank 0 alone reports, publishes, commits and watches over the
run's health.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import torch
import trio

from agentrl.buffer_api import BatchGrant, BufferClient
from agentrl.collective import torch_dtype
from agentrl.config.recipe import Recipe
from agentrl.engine_api import EngineClient
from agentrl.errors import AgentRLError, CheckpointError, EngineError, Failure, HealthError
from agentrl.faults import point
from agentrl.learner import checkpoint
from agentrl.learner.batch import TrainingBatch
from agentrl.learner.learner import Learner, StepReport
from agentrl.learner.ranks import Ranks
from agentrl.metrics.batch import batch_metrics
from agentrl.metrics.health import Alarm
from agentrl.record import Recorder, record
from agentrl.system.address import bind_address
from agentrl.system.canary import Canary
from agentrl.system.colocation import Turns, engines_sleep
from agentrl.system.engine_profiles import start_engine_profiles
from agentrl.system.engines import engine_clients
from agentrl.system.guard import Guard
from agentrl.system.process import OnReady, ProcessSpec, StopSignal
from agentrl.system.publishing import Publishing
from agentrl.system.snapshots import SnapshotDirectories
from agentrl.types import Trajectory
from agentrl.weights import Publisher, Snapshot, save_snapshot
from agentrl.wire import decode_trajectory

__all__ = ["LearnerProgram", "main", "token_ages"]

log = logging.getLogger(__name__)

BATCH_POLL_S = 20.0  # one long poll; the next follows at once
HEARTBEAT_S = 2.0
_ROUND = 0.25  # of the time that ranks have to come to a collective: while rank 0 waits for engines it meets the others so often


def main(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    """Train until the buffer says the run has ended. Payload: buffer, model_dir, rendezvous."""
    recipe = Recipe.model_validate(spec.recipe)
    torch.set_num_threads(recipe.learner.threads)
    trio.run(LearnerProgram(spec, recipe, stop).run, on_ready)


class LearnerProgram:
    """One rank, from its first breath to the run's end."""

    def __init__(self, spec: ProcessSpec, recipe: Recipe, stop: StopSignal) -> None:
        self.spec, self.recipe, self.stop = spec, recipe, stop
        self.run_dir, self.model_dir = Path(spec.run_dir), Path(spec.payload["model_dir"])
        self.lead = spec.index == 0
        self.incarnation = spec.incarnation  # the group's: that of rank 0, once the ranks have met
        self.step = 0
        self.checkpointed: int | None = None  # step of the newest checkpoint
        self._checkpoint_s = 0.0  # what it took, told with the next step
        self._waiting_since = time.monotonic()
        self.buffer: BufferClient
        self.learner: Learner
        self.publishing: Publishing  # on rank 0 alone
        self.canary: Canary | None
        self.guard: Guard  # on rank 0 alone

    async def run(self, on_ready: OnReady) -> None:
        """Build, restore, then train and publish side by side until there are no more batches."""
        recipe, payload = self.recipe, self.spec.payload
        learner_recipe = recipe.learner
        ranks = await trio.to_thread.run_sync(
            Ranks.join,
            self.spec.index,
            learner_recipe.ranks,
            payload["rendezvous"],
            learner_recipe.device,
            learner_recipe.collective_deadline_s,
            learner_recipe.replicate,
        )
        self.learner = await trio.to_thread.run_sync(Learner.build, recipe, self.model_dir, ranks, self.run_dir)
        self.canary = await trio.to_thread.run_sync(Canary.of, recipe, self.model_dir)
        spec = self.spec
        async with (
            BufferClient(payload["buffer"], role=spec.role, index=spec.index, incarnation=spec.incarnation) as self.buffer,
            trio.open_nursery() as nursery,
        ):
            self.stop.cancels(nursery.cancel_scope)
            nursery.start_soon(self._heartbeat_loop)
            if self.lead:
                self.publishing = self._make_publishing()
                nursery.start_soon(self.publishing.follow_loop)
            on_ready({})
            await self._restore()
            await self._work()
            if self.lead:
                await self.publishing.aclose()
            nursery.cancel_scope.cancel()

    def _make_publishing(self) -> Publishing:
        recipe, directory = self.recipe, self.run_dir / "weights"
        # NCCL refuses a group with two processes on one GPU
        nccl = recipe.learner.device == "cuda" and recipe.engine.device == "cuda" and not recipe.resources.colocate
        backend = "nccl" if nccl else "gloo"
        publisher = Publisher(recipe.weights, model_dir=self.model_dir, directory=directory, device_backend=backend, address=bind_address(recipe))
        return Publishing(
            self.buffer,
            publisher,
            SnapshotDirectories(directory, self.model_dir, keep=recipe.weights.keep_snapshots),
            connect=engine_clients(recipe),
            listen=self._hear_canary,
            sharing=engines_sleep(recipe),
        )

    async def _work(self) -> None:
        send, receive = trio.open_memory_channel[Snapshot](1)
        async with trio.open_nursery() as nursery:
            if self.lead:
                nursery.start_soon(self.publishing.publish_loop, receive.clone())
            with send, receive:
                await self._train_loop(send, receive)

    async def _train_loop(self, send: trio.MemorySendChannel[Snapshot], unsent: trio.MemoryReceiveChannel[Snapshot]) -> None:
        """Train batch after batch.

        consumes      batches of the buffer, by number
        produces      batch_trained records, checkpoints, snapshots (a newer one replaces an unsent one), alarms and what follows from them
        waits for     the next batch; its own training
        unblocked by  the buffer's answer that the run has ended, which this rank follows with a last checkpoint
        """
        number = 0
        while (grant := await self._next_batch(number)).end is None:
            number += 1
            version, alarms = await self._train_one(grant)
            if await self._must_roll_back(alarms):
                await self._publish(await self._roll_back(version, alarms), send, unsent)
            else:
                if grant.publishes:
                    await self._publish(version, send, unsent)
                if self.step % self.recipe.checkpoint.every == 0:
                    await self._checkpoint()
            if (pausing := _with_action(alarms, "pause")) is not None:
                await self.buffer.stop(f"paused by {pausing}")
        if self.lead and grant.end == "stopped":
            self.publishing.stop()
        if self.checkpointed != self.step:
            await self._checkpoint()

    async def _next_batch(self, number: int) -> BatchGrant:
        self._waiting_since = time.monotonic()
        while (grant := await self.buffer.take_batch(number=number, wait_s=BATCH_POLL_S)) is None:
            continue
        return grant

    async def _train_one(self, grant: BatchGrant) -> tuple[int | None, list[Alarm]]:
        """Train one batch and report it. Returns the version reserved for what it made (where it publishes) and the alarms it raised: rank 0."""
        with Recorder() as recorder:
            record("seconds/wait_batch", time.monotonic() - self._waiting_since)
            record("seconds/checkpoint", self._checkpoint_s)
            groups = [[decode_trajectory(raw) for raw in group] for group in grant.groups]
            if self.lead:
                await start_engine_profiles(self.recipe, self.buffer, self.run_dir, grant.step)
            self._checkpoint_s = 0.0
            async with self._turn():
                started = time.time()
                report = await trio.to_thread.run_sync(self._train, groups, grant)
                ended = time.time()
        if report.skipped_in_row > self.recipe.learner.max_skipped_batches:
            raise AgentRLError(f"{report.skipped_in_row} batches in a row gave no finite update: the last ones are in {self.run_dir / 'skipped'}")
        self.step = grant.step + 1
        if not self.lead:
            return None, []
        metrics = recorder.means() | report.metrics | batch_metrics(groups, grant.versions, grant.step)
        metrics |= self.publishing.take_metrics() | (self.canary.take_metrics() if self.canary is not None else {})
        alarms = await trio.to_thread.run_sync(self.guard.observe, self.step, metrics)
        reply = await self.buffer.batch_trained(
            batch=grant.batch,
            updates_done=report.updates_done,
            updates_skipped=report.updates_skipped,
            seconds=(started, ended),
            metrics=metrics | {f"alarm/{alarm.name}": 1.0 for alarm in alarms},
        )
        return reply.version, alarms

    def _turn(self) -> AbstractAsyncContextManager[None]:
        """The GPUs are the learner's inside."""
        if not self.recipe.resources.colocate:
            return nullcontext()
        turns = Turns(lambda value: self._agree((value,))[0], round_s=self.recipe.learner.collective_deadline_s * _ROUND)
        return turns.training(self.publishing if self.lead else None)

    def _train(self, groups: list[list[Trajectory]], grant: BatchGrant) -> StepReport:
        return self.learner.train(TrainingBatch.of(groups, token_ages(grant)), step=grant.step, progress=grant.progress)

    async def _publish(self, version: int | None, send: trio.MemorySendChannel[Snapshot], unsent: trio.MemoryReceiveChannel[Snapshot]) -> None:
        """Gather the weights; the publish loop sends the first while the next are gathered, unless they are to be on disk before."""
        snapshot, keep = await self._begun(version), self.recipe.weights.keep_snapshots
        if not keep:
            await self._hand_over(snapshot, send, unsent)
        await trio.to_thread.run_sync(self._gather, snapshot)
        if keep:
            if self.lead:
                await trio.to_thread.run_sync(save_snapshot, snapshot, self._kept(snapshot.version), self.model_dir)
            await self._hand_over(snapshot, send, unsent)

    async def _snapshot(self, version: int | None) -> Snapshot:
        """The weights, gathered."""
        snapshot = await self._begun(version)
        await trio.to_thread.run_sync(self._gather, snapshot)
        return snapshot

    async def _begun(self, version: int | None) -> Snapshot:
        number, dtype = -1 if version is None else version, self.recipe.weights.dtype
        if self.canary is not None:  # before the first bucket: whoever gets this version may be asked about it at once
            await self.canary.listen(self.learner, number)
        return Snapshot(version=number, step=self.step, dtype=None if dtype is None else torch_dtype(dtype))

    def _gather(self, snapshot: Snapshot) -> None:
        """A collective, so every rank takes part; rank 0 keeps the weights."""
        snapshot.fill(self.learner.gather(self.recipe.weights.bucket_mb * 2**20))

    async def _hand_over(self, snapshot: Snapshot, send: trio.MemorySendChannel[Snapshot], unsent: trio.MemoryReceiveChannel[Snapshot]) -> None:
        if not self.lead:
            return
        self.publishing.expect(snapshot.version)
        try:
            send.send_nowait(snapshot)
        except trio.WouldBlock:
            superseded = unsent.receive_nowait()
            send.send_nowait(snapshot)
            await self.buffer.version_superseded(superseded.version)

    async def _hear_canary(self, snapshot: Snapshot, engines: Sequence[EngineClient]) -> None:
        """Where it is due: end the run if an engine gives other log-probs than the learner under the same version, or refuses to give any."""
        if self.canary is None:
            return
        try:
            await self.canary.check(snapshot, engines, run_dir=self.run_dir, model_dir=self.model_dir)
        except (EngineError, HealthError) as error:
            await self.buffer.fail(Failure.of(error))
            raise

    async def _restore(self) -> None:
        """Bring learner, journal and engines to one state: the newest valid checkpoint's, or checkpoint 0's."""
        (group,) = await trio.to_thread.run_sync(self._agree, (float(self.spec.incarnation),))
        self.incarnation = int(group)  # all ranks write into one checkpoint
        if self.lead:
            self.guard = await trio.to_thread.run_sync(Guard, self.recipe, self.run_dir)
        manifest = await self._choose() if self.lead else None
        version: int | None = None
        if manifest is not None:
            version = await self.buffer.reserve_version(reason="restored")
            await trio.to_thread.run_sync(self.guard.resume, manifest.step, version)
        if not await self._return_to(manifest):
            await self._checkpoint()
            version = await self.buffer.reserve_version(reason="initial") if self.lead else None
        snapshot = await self._snapshot(version)
        if self.lead:
            await self.publishing.first(snapshot)

    async def _choose(self) -> checkpoint.Manifest | None:
        """The newest checkpoint whose files are whole and whose step the journal confirms; the journal is rolled back to it."""
        found = await trio.to_thread.run_sync(lambda: list(checkpoint.manifests(self._checkpoints)))
        for manifest in found:
            try:
                await self.buffer.rollback(manifest.for_rollback(), bad_after=self.guard.bad_after)
                return manifest
            except CheckpointError as error:
                log.warning("%s is passed over: %s", manifest.path, error)
        if found:
            raise CheckpointError(f"none of the {len(found)} checkpoints in {self._checkpoints} is confirmed by the journal")
        return None

    async def _must_roll_back(self, alarms: Sequence[Alarm]) -> bool:
        """Whether an alarm takes the run back: rank 0 knows, and tells the others."""
        if not self.recipe.health.rolls_back:
            return False
        (told,) = await trio.to_thread.run_sync(self._agree, (float(_with_action(alarms, "rollback") is not None),))
        return bool(told)

    async def _roll_back(self, version: int | None, alarms: Sequence[Alarm]) -> int | None:
        """Bring learner and journal back to the last good checkpoint. Returns the version for its weights (rank 0).

        Episodes go on meanwhile; what they and the buffer hold stays, but for groups with tokens of bad weights. No batch is out: the one that
        raised the alarm is trained and reported.
        """
        manifest, restored = None, None
        if (alarm := _with_action(alarms, "rollback")) is not None:
            if version is not None:
                await self.buffer.version_superseded(version)
            try:
                manifest = await self._go_back(alarm)
                point("rollback.journal")
            except HealthError as error:
                await self.buffer.fail(Failure.of(error))
                raise
            restored = await self.buffer.reserve_version(reason=self.guard.version_reason)
            await trio.to_thread.run_sync(self.guard.done, restored)
        await self._return_to(manifest)
        return restored

    async def _go_back(self, alarm: Alarm) -> checkpoint.Manifest:
        """The journal is rolled back to the checkpoint that is returned."""
        for manifest in self.guard.candidates(alarm):
            await trio.to_thread.run_sync(self.guard.begin, alarm, manifest)
            point("rollback.begun")
            try:
                await self.buffer.rollback(manifest.for_rollback(), bad_after=self.guard.bad_after)
                return manifest
            except CheckpointError as error:
                log.warning("%s is passed over: %s", manifest.path, error)
        raise AssertionError("unreachable: candidates end with an error")

    async def _return_to(self, manifest: checkpoint.Manifest | None) -> bool:
        """All ranks load the checkpoint that rank 0 names. False where it names none: the run is at its very beginning."""
        chosen = (-1.0, -1.0, 0.0)
        if manifest is not None:
            chosen = (manifest.learner_incarnation, manifest.step, self.guard.learning_rate_scale or 0.0)
        incarnation, step, scale = await trio.to_thread.run_sync(self._agree, chosen)
        if step < 0:
            return False
        path = self._checkpoints / checkpoint.identifier(int(incarnation), int(step))
        await trio.to_thread.run_sync(checkpoint.load, self.learner, manifest or checkpoint.read(path))
        if scale:  # the checkpoint may be older than the rollback that made it smaller
            self.learner.state.controllers.learning_rate_scale = scale
        self.step = self.checkpointed = int(step)
        return True

    def _agree(self, values: tuple[float, ...]) -> list[float]:
        """Rank 0's values, told to all ranks."""
        chosen = torch.tensor(values, dtype=torch.float64, device=self.learner.ranks.device)
        torch.distributed.broadcast(chosen, src=0)
        told: list[float] = chosen.tolist()
        return told

    async def _checkpoint(self) -> None:
        """Write, then mark the journal, then commit by a rename, then say so: in this order a crash anywhere leaves a valid state."""
        started = time.monotonic()
        pending = await trio.to_thread.run_sync(checkpoint.write, self.learner, self._checkpoints, self.step, self.incarnation)
        if self.lead:
            mark = await self.buffer.sync_journal()
            manifest = await trio.to_thread.run_sync(checkpoint.commit, pending, mark)
            await self.buffer.checkpoint_committed(manifest.for_rollback())
            good_until = self.guard.good_until
            await trio.to_thread.run_sync(lambda: checkpoint.prune(self._checkpoints, self.recipe.checkpoint.keep, good_until=good_until))
        self.checkpointed, self._checkpoint_s = self.step, time.monotonic() - started

    async def _heartbeat_loop(self) -> None:
        """Tell the buffer that this rank lives.

        consumes      nothing
        produces      heartbeats
        waits for     its own interval
        unblocked by  cancellation at the end of the work
        """
        while True:
            await self.buffer.heartbeat({"step": self.step})
            await trio.sleep(HEARTBEAT_S)

    @property
    def _checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def _kept(self, version: int) -> Path:
        return self.run_dir / "weights" / f"v{version}"


def _with_action(alarms: Sequence[Alarm], action: str) -> Alarm | None:
    return next((alarm for alarm in alarms if action in alarm.actions), None)


def token_ages(grant: BatchGrant) -> Mapping[int, int]:
    """Staleness by version: steps since it was made; for an abandoned version, versions reserved since."""
    return {version: info.staleness(grant.step) for version, info in grant.versions.items()}
