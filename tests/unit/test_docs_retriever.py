"""docs/retriever.md: its commands are parsed, its requests asked, its numbers computed, its metrics and keys compared with what there is."""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from agentrl.config.recipe import RetrieverRecipe
from retriever.app import create_app
from retriever.commands import adopt, bench, build, evaluate, info, serve, verify
from retriever.corpus import read_corpus
from retriever.index import Index
from retriever.local import LocalService
from retriever.metrics import Metrics
from retriever.query import Mode
from retriever.searchers.sizes import memory_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "retriever.md").read_text(encoding="utf-8")
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("docs/retriever.md", "docs/search_r1.md", "README.md", "CHANGELOG.md")}
TEXTS |= {f"recipes/{path.name}": path.read_text(encoding="utf-8") for path in (ROOT / "recipes").glob("search_r1*.yaml")}
PASSAGES, NUMBERS = 21_015_324, 768  # of Wikipedia by E5
COMMANDS = {"build": build, "serve": serve, "info": info, "verify": verify, "import": adopt, "evaluate": evaluate, "bench": bench}
OF_OTHERS = ("--no-deps", "--extra-index-url", "--yes", "--inplace", "--only")  # options of other programs


def parser() -> argparse.ArgumentParser:
    """All commands."""
    whole = argparse.ArgumentParser(exit_on_error=False)
    commands = whole.add_subparsers(dest="command", required=True)
    for command in COMMANDS.values():
        command.add(commands)
    return whole


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of every whole `agentrl retriever ...`: in blocks, in backticks, in comments, behind variables and over several lines."""
    joined = re.sub(r"\\\n[# ]*", " ", text)
    for line in joined.splitlines():
        for found in re.finditer(r"(?:^#? *|`|&& |[A-Z_]+=\S+ )agentrl retriever ([^`|>&]*)", line):
            words = shlex.split(found[1], comments=True)
            if len(words) > 1 and words[1] not in ("/", "|"):
                yield words


SHOWN = [(name, words) for name, text in TEXTS.items() for words in commands_in(text)]


@pytest.mark.parametrize(("name", "words"), SHOWN, ids=[f"{name}:{' '.join(words)[:60]}" for name, words in SHOWN])
def test_a_command_that_is_shown_is_one(name: str, words: list[str]):
    told = parser().parse_args(words)
    assert told.command == words[0]


def test_every_command_and_every_file_is_among_those_shown():
    assert {words[0] for name, words in SHOWN if name == "docs/retriever.md"} == set(COMMANDS)
    assert {name for name, _ in SHOWN} >= {"docs/retriever.md", "docs/search_r1.md", "README.md", "recipes/search_r1_nq.yaml"}


def test_options_that_are_named_exist():
    known = {option for command in COMMANDS for option in options_of(command)}
    named = {word for code in re.findall(r"`([^`\n]+)`", PAGE) for word in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", code)}
    assert named - known == set(OF_OTHERS) & named


def options_of(command: str) -> Mapping[str, argparse.Action]:
    whole = parser()
    [subparsers] = [action for action in whole._actions if isinstance(action, argparse._SubParsersAction)]
    return {option: action for action in subparsers.choices[command]._actions for option in action.option_strings}


def test_the_defaults_in_the_table_of_serving_are_the_servers():
    options, checked = options_of("serve"), 0
    for row in rows_of("| option | default | what it changes |"):
        option, shown = re.findall(r"`(--[a-z-]+)", row[0])[0], row[1].strip("`").replace(",", "")
        if shown:
            assert re.search(rf"\b{re.escape(shown)}\b", options[option].help or ""), option
            checked += 1
    assert checked >= 6


def rows_of(header: str) -> list[list[str]]:
    """The cells of the rows of the page's table with this header."""
    lines = PAGE[PAGE.index(header) :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def examples() -> list[tuple[str, str, Any, int, Any]]:
    """Method, path, body, status and answer of every block that shows a request."""
    found = []
    for block in re.findall(r"^```\n((?:POST|GET) .*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        asked, answered = block.split("\n\n", 1)
        (method, path), body = asked.split("\n")[0].split(), asked.split("\n")[1:]
        status, answer = answered.split("\n", 1)
        found.append((method, path, json.loads(body[0]) if body else None, int(status), json.loads(answer)))
    return found


@pytest.mark.slow
def test_requests_that_are_shown_are_answered_as_shown(tmp_path: Path):
    [corpus] = re.findall(r"cat > passages.jsonl <<'END'\n(.*?)END\n", PAGE, re.DOTALL)
    (tmp_path / "passages.jsonl").write_text(corpus, encoding="utf-8")
    documents = read_corpus(tmp_path / "passages.jsonl")

    async def answers() -> list[tuple[int, Any]]:
        async with LocalService(Index.of(documents)) as service:
            transport = httpx.ASGITransport(app=create_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://retriever") as client:
                asked = [await client.request(method, path, json=body) for method, path, body, _, _ in examples()]
                return [(answer.status_code, answer.json()) for answer in asked]

    found = asyncio.run(answers())
    assert len(found) >= 4
    for (_, path, body, status, shown), (told, answer) in zip(examples(), found, strict=True):
        assert (told, rounded(answer)) == (status, shown), f"{path} {body}"


def rounded(value: Any) -> Any:
    """With scores as the page shows them."""
    if isinstance(value, dict):
        return {key: round(inner, 2) if key == "score" else rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def test_the_metrics_are_those_of_the_server():
    shown = {name.removesuffix("_total") for row in rows_of("| metric | what |") for name in re.findall(r"`(retriever_\w+)`", row[0])}
    served = set(re.findall(r"^# TYPE (\w+?)(?:_total)? ", Metrics().render().decode(), re.MULTILINE))
    assert shown == served | ({"retriever_faiss_blas_threshold"} & shown), "FAISS tells its own where it is loaded"


def test_modes_and_keys_are_those_of_the_api_and_of_recipes():
    [mode] = [row for row in rows_of("| key | takes | without it |") if row[0] == "`mode`"]
    assert re.findall(r"`(\w+)`", mode[1]) == [str(mode) for mode in Mode]
    for block in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        RetrieverRecipe.model_validate(yaml.safe_load(block)["retriever"])


def test_sizes_of_indexes_are_those_that_a_plan_says():
    rows = rows_of("| `--index` | bytes a vector | 21 million | finds | build |")
    assert len(rows) >= 6
    for factory, each, total, *_ in rows:
        size = memory_of(factory.strip("`"), PASSAGES, NUMBERS).disk_bytes
        assert (f"{size / PASSAGES:,.0f}", f"{size / 1e9:.1f} GB") == (each, total), factory
    assert round(2 * NUMBERS * PASSAGES / 1e9, 1) == 32.3
    operations = 2 * 64 * PASSAGES * NUMBERS
    assert [round(operations / (cores * 72e9), 1) for cores in (16, 32)] == [1.8, 0.9], "seconds a batch of 64"


def test_messages_that_are_quoted_are_written_somewhere():
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "retriever").rglob("*.py"))
    quoted = [row[0] for row in rows_of("| what you see | what it is | what to do |") if re.fullmatch(r"`[^`]+`", row[0])]
    assert len(quoted) >= 4
    for message in quoted:
        assert message.strip("`").removeprefix("... ") in sources, message


def test_python_that_is_shown_compiles_and_imports_what_is_public():
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("retriever"):
                assert {alias.name for alias in node.names} <= set(importlib.import_module(node.module or "").__all__)


def test_links_within_the_page_lead_to_its_headings():
    headings = {re.sub(r"[^a-z0-9 -]", "", line.lower().lstrip("# ")).replace(" ", "-") for line in PAGE.splitlines() if line.startswith("#")}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings
