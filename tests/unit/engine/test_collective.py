"""What both ends of a weight transfer agree on."""

import pytest
import torch

from agentrl.collective import CHECKED_BYTES, Checksum, combined_checksum, flatten_bucket, split_bucket, tensor_checksum, torch_dtype
from agentrl.errors import PublishError


def test_a_flattened_bucket_splits_into_what_it_was_made_of():
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(2.5), "c": torch.arange(4.0).view(2, 2).t()}
    bucket = flatten_bucket(tensors.values())
    assert (bucket.dtype, bucket.numel()) == (torch.uint8, 11 * 4)
    split = split_bucket(bucket, list(tensors), [torch.float32] * 3, [tensor.shape for tensor in tensors.values()])
    assert all(torch.equal(split[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_at_an_odd_offset_is_copied_out():
    tensors = [torch.ones(3, dtype=torch.bfloat16), torch.tensor([1.5, 2.5])]
    split = split_bucket(flatten_bucket(tensors), ["half", "full"], [torch.bfloat16, torch.float32], [[3], [2]])
    assert split["full"].tolist() == [1.5, 2.5]


def test_a_checksum_is_of_the_values_in_order_not_of_the_memory():
    tensor = torch.arange(6.0).view(2, 3)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.t().contiguous().t())
    assert tensor_checksum(tensor) != tensor_checksum(tensor + 1e-6)
    assert len(tensor_checksum(tensor)) == 16


def test_a_checksum_made_of_pieces_is_that_of_the_whole():
    whole = torch.arange(3 * CHECKED_BYTES // 4 + 5, dtype=torch.int32).view(torch.uint8)  # three blocks and 20 bytes
    checksum = Checksum(whole.numel())
    for piece in whole.split(2 * CHECKED_BYTES):
        checksum.add(piece)
    assert checksum.hexdigest() == tensor_checksum(whole)
    swapped = whole.view(3 * CHECKED_BYTES // 4 + 5, 4).flip(0).flatten()
    assert tensor_checksum(swapped) != tensor_checksum(whole)


def test_a_combined_checksum_does_not_depend_on_order():
    assert combined_checksum({"a": "1", "b": "2"}) == combined_checksum({"b": "2", "a": "1"}) != combined_checksum({"a": "2", "b": "1"})


def test_a_dtype_that_weights_do_not_come_in_is_refused():
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(PublishError, match="dtype must be one of"):
        torch_dtype("int4")
