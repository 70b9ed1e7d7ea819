"""docs/search_r1.md and deploy/: every command, option, recipe and key in them is one, and the tables add up."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from agentrl.cli import app
from agentrl.config.load import load_recipe
from agentrl.data.public_sets import PUBLIC_SETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "search_r1.md").read_text(encoding="utf-8")
DEPLOY = ROOT / "deploy"
RECIPES = [ROOT / "recipes" / f"{name}.yaml" for name in ("search_r1_nq", "search_r1_nq_grpo")]
TEXTS = {
    "docs/search_r1.md": PAGE,
    "deploy/README.md": (DEPLOY / "README.md").read_text(encoding="utf-8"),
    "deploy/slurm.sh": (DEPLOY / "slurm.sh").read_text(encoding="utf-8"),
    "deploy/kuberay.yaml": (DEPLOY / "kuberay.yaml").read_text(encoding="utf-8"),
    "deploy/Dockerfile": (DEPLOY / "Dockerfile").read_text(encoding="utf-8"),
}
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of every `agentrl ...` that a text shows: in blocks, behind a comment's sign, in backticks, or as the end of a longer command."""
    joined = re.sub(r"\\\n[# ]*", " ", text)
    for line in joined.splitlines():
        for found in re.finditer(r"(?:^#? *|`|&& |\\ *)(?:/opt/agentrl/bin/)?(agentrl [^`|>&]*)", line):
            yield shlex.split(found[1], comments=True)[1:]


SHOWN = [(name, words) for name, text in TEXTS.items() for words in commands_in(text) if words]


def test_commands_are_shown_in_every_file():
    assert {name for name, _ in SHOWN} >= {"docs/search_r1.md", "deploy/README.md", "deploy/slurm.sh", "deploy/Dockerfile"}


@pytest.mark.parametrize(("name", "words"), SHOWN, ids=[f"{name}:{' '.join(words)[:40]}" for name, words in SHOWN])
def test_a_command_that_is_shown_is_one(name: str, words: list[str]):
    command = words[0]
    if command == "--help":
        return
    assert command in COMMANDS, f"{name}: agentrl {command}"
    options = {option for parameter in COMMANDS[command].params for option in parameter.opts}
    if command != "retriever":  # its options are another program's
        assert {word for word in words if word.startswith("--")} <= options
    if command == "data":
        assert set(positional(words)) <= {"NAME...", *PUBLIC_SETS}
    if command in ("run", "validate", "evaluate"):
        arguments = positional(words)
        files = [ROOT / "recipes" / Path(word).name for word in arguments if word.endswith(".yaml")]
        overrides = [re.sub(r"\$\{?\w+\}?", "/x", word) for word in arguments if "=" in word]
        if files:
            load_recipe(files, overrides)


def positional(words: list[str]) -> list[str]:
    """Without options and their values."""
    kept, behind = [], False
    for word in words[1:]:
        if not behind and not word.startswith("--"):
            kept.append(word)
        behind = word.startswith("--")
    return kept


def tables(text: str) -> Iterator[list[dict[str, str]]]:
    header: list[str] = []
    rows: list[dict[str, str]] = []
    for line in [*text.splitlines(), ""]:
        cells = [cell.strip() for cell in line.split("|")[1:-1]] if line.startswith("|") else []
        if not cells:
            if rows:
                yield rows
            header, rows = [], []
        elif not header:
            header = cells
        elif not set(cells[0]) <= {"-"}:
            assert len(cells) == len(header), line
            rows.append(dict(zip(header, cells, strict=True)))


@pytest.mark.slow
def test_every_override_in_the_tables_of_differences_changes_the_recipes():
    ways = [code for table in tables(PAGE) for row in table for code in re.findall(r"`([^`]+)`", row.get("its way", ""))]
    assert len(ways) > 12
    for way in ways:
        changed = []
        for path in RECIPES:
            if "gae" in way and "grpo" in path.stem:  # about a critic
                continue
            base, laid = load_recipe([path]), load_recipe([path], [way])
            changed.append(base != laid)
        assert any(changed), f"{way} changes nothing"


def test_the_means_of_published_results_are_those_of_their_rows():
    checked = 0
    for table in tables(PAGE):
        for row in table:
            numbers = [float(cell) for cell in list(row.values())[1:8] if re.fullmatch(r"\.\d{3}", cell)]
            if len(numbers) == 7 and not (row["method"] == "IRCoT" and row["mean"] == ".239"):  # printed so: the page says it
                assert sum(numbers) / 7 == pytest.approx(float(row["mean"]), abs=0.00075), row
                checked += 1
    assert checked == 25
    assert PAGE.count("| agentrl, base, ") == 4
    assert all("not run" in line for line in PAGE.splitlines() if line.startswith("| agentrl, "))


def test_the_table_of_data_is_what_agentrl_data_writes():
    [table] = [rows for rows in tables(PAGE) if "source on the Hugging Face hub" in rows[0]]
    repository = ""
    for row in table:
        known = PUBLIC_SETS[row["name"].strip("`")]
        repository = repository if row["source on the Hugging Face hub"] == "the same" else row["source on the Hugging Face hub"]
        assert repository == known.repository
        assert re.findall(r"`([^`]+)`", row["files"]) == [f"{known.folder}/{known.files[split].written}" for split in known.used]
        if known.kind != "index":
            assert row["rows"] == ", ".join(f"{known.files[split].count:,}" for split in known.used)
    assert {row["name"].strip("`") for row in table} == set(PUBLIC_SETS)


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_parses(script: Path):
    shell = "bash" if script.read_text().startswith("#!/bin/bash") else "sh"
    assert subprocess.run([shell, "-n", str(script)], capture_output=True, check=False).stderr == b""


def test_the_ray_job_has_the_fields_of_kuberays_api_and_two_nodes_of_eight_gpus():
    job = yaml.safe_load(TEXTS["deploy/kuberay.yaml"])
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    # RayJobSpec, RayClusterSpec, HeadGroupSpec and WorkerGroupSpec of KubeRay 1.6.
    assert set(spec) <= {"entrypoint", "submissionMode", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec"}
    assert set(cluster) == {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
    head, [workers] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert set(head) == {"rayStartParams", "template"}
    assert set(workers) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    pods = [group["template"]["spec"]["containers"][0] for group in (head, workers)]
    gpus = [pod["resources"]["limits"]["nvidia.com/gpu"] for pod in pods]
    words = shlex.split(spec["entrypoint"])[1:]
    recipe = load_recipe([ROOT / "recipes" / Path(word).name for word in words if word.endswith(".yaml")], [word for word in words if "=" in word])
    booked = recipe.resources.engine_gpus * recipe.engine.replicas + recipe.resources.learner_gpus * recipe.learner.ranks
    assert sum(gpus) == booked == 16
    tested = (ROOT / "constraints" / "tested.txt").read_text()
    assert f"ray=={cluster['rayVersion']}\n" in tested


def test_the_image_copies_what_is_there_and_pins_what_it_installs():
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXTS["deploy/Dockerfile"], flags=re.MULTILINE)).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line.strip()]
    assert {step[0] for step in steps} <= {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    copied = [source for name, rest in steps if name == "COPY" for source in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    let_in = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{source}" for source in copied} <= set(let_in)
    arguments = dict(rest.split("=", 1) for name, rest in steps if name == "ARG")
    assert arguments["SGLANG"] == "0.5.23"
    assert f"torch=={arguments['TORCH']}\n" in (ROOT / "constraints" / "cpu.txt").read_text()
