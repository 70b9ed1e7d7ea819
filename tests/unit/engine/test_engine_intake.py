"""Where new weights wait: whose memory a bucket is received into, and what is left of it all when the engine stops."""

import asyncio
import threading

import pytest
import torch
from engine_loop import load_scheduler
from tiny_qwen2 import write_tiny_qwen2

from agentrl.collective import tensor_checksum
from agentrl.engine.app import EngineServer
from agentrl.engine.intake import Announced, Intake

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture
def intake(model_dir):
    found = Intake(load_scheduler(model_dir).runner.weights)
    yield found
    found.close()


def bucket(weights) -> tuple[Announced, torch.Tensor]:
    norm = weights.named["model.norm.weight"] + 1
    return Announced(names=["model.norm.weight"], dtypes=[norm.dtype], shapes=[tuple(norm.shape)]), norm.view(torch.uint8)


def received(intake: Intake) -> torch.Tensor:
    """The memory of a bucket that was received and taken in."""
    announced, sent = bucket(intake._live)
    memory = intake.buffer(announced.bytes, CPU)
    memory.copy_(sent)
    arrival = intake.arrival(announced, memory, lambda: True)
    arrival.advance(announced.bytes)
    assert arrival.finish().result() == tensor_checksum(sent)
    return memory


def test_a_bucket_is_received_into_memory_of_one_before_it(intake):
    assert received(intake).data_ptr() == received(intake).data_ptr()


def test_two_buckets_that_are_received_at_the_same_time_never_share_memory(intake):
    announced, _ = bucket(intake._live)
    received(intake)  # one piece of memory is free
    taken: list[torch.Tensor] = []
    second = threading.Thread(target=lambda: taken.append(intake.buffer(announced.bytes, CPU)))

    class Free(torch.Tensor):
        """The moment at which it is looked at, another thread wants memory too."""

        def numel(self) -> int:
            if second.ident is None:
                second.start()
                second.join(0.05)  # it has to wait, for as long as we look
            return super().numel()

    intake._free = [kept.as_subclass(Free) for kept in intake._free]
    first = intake.buffer(announced.bytes, CPU)
    second.join()
    assert first.data_ptr() != taken[0].data_ptr()


def test_an_engine_that_stops_leaves_no_thread_behind(model_dir):
    async def main() -> None:
        server = EngineServer(model_dir, slots=2, context_tokens=16)
        async with server.app.router.lifespan_context(server.app):
            await server._updates.checksums()
            assert names() > before

    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith(("intake", "engine"))}

    before = names()
    asyncio.run(main())
    assert names() == before
