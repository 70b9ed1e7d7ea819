"""Publishing to engines that do not exist, by a clock that jumps."""

from __future__ import annotations

import torch
import trio
import trio.testing
from roster_scene import Roster

from agentrl.engine_api import EngineClient
from agentrl.errors import PublishError
from agentrl.system.publishing import Publishing
from agentrl.weights import Published, Snapshot


class FakePublisher:
    """Brings engines to versions in `publish_s` and `sync_s` seconds, unless they are in `unreachable` (by index)."""

    def __init__(self, publish_s=1.0, sync_s=1.0):
        self.publish_s, self.sync_s = publish_s, sync_s
        self.clients = ()
        self.unreachable = {}  # index -> error
        self.published = []  # (version, engines)
        self.synced = []  # (engine, version)
        self.syncing = set()
        self.sending = trio.CancelScope()

    def set_engines(self, clients):
        self.clients = tuple(clients)
        if not clients:
            self.sending.cancel()

    async def publish(self, snapshot):
        indexes = [client.index for client in self.clients]
        assert not self.syncing & set(indexes), "an engine is loaded from disk while it takes part in a publishing"
        with trio.CancelScope() as self.sending:
            await trio.sleep(self.publish_s)
        indexes = [client.index for client in self.clients]  # those that left meanwhile take no part in the second attempt
        reached = tuple(index for index in indexes if index not in self.unreachable)
        if not reached:
            raise PublishError(f"version {snapshot.version} could not be brought to any engine")
        self.published.append((snapshot.version, reached))
        fenced = {index: "it was late" for index in indexes if index not in reached}
        return Published(version=snapshot.version, engines=reached, fenced=fenced, seconds=self.publish_s, nbytes=snapshot.nbytes)

    async def cold_sync(self, engine, version, path):
        assert path == f"v{version}"
        self.syncing.add(engine.index)
        try:
            await trio.sleep(self.sync_s)
        finally:
            self.syncing.remove(engine.index)
        if engine.index in self.unreachable:
            raise self.unreachable[engine.index]
        self.synced.append((engine.index, version))

    async def aclose(self):
        return


class FakeDirectories:
    """Versions that are on disk."""

    def __init__(self):
        self.kept = set()

    async def path(self, snapshot):
        self.kept.add(snapshot.version)
        return f"v{snapshot.version}"

    async def tidy(self, newest, *, read):
        self.kept = {version for version in self.kept if version >= newest or version in read}


class Scene:
    """A roster, a publisher, and what was heard. `connect` and `sharing` are Publishing's."""

    def __init__(self, *, connect=EngineClient, sharing=None, **publisher):
        self.roster, self.publisher, self.heard, self.directories = Roster(), FakePublisher(**publisher), [], FakeDirectories()
        self.publishing = Publishing(self.roster, self.publisher, self.directories, connect=connect, listen=self.hear, sharing=sharing)
        self.send, self.receive = trio.open_memory_channel(1)

    async def hear(self, snapshot, engines):
        self.heard.append((snapshot.version, [engine.index for engine in engines]))

    async def first(self, version=0):
        await self.publishing.first(snapshot(version))


def snapshot(version):
    return Snapshot.of(version, version, [[("w", torch.full((2,), float(version)))]])


def play(act, **options):
    """Run `act(scene)` beside the loops."""

    async def main():
        scene = Scene(**options)
        with trio.fail_after(10_000):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scene.publishing.follow_loop)
                nursery.start_soon(scene.publishing.publish_loop, scene.receive)
                await act(scene)
                nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
