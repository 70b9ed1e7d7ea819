import pytest
from learner_scene import TINY, random_groups, tiny_model, tiny_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.buffer_api import JournalMark
from agentrl.errors import CheckpointError
from agentrl.learner import checkpoint
from agentrl.learner.batch import TrainingBatch
from agentrl.learner.export import export, export_checkpoint
from agentrl.learner.learner import Learner
from agentrl.learner.ranks import Ranks

pytestmark = pytest.mark.slow  # files are brought to the disk

BATCH = TrainingBatch.of(random_groups(), {0: 0})


@pytest.fixture
def learner(model_dir, tmp_path):
    return Learner.build(tiny_recipe(), model_dir, Ranks.single(), tmp_path)


def mark(step):
    return JournalMark(offset=100 * step, consumed=((0, step),), frontier=7, step=step)


def save(learner, root, step, incarnation=0):
    return checkpoint.commit(checkpoint.write(learner, root, step, incarnation), mark(step))


def losses(learner, steps):
    return [learner.train(BATCH, step=step, progress=0.0).metrics["learner/loss"] for step in steps]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_training_goes_on_from_a_checkpoint_with_the_same_bits(learner, model_dir, tmp_path):
    losses(learner, [0, 1])
    save(learner, tmp_path / "checkpoints", 2)
    expected = losses(learner, [2, 3, 4])
    fresh = Learner.build(tiny_recipe(), model_dir, Ranks.single(), tmp_path)
    checkpoint.load(fresh, next(checkpoint.manifests(tmp_path / "checkpoints")))
    assert losses(fresh, [2, 3, 4]) == expected


def test_a_checkpoint_before_the_first_update_is_the_beginning(learner, tmp_path):
    save(learner, tmp_path / "checkpoints", 0)
    expected = losses(learner, [0, 1])
    checkpoint.load(learner, next(checkpoint.manifests(tmp_path / "checkpoints")))
    assert losses(learner, [0, 1]) == expected


def test_a_manifest_tells_the_buffer_what_a_rollback_needs(learner, tmp_path):
    save(learner, tmp_path / "checkpoints", 3, incarnation=2)
    manifest = next(checkpoint.manifests(tmp_path / "checkpoints"))
    told = {"id": "i0002-s00000003", "step": 3, "learner_incarnation": 2, "offset": 300, "consumed": [[0, 3]]}
    assert manifest.for_rollback() == told
    assert manifest.mark == mark(3)


def test_the_newest_is_that_of_the_newest_incarnation(learner, tmp_path):
    for incarnation, step in ((0, 0), (0, 9), (1, 4)):
        save(learner, tmp_path / "checkpoints", step, incarnation)
    found = [(manifest.learner_incarnation, manifest.step) for manifest in checkpoint.manifests(tmp_path / "checkpoints")]
    assert found == [(1, 4), (0, 9), (0, 0)]


@pytest.mark.parametrize("victim", ["state/__0_0.distcp", "model/tokenizer.json", "manifest.json"])
def test_an_altered_checkpoint_is_refused_and_the_one_before_it_taken(learner, tmp_path, victim):
    root = tmp_path / "checkpoints"
    save(learner, root, 1)
    newest = save(learner, root, 2)
    if victim == "manifest.json":
        (newest.path / victim).write_text("{")
    else:
        flip_a_bit(newest.path / victim)
        with pytest.raises(CheckpointError, match="altered"):
            export_checkpoint(newest.path, tmp_path / "export")
    assert [manifest.step for manifest in checkpoint.manifests(root)] == [1]


def test_an_uncommitted_checkpoint_is_not_found_and_pruned(learner, tmp_path):
    root = tmp_path / "checkpoints"
    save(learner, root, 1)
    checkpoint.write(learner, root, 2, 0)
    assert [manifest.step for manifest in checkpoint.manifests(root)] == [1]
    checkpoint.prune(root, keep=2)
    assert [path.name for path in root.iterdir()] == ["i0000-s00000001"]


def test_prune_keeps_the_newest(learner, tmp_path):
    root = tmp_path / "checkpoints"
    for step in range(4):
        save(learner, root, step)
    checkpoint.prune(root, keep=2)
    assert sorted(path.name for path in root.iterdir()) == ["i0000-s00000002", "i0000-s00000003"]


def test_a_step_is_committed_once_in_an_incarnation(learner, tmp_path):
    save(learner, tmp_path / "checkpoints", 1)
    with pytest.raises(CheckpointError, match="exists"):
        save(learner, tmp_path / "checkpoints", 1)


def test_a_place_that_cannot_be_written_is_a_checkpoint_error(learner, tmp_path):
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoint.write(learner, tmp_path / "checkpoints", 1, 0)


def test_a_checkpoint_of_another_model_is_refused(learner, tmp_path):
    save(learner, tmp_path / "checkpoints", 1)
    wider = tiny_model(tmp_path / "wider", TINY.model_copy(update={"intermediate_size": 64}))
    other = Learner.build(tiny_recipe(), wider, Ranks.single(), tmp_path)
    with pytest.raises(CheckpointError, match="does not fit"):
        checkpoint.load(other, next(checkpoint.manifests(tmp_path / "checkpoints")))


def test_an_export_of_a_checkpoint_loads_with_transformers_and_is_what_was_published(learner, tmp_path):
    losses(learner, [0])
    manifest = save(learner, tmp_path / "checkpoints", 1)
    out = export_checkpoint(manifest.path, tmp_path / "export")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    published = {name: tensor for bucket in learner.gather(1 << 20) for name, tensor in bucket}
    loaded = dict(model.named_parameters())
    assert loaded.keys() == published.keys()
    assert all(loaded[name].equal(tensor) for name, tensor in published.items())
    assert tokenizer("w5 w9")["input_ids"] == [5, 9]
    assert "step 1" in (out / "README.md").read_text()


def test_an_export_has_the_dtype_of_the_recipe(model_dir, tmp_path):
    learner = Learner.build(tiny_recipe(model__dtype="bfloat16"), model_dir, Ranks.single(), tmp_path)
    out = export(learner, tmp_path / "export")
    assert str(AutoModelForCausalLM.from_pretrained(out).dtype) == "torch.bfloat16"
