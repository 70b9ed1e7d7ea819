"""A bucket on its way into the spare weights, piece by piece."""

import pytest
import torch
from engine_loop import load_scheduler
from tiny_qwen2 import write_tiny_qwen2

from agentrl.collective import CHECKED_BYTES, flatten_bucket, tensor_checksum
from agentrl.engine.intake import Announced, Intake


@pytest.mark.parametrize("wanted", [True, False])
def test_tensors_that_lie_across_pieces_arrive_whole_where_they_are_wanted(tmp_path, wanted):
    live = load_scheduler(write_tiny_qwen2(tmp_path / "model")).runner.weights
    new = {name: torch.full_like(tensor, index + 1.0) for index, (name, tensor) in enumerate(live.named.items())}
    flat = flatten_bucket(new.values())
    intake = Intake(live)
    intake.take_in(live.named).result()
    buffer = intake.buffer(flat.numel(), torch.device("cpu"))
    bucket = Announced(names=list(new), dtypes=[torch.float32] * len(new), shapes=[tuple(tensor.shape) for tensor in new.values()])
    arrival = intake.arrival(bucket, buffer, lambda: wanted)
    ends = [*range(CHECKED_BYTES, flat.numel(), CHECKED_BYTES), flat.numel()]
    assert len(ends) > 3
    for end in ends:
        buffer[max(0, end - CHECKED_BYTES) : end] = flat[max(0, end - CHECKED_BYTES) : end]
        arrival.advance(end)
    assert arrival.finish().result() == tensor_checksum(flat)
    spare = intake.commit(set(new)).named
    assert all(torch.equal(tensor, (new if wanted else live.named)[name]) for name, tensor in spare.items())
    assert intake.buffer(flat.numel(), torch.device("cpu")).data_ptr() == buffer.data_ptr()
