"""Recipes from files: what is accepted, and how what is wrong is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config.load import dump_recipe, load_recipe
from agentrl.errors import ConfigError

SMALL = """\
name: small
run:
  steps: 3
model:
  path: some/model
tasks:
  train:
    - path: tasks.jsonl
env:
  factory: my:Env
"""


def written(folder: Path, text: str, name: str = "r.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def told(folder: Path, text: str, *overrides: str, smoke: bool = False) -> list[str]:
    """The lines of the error, with the folder's name left out."""
    with pytest.raises(ConfigError) as caught:
        load_recipe([written(folder, text)], overrides, smoke=smoke)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


def test_a_small_recipe_loads_with_its_defaults(tmp_path: Path):
    recipe = load_recipe([written(tmp_path, SMALL)])
    assert (recipe.run.steps, recipe.rollout.max_staleness, recipe.learner.betas) == (3, 2, (0.9, 0.999))


def test_files_are_merged_left_to_right_and_overrides_win(tmp_path: Path):
    over = written(tmp_path, "learner: {learning_rate: 1e-5, groups_per_batch: 8}\nrun: {steps: 4}\n", "over.yaml")
    recipe = load_recipe([written(tmp_path, SMALL), over], ["learner.learning_rate=2e-5"])
    assert (recipe.run.steps, recipe.learner.groups_per_batch, recipe.learner.learning_rate) == (4, 8, 2e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learner:\n  learning_rte: 1", "r.yaml:12:3: unknown key learner.learning_rte (did you mean learner.learning_rate?)"),
        ("rollout:\n  max_staleness: 2.5", "r.yaml:12:18: rollout.max_staleness must be an integer >= 0, got 2.5"),
        ("rollout:\n  workers: true", "r.yaml:12:12: rollout.workers must be an integer > 0, got true"),
        ("rollout:\n  workers: '3'", "r.yaml:12:12: rollout.workers must be an integer > 0, got '3'"),
        ("rollout:\n  temperature: false", "r.yaml:12:16: rollout.temperature must be a number > 0, got false"),
        ("rollout:\n  limits: 5", "r.yaml:12:11: rollout.limits must be a map of keys and values, got 5"),
        ("learner:\n  max_grad_norm:", "r.yaml:12:17: learner.max_grad_norm must be a number > 0, got null"),
        ("learner:\n  betas: [0.9]", "r.yaml:12:10: learner.betas must be a list of 2 values, each a number, got [0.9]"),
        ("learner:\n  betas: [0.9, x]", "r.yaml:12:16: learner.betas[1] must be a number, got 'x'"),
        ("learner:\n  learning_rate: .inf", "r.yaml:12:18: learner.learning_rate must be a finite number, got inf"),
        ("algorithm:\n  entropy: {coefficient: -1}", "r.yaml:12:26: algorithm.entropy.coefficient must be a number >= 0, got -1"),
        ("engine:\n  kind: vllm", "r.yaml:12:9: engine.kind must be one of embedded, sglang, got 'vllm'"),
        ("engine:\n  urls: http://x", "r.yaml:12:9: engine.urls must be a list, each a string, got 'http://x'"),
        (
            "eval:\n  sets: {a: {tasks: []}}",
            "r.yaml:12:21: eval.sets.a.tasks must be a list with at least 1 item, each a map of keys and values, got []",
        ),
        ("eval:\n  sets: {a: {n: 2}}", "r.yaml:12:13: missing key eval.sets.a.tasks: a list with at least 1 item, each a map of keys and values"),
        ("weights:\n  keep_snapshots: no", "r.yaml:12:19: weights.keep_snapshots must be true or false, got 'no'"),
        ("engine:\n  urls: ['host:30000']", "r.yaml:12:10: engine.urls[0]: http:// is missing: http://host:30000"),
        (
            "resources:\n  environment: {engin: {A: '1'}}",
            "r.yaml:12:17: unknown key resources.environment.engin (did you mean resources.environment.engine?)",
        ),
        (
            "resources:\n  environment: {engine: {A: 1}}",
            'r.yaml:12:29: resources.environment.engine.A must be a string, got 1 (a text, in quotes: A: "1")',
        ),
        (
            "resources:\n  environment: {engine: {A-B: x}}",
            "r.yaml:12:26: resources.environment.engine: a key must be a string matching ^[A-Za-z_][A-Za-z0-9_]*$, got 'A-B'",
        ),
        ("max_staleness: 1", "r.yaml:11:1: unknown key max_staleness (did you mean rollout.max_staleness?)"),
        (
            "engine: {context_tokens: 100}",
            "r.yaml:1:1: engine.context_tokens (100) is below rollout.limits.context_tokens (4096): raise the first or lower the second",
        ),
        ("zzz: 1", "r.yaml:11:1: unknown key zzz"),
    ],
)
def test_a_mistake_is_told_with_its_place_and_what_was_expected(tmp_path: Path, text: str, message: str):
    assert told(tmp_path, SMALL + text) == [message]


def test_rules_of_a_section_are_told_at_the_section(tmp_path: Path):
    assert told(tmp_path, SMALL.replace("steps: 3", "steps: 3\n  hours: 1")) == [
        "r.yaml:2:1: run: a run ends by exactly one of steps, epochs and hours; given: steps, hours"
    ]


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file(tmp_path: Path):
    assert told(tmp_path, SMALL.replace("steps: 3", "steps: 0").replace("name: small", "name: a b"), "rollout.workers=0", "nme=x", "foo") == [
        "override 'foo': an override is written key.key=value",
        "r.yaml:1:7: name must be a string matching ^[A-Za-z0-9][A-Za-z0-9._-]*$, got 'a b'",
        "r.yaml:3:10: run.steps must be an integer > 0, got 0",
        "override 'nme=x': unknown key nme (did you mean name?)",
        "override 'rollout.workers=0': rollout.workers must be an integer > 0, got 0",
    ]


def test_a_missing_section_is_told_by_name(tmp_path: Path):
    assert told(tmp_path, SMALL.replace("env:\n  factory: my:Env\n", "")) == ["r.yaml:1:1: missing key env: a map of keys and values"]


def test_a_file_that_is_laid_on_a_recipe_is_told_to_need_one(tmp_path: Path):
    *lacking, question = told(tmp_path, "rollout: {workers: 2}\nrun: {steps: 3}\n")
    assert [line.split(":")[3] for line in lacking] == [f" missing key {name}" for name in ("name", "model", "tasks", "env")]
    assert question == ("r.yaml: is this a file that is laid on a recipe? Give the recipe first: agentrl validate recipes/search_r1_nq.yaml r.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "r.yaml:1:1: a recipe is a map of sections, got nothing"),
        ("- 1", "r.yaml:1:1: a recipe is a map of sections, got [1]"),
        ("a: [", "r.yaml:1:5: not valid YAML: expected the node content, but found '<stream end>'"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str, message: str):
    assert told(tmp_path, text) == [message]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no\.yaml: cannot read the recipe: No such file or directory"):
        load_recipe([tmp_path / "no.yaml"])


def test_a_dumped_recipe_loads_as_the_same_recipe(tmp_path: Path):
    recipe = load_recipe([written(tmp_path, SMALL)], ["env.options={a: 'no', b: '1e-6', c: [1, null, 2.5]}", "learner.learning_rate=1e-6"])
    assert load_recipe([written(tmp_path, dump_recipe(recipe), "dumped.yaml")]) == recipe


@pytest.mark.slow
def test_loading_a_recipe_imports_neither_torch_nor_ray_nor_transformers():
    code = "import sys, agentrl.config.load, agentrl.config.essentials; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
