"""What README.md shows is real: the example's code, its recipe, the recipes, the commands and the files it links to."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config.load import load_recipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, start: str) -> str:
    """The code block of a language that begins with `start`."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return next(text for found, text in blocks if found == language and text.startswith(start))


def test_the_environment_shown_is_the_example() -> None:
    example = (ROOT / "examples" / "own_environment.py").read_text(encoding="utf-8")
    assert block("python", "import re\n") == example[example.index("import re\n") :]


def test_the_recipe_shown_beside_it_is_valid(tmp_path: Path) -> None:
    (tmp_path / "guess.yaml").write_text(block("yaml", "name: guess"))
    recipe = load_recipe([tmp_path / "guess.yaml"])
    assert (recipe.env.factory, recipe.env.options) == ("own_environment:GuessTheNumber", {"guesses": 7})
    assert load_recipe([tmp_path / "guess.yaml"], smoke=True).run.steps == 2


def test_what_validate_is_shown_to_say_it_says() -> None:
    shown = block("", "$ agentrl validate")
    command, _, told = shown.partition("\n")
    arguments = [str(ROOT / part) if part.endswith(".yaml") else part for part in command.split()[3:]]
    assert CliRunner().invoke(app, ["validate", *arguments]).stdout == told


def test_every_recipe_and_every_command_is_in_its_table() -> None:
    assert {path.name for path in (ROOT / "recipes").glob("*.yaml")} == set(re.findall(r"^\| \[(\w+\.yaml)\]", README, re.MULTILINE))
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert commands == set(re.findall(r"^\| `agentrl (\w+)", README, re.MULTILINE))


def test_files_that_are_linked_to_exist() -> None:
    documents = ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    for name in documents:
        for target in re.findall(r"(?<!!)\[[^\]]+\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8")):
            assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}"
