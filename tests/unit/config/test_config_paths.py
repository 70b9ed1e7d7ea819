"""Where relative paths of a recipe lead."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.load import load_recipe
from agentrl.config.paths import missing_files, require_files
from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError

TEXT = """\
name: small
run: {steps: 3, dir: out}
model: {path: org/model, tokenizer: tok}
tasks: {train: [{path: a.jsonl}, {path: "hub:org/set"}, {path: "prepared:x.jsonl"}]}
eval: {sets: {held: {tasks: [{path: b.jsonl}]}}}
retriever: {corpus: corpus.jsonl}
env: {factory: "my:Env", options: {path: a.jsonl}}
"""


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in one folder, and another folder as the current one."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "recipes" / "r.yaml"
    path.write_text(TEXT)
    return path


def load(path: Path, *overrides: str) -> Recipe:
    return load_recipe([path], overrides)


def test_a_path_is_looked_for_in_the_current_directory_then_beside_the_recipe(recipe_file: Path):
    beside, here = recipe_file.parent, Path.cwd()
    (beside / "a.jsonl").touch()
    (here / "b.jsonl").touch()
    (beside / "b.jsonl").touch()
    (beside / "tok").mkdir()
    recipe = load(recipe_file)
    assert recipe.tasks.train[0].path == str(beside / "a.jsonl")
    assert recipe.eval.sets["held"].tasks[0].path == str(here / "b.jsonl")
    assert recipe.retriever is not None
    assert recipe.retriever.corpus == str(here / "corpus.jsonl"), "a file that is nowhere is expected in the current directory"
    assert recipe.model.tokenizer == str(beside / "tok")
    assert recipe.run.dir == str(here / "out")


def test_names_that_are_no_paths_stay(recipe_file: Path):
    recipe = load(recipe_file)
    assert recipe.model.path == "org/model"
    assert [source.path for source in recipe.tasks.train[1:]] == ["hub:org/set", "prepared:x.jsonl"]
    assert recipe.env.options == {"path": "a.jsonl"}


def test_a_path_of_the_command_line_starts_in_the_current_directory(recipe_file: Path):
    (recipe_file.parent / "c.jsonl").touch()
    recipe = load(recipe_file, "tasks.train[0].path=c.jsonl", "model.path=./local")
    assert recipe.tasks.train[0].path == str(Path.cwd() / "c.jsonl")
    assert recipe.model.path == str(Path.cwd() / "local")


def test_files_that_are_missing_are_named_all_at_once(recipe_file: Path):
    (recipe_file.parent / "a.jsonl").touch()
    recipe = load(recipe_file)
    assert missing_files(recipe) == [
        f"eval.sets.held.tasks[0].path: no such file: {Path.cwd()}/b.jsonl",
        f"retriever.corpus: no such file: {Path.cwd()}/corpus.jsonl",
    ]
    with pytest.raises(ConfigError, match=r"b\.jsonl\nretriever\.corpus"):
        require_files(recipe)
