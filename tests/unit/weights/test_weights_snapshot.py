"""Snapshots: what travels, in which pieces, and what it is checked by."""

import resource
import threading

import pytest
import torch

from agentrl.collective import tensor_checksum
from agentrl.errors import PublishError
from agentrl.weights import Snapshot, save_snapshot


def test_a_list_becomes_one_bucket_per_dtype():
    snapshot = Snapshot.of(
        3, 2, [[("a", torch.ones(2, 3)), ("b", torch.ones(4)), ("c", torch.ones(5, dtype=torch.bfloat16))], [("d", torch.ones(1))]]
    )
    assert [bucket.names for bucket in snapshot.buckets] == [("a", "b"), ("c",), ("d",)]
    assert [bucket.flat.numel() for bucket in snapshot.buckets] == [40, 10, 4]
    assert (snapshot.nbytes, snapshot.buckets[1].header.dtypes) == (54, ("bfloat16",))


def test_a_cast_makes_one_dtype_of_all_and_rounds_as_torch_does():
    values = torch.tensor([1.0, 1.001, -3.14159])
    snapshot = Snapshot.of(1, 1, [[("a", values), ("b", torch.ones(2, dtype=torch.bfloat16))]], torch.bfloat16)
    assert [bucket.names for bucket in snapshot.buckets] == [("a", "b")]
    assert snapshot.tensors()["a"].tolist() == [1.0, 1.0, -3.140625]
    assert snapshot.nbytes == 10


def test_a_tied_head_is_sent_once_and_an_equal_one_of_its_own_is_sent():
    embedding = torch.ones(4, 2)
    tied = Snapshot.of(1, 1, [[("model.embed_tokens.weight", embedding)], [("lm_head.weight", embedding)]])
    own = Snapshot.of(1, 1, [[("model.embed_tokens.weight", embedding)], [("lm_head.weight", embedding.clone())]])
    assert (list(tied.tensors()), tied.nbytes, own.nbytes) == (["model.embed_tokens.weight"], 32, 64)


def test_a_snapshot_is_detached_from_what_it_was_made_of():
    weight = torch.zeros(3)
    snapshot = Snapshot.of(1, 1, [[("a", weight)]])
    weight += 1
    assert snapshot.tensors()["a"].tolist() == [0.0, 0.0, 0.0]
    assert snapshot.checksums == {"a": tensor_checksum(torch.zeros(3))}


def test_the_first_bucket_is_there_while_the_second_is_being_gathered():
    snapshot, go_on = Snapshot(version=1, step=1), threading.Event()

    def gathered():
        yield [("a", torch.ones(1))]
        assert go_on.wait(5.0)
        yield [("b", torch.ones(1))]

    thread = threading.Thread(target=snapshot.fill, args=(gathered(),))
    thread.start()
    assert snapshot.bucket(0).names == ("a",)
    go_on.set()
    assert (snapshot.bucket(1).names, snapshot.bucket(2)) == (("b",), None)
    thread.join()
    assert snapshot.bucket_checksum(1) == tensor_checksum(snapshot.bucket(1).flat)


def test_whoever_waits_for_a_bucket_hears_that_gathering_failed():
    snapshot = Snapshot(version=7, step=1)

    def gathered():
        yield [("a", torch.ones(1))]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        snapshot.fill(gathered())
    with pytest.raises(PublishError, match="version 7: its weights were never gathered whole"):
        snapshot.bucket(1)


@pytest.fixture
def full_disk():
    """No file may become larger than 100 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_snapshot_that_does_not_fit_on_the_disk_is_a_publish_error_and_leaves_nothing(tmp_path, full_disk):
    (tmp_path / "model").mkdir()
    snapshot = Snapshot.of(4, 4, [[("w", torch.zeros(2**16))]])
    with pytest.raises(PublishError, match=r"version 4 could not be written to .*/weights/v4"):
        save_snapshot(snapshot, tmp_path / "weights" / "v4", tmp_path / "model")
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_model_directory_that_cannot_be_read_is_a_publish_error(tmp_path):
    with pytest.raises(PublishError, match=r"version 4 could not be written .*No such file"):
        save_snapshot(Snapshot.of(4, 4, [[("w", torch.zeros(2))]]), tmp_path / "v4", tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
