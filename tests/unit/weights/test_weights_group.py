"""What becomes of torch's errors in our end of a group, and what torch does about them."""

import os

import pytest
import torch

from agentrl.collective import join_update_group, leave_update_group
from agentrl.errors import PublishError
from agentrl.ports import free_port
from agentrl.weights.group import _broadcast_nccl, _unwatched

WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.fixture
def alone():
    """A group of one, on CPUs."""
    group = join_update_group(
        master_address="127.0.0.1", master_port=free_port(), rank=0, world_size=1, group_name="alone", backend="gloo", timeout_s=5.0
    )
    yield group
    leave_update_group(group)


def test_an_error_of_torch_in_the_broadcast_that_polls_is_a_publish_error(alone):
    sent = torch.ones(3)
    _broadcast_nccl(sent, alone, 5.0, device="cpu")
    with pytest.raises(PublishError, match="broadcast of 3 bytes failed: Could not run"):
        _broadcast_nccl(sent.to_sparse(), alone, 5.0, device="cpu")


@pytest.mark.parametrize("before", [None, "3"])
def test_groups_are_made_without_torchs_watchdog_and_others_with_it(before, monkeypatch):
    monkeypatch.delenv(WATCHDOG, raising=False)
    if before is not None:
        monkeypatch.setenv(WATCHDOG, before)
    with _unwatched():
        assert os.environ[WATCHDOG] == "0"
    assert os.environ.get(WATCHDOG) == before
