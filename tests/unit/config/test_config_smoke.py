"""`--smoke`: a recipe made small."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.essentials import essentials
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.config.smoke import smoke_overrides
from agentrl.errors import ConfigError

BIG = """\
name: big
run: {epochs: 3, ray_address: "ray://cluster:10001"}
model: {path: org/model-3b, dtype: bfloat16, attention: flash_attention_2}
warm_start: {rows: demos.jsonl}
tasks: {train: [{path: "hub:org/set"}, {path: more.jsonl, limit: 4}]}
env: {factory: "my:Env"}
retriever: {index: /data/wiki-index}
engine: {kind: sglang, replicas: 4, device: cuda, options: {mem: 0.8}}
rollout: {workers: 8, group_size: 5, limits: {completion_tokens: 20}}
learner: {ranks: 4, groups_per_batch: 512, mini_batches: 10, learning_rate: 1e-6, device: cuda}
eval: {every: 50, sets: {held: {tasks: [{path: held.jsonl}], n: 4, temperature: 1.0}}}
metrics: {sinks: [wandb]}
resources: {engine_gpus: 1, learner_gpus: 1}
smoke:
  tasks.train: [{path: small.jsonl}]
  retriever.corpus: corpus.jsonl
  learner: {mini_batches: 1}
"""


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big.yaml"
    path.write_text(BIG)
    for name in ("small.jsonl", "corpus.jsonl"):
        (tmp_path / name).touch()
    return path


def smoked(path: Path, *overrides: str) -> Recipe:
    return load_recipe([path], overrides, smoke=True)


def test_a_smoked_recipe_is_two_small_steps_on_this_machine(big: Path):
    recipe = smoked(big)
    assert (recipe.name, recipe.run.steps, recipe.run.epochs, recipe.run.ray_address) == ("big-smoke", 2, None, None)
    assert (recipe.learner.groups_per_batch, recipe.rollout.group_size, recipe.learner.ranks, recipe.rollout.workers) == (2, 4, 1, 1)
    assert (recipe.engine.kind, recipe.engine.replicas, recipe.engine.urls, recipe.engine.device) == ("embedded", 1, [], "cpu")
    assert (recipe.resources.engine_gpus, recipe.resources.learner_gpus, recipe.metrics.sinks) == (0, 0, [])
    assert recipe.warm_start is not None
    assert recipe.warm_start.steps == 8
    assert (recipe.eval.every, recipe.eval.sets["held"].n, recipe.eval.sets["held"].tasks[0].limit) == (1, 1, 8)


def test_its_model_is_tiny_random_and_has_a_tokenizer_trained_on_its_corpus(big: Path):
    model = smoked(big).model
    assert (model.path, model.tokenizer, model.dtype, model.attention) == (None, None, "float32", "sdpa")
    assert model.architecture is not None
    assert (model.architecture.hidden_size, model.architecture.layers) == (64, 2)
    assert model.train_tokenizer is not None
    assert model.train_tokenizer.corpus == str(big.parent / "corpus.jsonl")


def test_what_is_small_already_stays_and_what_is_not_about_size_too(big: Path):
    recipe = smoked(big)
    assert recipe.rollout.limits.completion_tokens == 20
    assert recipe.rollout.limits.context_tokens == recipe.engine.context_tokens == 1024
    assert recipe.learner.learning_rate == 1e-6


def test_the_recipes_smoke_section_wins_over_smoke_and_the_command_line_over_both(big: Path):
    assert smoked(big).learner.mini_batches == 1
    assert [source.path for source in smoked(big).tasks.train] == [str(big.parent / "small.jsonl")]
    recipe = smoked(big, "run.steps=5", "tasks.train[0].path=/mine.jsonl", "retriever.corpus=/other.jsonl", "learner.mini_batches=2")
    assert (recipe.run.steps, recipe.tasks.train[0].path, recipe.learner.mini_batches) == (5, "/mine.jsonl", 2)
    assert recipe.retriever is not None
    assert (recipe.retriever.corpus, recipe.retriever.index) == ("/other.jsonl", None)
    assert recipe.model.train_tokenizer is not None
    assert recipe.model.train_tokenizer.corpus == "/other.jsonl", "the tokenizer follows the corpus that is used"


def test_a_model_that_starts_mimetic_has_as_many_key_heads_as_heads():
    small = smoke_overrides({"model": {"architecture": {"initialisation": "mimetic"}}})
    assert small["model.architecture.kv_heads"] == small["model.architecture.heads"]


def test_a_tokenizer_that_is_prepared_on_the_spot_is_kept():
    small = smoke_overrides({"model": {"tokenizer": "prepared:tokenizer"}})
    assert "model.train_tokenizer.corpus" not in small
    assert "model.tokenizer" not in small


def test_without_a_retriever_the_tokenizer_is_trained_on_the_tasks():
    assert smoke_overrides({"tasks": {"train": [{"path": "a.jsonl"}]}})["model.train_tokenizer.corpus"] == "a.jsonl"


@pytest.mark.parametrize(
    "nonsense", [{}, {"rollout": 3}, {"eval": {"sets": [1]}}, {"tasks": {"train": {"path": 1}}}, {"warm_start": "x"}, {"model": []}]
)
def test_smoke_makes_something_of_any_recipe(nonsense: dict[str, object]):
    assert smoke_overrides(nonsense)["run.steps"] == 2


def test_mistakes_are_told_under_smoke_too(big: Path):
    big.write_text(BIG.replace("name: big", "nam: big"))
    with pytest.raises(ConfigError) as caught:
        smoked(big, "lerner.ranks=2")
    assert str(caught.value).replace(f"{big.parent}/", "").splitlines() == [
        "big.yaml:1:1: missing key name: a string matching ^[A-Za-z0-9][A-Za-z0-9._-]*$",
        "big.yaml:1:1: unknown key nam (did you mean name?)",
        "override 'lerner.ranks=2': unknown key lerner (did you mean learner?)",
    ]


def test_without_smoke_its_section_does_nothing(big: Path):
    assert load_recipe([big]).learner.mini_batches == 10


def test_the_essentials_say_what_a_step_is_made_of(big: Path):
    told = dict(essentials(smoked(big)))
    assert told["step"] == "2 groups x 4 = 8 trajectories, 1 optimizer update"
    assert told["end"] == "after 2 steps = 16 trajectories"
    assert told["staleness"] == "K = 2: at most 6 groups alive, first tokens on average at most 2 steps old"
    over_sampled = dict(essentials(smoked(big, "buffer.stops.turn_limit=drop", "buffer.over_sample=0.25")))
    # ceil(1.25 * 6) groups, 8 / 2 - 1
    assert over_sampled["staleness"] == "K = 2: at most 8 groups alive, first tokens on average at most 3 steps old"
    reused = dict(essentials(smoked(big, "buffer.replay.reuse=3", "buffer.replay.fresh=0.5")))
    # half of a batch is new: groups live twice as long, 6 / 2 * 2 - 1
    assert reused["staleness"] == "K = 2: at most 6 groups alive, first tokens on average at most 5 steps old, when they are first trained on"
    full = essentials(load_recipe([big]))
    assert dict(full)["step"] == "512 groups x 5 = 2,560 trajectories, 10 optimizer updates"
    assert ("missing", "retriever.index: no such file: /data/wiki-index") in full
