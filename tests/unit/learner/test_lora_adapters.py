import json
import sys

import pytest
import torch
from learner_models_scene import LORA, full_recipe, gathered, play, rows
from learner_scene import tiny_model
from peft import LoraConfig, get_peft_model
from torch import tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from agentrl.buffer_api import JournalMark
from agentrl.config.recipe import LoraRecipe
from agentrl.errors import CheckpointError, ConfigError
from agentrl.learner import checkpoint
from agentrl.learner.export import export, export_checkpoint
from agentrl.learner.learner import Learner
from agentrl.learner.lora import Adapters, base_fingerprint
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks


def save(learner, root, step):
    return checkpoint.commit(checkpoint.write(learner, root, step, 0), JournalMark(offset=0, consumed=(), frontier=0, step=step))


@pytest.fixture
def learner(model_dir, tmp_path):
    return Learner.build(full_recipe(), model_dir, Ranks.single(), tmp_path)


def test_merging_by_hand():
    # W = [[1, 2]], up [[3]], down [[0.5, -1]], alpha / rank = 2: W + 2 * [[1.5, -3]] = [[4, -4]]
    adapters = Adapters(rank=1, scaling=2.0, dropout=0.0, base="")
    parts = {"q.lora_A.default.weight": tensor([[0.5, -1.0]]), "q.lora_B.default.weight": tensor([[3.0]])}
    base = [("q.base_layer.weight", tensor([[1.0, 2.0]])), ("q.base_layer.bias", tensor([7.0])), ("norm.weight", tensor([1.0]))]
    merged = dict(adapters.merged(base, parts))
    assert merged["q.weight"].equal(tensor([[4.0, -4.0]]))
    assert merged["q.bias"].equal(tensor([7.0]))
    assert merged["norm.weight"].equal(tensor([1.0]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's reading of transformers
def test_what_is_published_is_pefts_own_merge_under_plain_names(learner, model_dir):
    play(learner, range(3))
    published = gathered(learner)
    config = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), config)
    inside = dict(model.base_model.model.named_parameters())
    with torch.no_grad():
        for name, weight in learner.state.policy.named_weights():
            inside[name].copy_(weight.full_tensor())
    expected = dict(model.merge_and_unload().named_parameters())
    assert list(published) == list(expected)
    for name, weight in expected.items():
        assert_close(published[name], weight.detach(), atol=1e-6, rtol=0)
    plain = dict(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).named_parameters())
    changed = {name for name, weight in plain.items() if not published[name].equal(weight)}
    assert changed == {name for name in plain if name.endswith("proj.weight")}


@pytest.mark.slow
def test_only_adapters_are_trained_and_the_base_is_kept_in_the_recipes_dtype(model_dir, tmp_path):
    learner = Learner.build(full_recipe(model__dtype="bfloat16"), model_dir, Ranks.single(), tmp_path)
    policy, optimizer = learner.state.policy, learner.state.optimizer
    trained = dict(policy.named_weights())
    assert {id(weight) for weight in optimizer.param_groups[0]["params"]} == {id(weight) for weight in trained.values()}
    assert all(".lora_" in name and weight.dtype == torch.float32 for name, weight in trained.items())
    assert {weight.dtype for weight in policy.parameters() if not weight.requires_grad} == {torch.bfloat16}
    play(learner, range(2))
    assert {tensor.dtype for tensor in gathered(learner).values()} == {torch.bfloat16}


@pytest.mark.slow
def test_adapters_begin_as_the_model_and_dropout_is_for_training_alone(model_dir, tmp_path):
    ids, wanted = rows(0)
    plain = PolicyModel.load(model_dir)
    policy = PolicyModel.load(model_dir, lora=LoraRecipe(rank=3, dropout=0.5))
    with torch.no_grad():
        assert policy(ids, wanted, torch.ones(4))[0].equal(plain(ids, wanted, torch.ones(4))[0])
        for name, weight in policy.named_weights():
            if ".lora_B." in name:
                weight.normal_()
        compared = [policy(ids, wanted, torch.ones(4))[0] for _ in range(2)]
    trained = [policy(ids, wanted, torch.ones(4))[0] for _ in range(2)]
    assert compared[0].equal(compared[1])
    assert not trained[0].equal(trained[1])


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapters_alone_and_training_goes_on_from_it_with_the_same_bits(learner, model_dir, tmp_path):
    play(learner, range(2))
    manifest = save(learner, tmp_path / "checkpoints", 2)
    expected, published = play(learner, range(2, 5)), gathered(learner)
    fresh = Learner.build(full_recipe(seed=3), model_dir, Ranks.single(), tmp_path)
    checkpoint.load(fresh, manifest)
    assert play(fresh, range(2, 5)) == expected
    assert all(tensor.equal(published[name]) for name, tensor in gathered(fresh).items())
    stored = [name for name in checkpoint._stored(manifest) if name.startswith("weights.")]
    assert len(stored) == 28  # 2 layers x 7 linear layers x up and down
    assert all(".lora_" in name for name in stored)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_of_adapters_is_the_plain_merged_model_that_was_published(model_dir, tmp_path, dtype):
    learner = Learner.build(full_recipe(model__dtype=dtype), model_dir, Ranks.single(), tmp_path)
    play(learner, range(2))
    manifest = save(learner, tmp_path / "checkpoints", 2)
    published = gathered(learner)
    for out in (export(learner, tmp_path / "one"), export_checkpoint(manifest.path, tmp_path / "other")):
        loaded = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
        assert loaded.keys() == published.keys()
        assert all(weight.equal(published[name]) for name, weight in loaded.items())


@pytest.mark.slow
def test_adapters_are_not_merged_into_another_model(learner, tmp_path):
    manifest = save(learner, tmp_path / "checkpoints", 0)
    base = manifest.model_dir / "base.json"
    told = json.loads(base.read_text())
    for path, said in (
        (str(tiny_model(tmp_path / "other", seed=5)), "is not the one they were trained on"),
        ("/nowhere", "is not in /nowhere any more"),
    ):
        base.write_text(json.dumps(told | {"path": path}))
        with pytest.raises(CheckpointError, match=said):
            checkpoint.read_weights(manifest)


@pytest.mark.slow
def test_checkpoints_of_adapters_and_of_all_weights_are_told_apart(learner, model_dir, tmp_path):
    whole = Learner.build(full_recipe(model__lora=None), model_dir, Ranks.single(), tmp_path)
    other = Learner.build(full_recipe(), tiny_model(tmp_path / "other", seed=5), Ranks.single(), tmp_path)
    of_adapters, of_all = save(learner, tmp_path / "a", 0), save(whole, tmp_path / "b", 0)
    for wants, manifest, said in (
        (whole, of_adapters, "has no model.lora"),
        (learner, of_all, "holds all weights"),
        (other, of_adapters, "holds adapters"),
    ):
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(wants, manifest)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["nonsense"], "not found"),
        (["lm_head"], "the output layer"),
        (["embed_tokens"], "linear layers only"),
    ],
)
def test_layers_that_could_not_have_adapters_are_refused(tmp_path, model_dir, targets, said):
    with pytest.raises(ConfigError, match=said):
        PolicyModel.load(model_dir, lora=LoraRecipe(target_modules=targets))


@pytest.fixture
def without_peft():
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "peft"}
    sys.modules.update(dict.fromkeys(kept))  # None: its import fails
    yield
    sys.modules.update(kept)


def test_where_peft_is_missing_the_extra_is_named(without_peft, model_dir):
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[lora\]'"):
        PolicyModel.load(model_dir, lora=LoraRecipe())


def test_a_fingerprint_tells_weights_apart_and_is_the_same_in_another_dtype():
    weights = [("a", tensor([[1.0, 2.0]])), ("b", tensor([3.0]))]
    assert base_fingerprint(weights) == base_fingerprint([(name, weight.double()) for name, weight in weights])
    assert base_fingerprint(weights) != base_fingerprint([("a", tensor([[1.0, 2.5]])), ("b", tensor([3.0]))])
    assert base_fingerprint(weights) != base_fingerprint([("a", tensor([[1.0], [2.0]])), ("b", tensor([3.0]))])
