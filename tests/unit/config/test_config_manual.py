"""The manual of a recipe is made from its models."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.manual import render

DOCUMENT = Path(__file__).parents[3] / "docs" / "recipes.md"


def test_the_document_is_what_the_models_render() -> None:
    remedy = "make it anew: python -c 'from agentrl.config.manual import render; print(render(), end=\"\")' > docs/recipes.md"
    assert DOCUMENT.read_text(encoding="utf-8") == render(), remedy


@pytest.mark.parametrize(
    "line",
    [
        "## `rollout`",
        "### `rollout.limits`",
        "### `tasks.train[]`",
        "### `eval.sets.<name>.tasks[]`",
        "| `launcher` | `ray`, `local` | `ray` | What starts the processes: Ray, or plain subprocesses of this machine. |",
        "| `fresh` | number >= 0 and <= 1 | `1.0` | At least this share of a batch's groups is new. |",
        "| `betas` | a list of 2 numbers | `[0.9, 0.999]` | AdamW's. |",
        "| `learner` | a map of texts | `{}` | Of every rank. |",
        "| `tasks` | a section | required | See `tasks`. |",
        "| `retriever` | a section or none | none | See `retriever`. |",
    ],
)
def test_a_key_stands_with_what_it_takes_its_default_and_its_meaning(line: str) -> None:
    assert line in render().splitlines()


def test_rows_of_a_table_have_four_cells() -> None:
    rows = [line for line in render().splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {5}


def test_every_key_says_what_it_means() -> None:
    rows = [line for line in render().splitlines() if line.startswith("| `")]
    assert [line for line in rows if line.rstrip().endswith("|  |")] == []
