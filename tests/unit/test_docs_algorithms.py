"""docs/algorithms.md has a row for everything a recipe can name, and every piece of a recipe in it is valid."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from agentrl.algorithm.advantages import ESTIMATORS
from agentrl.algorithm.aggregation import AGGREGATIONS
from agentrl.algorithm.kl import ESTIMATES
from agentrl.algorithm.losses import POLICY_LOSSES, find_loss
from agentrl.algorithm.rejection import STATISTICS
from agentrl.config.document import merge, parse, plain
from agentrl.config.recipe import AlgorithmRecipe, Recipe
from envs.search_reward import VARIANTS, SearchReward

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SMALLEST = """
name: x
run: {steps: 100}
model: {path: some/model}
tasks: {train: [{path: tasks.jsonl}]}
env: {factory: "my.module:Environment"}
"""
CODE = re.compile(r"`([^`]+)`")

Row = dict[str, str]  # column -> cell


def section(title: str) -> str:
    """From a heading to the next one of its level or above."""
    level = title.partition(" ")[0]
    after = PAGE[PAGE.index(f"\n{title}\n") + len(title) + 2 :]
    return re.split(rf"^#{{2,{len(level)}}} ", after, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> Iterator[Row]:
    """The rows of all tables in a text."""
    header: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert not header or len(cells) == len(header), f"as many cells as columns: {line}"
        if header and not set(cells[0]) <= {"-"}:
            yield dict(zip(header, cells, strict=True))
        header = header or cells


def recipe_of(pieces: list[str]) -> Recipe:
    """The smallest recipe with these pieces of YAML laid over it. Keys of `algorithm` may stand without it."""
    document = parse(SMALLEST, label="smallest")
    for piece in pieces:
        keys = plain(parse(piece, label="piece"))
        under = "algorithm: {" + piece + "}" if keys.keys() <= AlgorithmRecipe.model_fields.keys() else piece
        document = merge(document, parse(under, label="piece"))
    return Recipe.model_validate(plain(document))


def recipe_in(row: Row) -> Recipe:
    return recipe_of(CODE.findall(row["recipe"]))


def names(row: Row) -> set[str]:
    return set(CODE.findall(next(iter(row.values()))))


SNIPPETS = [[block] for block in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)]
SNIPPETS += [CODE.findall(row["recipe"]) for row in rows(PAGE) if "recipe" in row]
SNIPPETS += [CODE.findall(row["say"]) for row in rows(README) if "say" in row]


@pytest.mark.parametrize("pieces", SNIPPETS, ids=lambda pieces: " ".join(" ".join(pieces).split())[:60])
def test_every_piece_of_a_recipe_makes_a_valid_recipe(pieces: list[str]) -> None:
    recipe = recipe_of(pieces)
    if ":" not in recipe.algorithm.loss.name:
        find_loss(recipe.algorithm.loss.name).bind(recipe.algorithm.loss.arguments)


@pytest.mark.parametrize(
    ("title", "wanted"),
    [
        ("## Advantages", ESTIMATORS),
        ("## Policy losses", POLICY_LOSSES),
        ("## Aggregation", AGGREGATIONS),
        ("### Rejection", STATISTICS),
        ("## KL to a reference", ESTIMATES),
        ("### The proximal policy", get_args(AlgorithmRecipe.model_fields["proximal"].annotation)),
    ],
)
def test_everything_that_can_be_named_has_a_row(title: str, wanted: Any) -> None:
    assert set(wanted) <= set().union(*(names(row) for row in rows(section(title))))


def test_a_row_shows_the_recipe_of_what_it_is_about() -> None:
    shown = {
        "## Advantages": lambda algorithm: algorithm.advantage.estimator,
        "## Policy losses": lambda algorithm: algorithm.loss.name,
        "## Aggregation": lambda algorithm: algorithm.aggregation,
        "### Rejection": lambda algorithm: algorithm.rejection[0].statistic if algorithm.rejection else "",
        "### The proximal policy": lambda algorithm: algorithm.proximal,
    }
    for title, subject in shown.items():
        for row in rows(section(title)):
            if told := names(row):
                assert subject(recipe_in(row).algorithm) in told, row["recipe"]
    for row in rows(section("## KL to a reference")):
        if told := names(row) & set(ESTIMATES):
            assert {recipe_in(row).algorithm.kl.estimate} == told


def test_it_says_which_estimators_are_whitened() -> None:
    told = re.search(r"By default (.*?) are whitened", section("## Advantages"), re.DOTALL)
    assert told is not None
    assert set(CODE.findall(told[1])) == {name for name, estimator in ESTIMATORS.items() if estimator.whitens}


def test_the_rewards_of_the_search_environment_have_their_parts() -> None:
    told = {name: row for row in rows(section("### Rewards of the search environment")) for name in names(row)}
    assert told.keys() == VARIANTS.keys()
    for name, row in told.items():
        reward = SearchReward(recipe_in(row).env.options["reward"])
        assert (reward.name, [reward.part]) == (name, CODE.findall(row["part of the reward"]))


def test_keys_beside_those_of_verl_are_there() -> None:
    told = {key for row in rows(section("## Coming from verl")) for key in CODE.findall(row["here"])}
    assert len(told) > 40
    for key in told:
        model: type[BaseModel] = Recipe
        for step in key.split("."):
            assert step in model.model_fields, key
            annotation = model.model_fields[step].annotation
            inner = [part for part in (annotation, *get_args(annotation)) if isinstance(part, type) and issubclass(part, BaseModel)]
            model = inner[0] if inner else BaseModel


def test_the_readme_counts_right() -> None:
    told = re.search(
        r"There are (\d+) advantage estimators, (\d+) policy losses, (\d+) aggregations, .*?(\d+) rejection statistics and (\d+)\s", README, re.DOTALL
    )
    assert told is not None
    assert [int(number) for number in told.groups()] == [len(known) for known in (ESTIMATORS, POLICY_LOSSES, AGGREGATIONS, STATISTICS, ESTIMATES)]


def test_links_within_the_page_lead_to_headings() -> None:
    headings = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings
