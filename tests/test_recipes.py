"""Every recipe loads, is small under `--smoke`, and its smoke run does two steps on this machine."""

from __future__ import annotations

import json
import os
import re
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.load import dump_recipe, load_recipe
from agentrl.config.paths import missing_files

ROOT = Path(__file__).resolve().parents[1]


def first_line(path: Path) -> str:
    line = path.read_text(encoding="utf-8").split("\n", 1)[0]
    assert line.startswith("# Laid on "), f"{path.name} has no name, and does not say which recipe it is laid on"
    return line.partition(":")[0]


FILES = sorted((ROOT / "recipes").glob("*.yaml"))
# A recipe is a run and has a name. A file without one is laid on those its first line names: `# Laid on a.yaml or b.yaml: ...`
RECIPES = [path for path in FILES if re.search(r"^name:", path.read_text(encoding="utf-8"), re.MULTILINE)]
LAID_ON = [(ROOT / "recipes" / base, path) for path in FILES if path not in RECIPES for base in re.findall(r"\w+\.yaml", first_line(path))]
SMOKE_S = 150.0  # a smoke run's deadline: a minute, and the machine's other work
REAL_DATA = Path(os.environ.get("AGENTRL_TEST_DATA", ROOT.parent / "shared" / "data"))

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
# Their smoke runs show little that others do not (another estimator; whole runs of the quick start), and all would take more than the tests' time.
RUN_IN_SOAK = ("search_r1_nq_grpo", "quickstart")
each_smoke_run = pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.soak if path.stem in RUN_IN_SOAK else ()) for path in RECIPES], ids=lambda path: path.stem
)


def agentrl(*arguments: str, cwd: Path, timeout_s: float = SMOKE_S) -> subprocess.CompletedProcess[str]:
    """The command line, in another directory, with this checkout's packages."""
    command = [sys.executable, "-c", "from agentrl.cli import main; main()", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_there_are_recipes():
    assert {"gsm8k_ppo", "quickstart", "search_r1_nq", "search_r1_nq_grpo"} <= {path.stem for path in RECIPES}


@each_recipe
def test_a_recipe_loads(path: Path):
    recipe = load_recipe([path])
    assert recipe.name == path.stem, "a recipe's run is called like its file"


@pytest.mark.parametrize(("base", "path"), LAID_ON, ids=lambda path: path.stem)
def test_a_file_that_is_laid_on_a_recipe_changes_it_and_it_stays_one(base: Path, path: Path):
    alone, laid = load_recipe([base]), load_recipe([base, path])
    assert laid.name == alone.name
    assert laid != alone
    assert missing_files(load_recipe([base, path], smoke=True)) == [], "what --smoke needs ships with the recipe"


@each_recipe
def test_a_recipe_loads_small(path: Path):
    recipe = load_recipe([path], smoke=True)
    assert (recipe.run.steps, recipe.engine.kind, recipe.engine.device, recipe.learner.device) == (2, "embedded", "cpu", "cpu")
    assert missing_files(recipe) == [], "what --smoke needs ships with the recipe"
    assert recipe.model.path is None


@each_recipe
@pytest.mark.parametrize("smoke", [False, True])
def test_a_resolved_recipe_is_a_recipe(path: Path, smoke: bool, tmp_path: Path):
    recipe = load_recipe([path], smoke=smoke)
    (tmp_path / "resolved.yaml").write_text(dump_recipe(recipe))
    assert load_recipe([tmp_path / "resolved.yaml"]) == recipe


@pytest.mark.parametrize(("name", "group_size"), [("search_r1_nq", 1), ("search_r1_nq_grpo", 5)])
def test_the_search_recipes_have_search_r1s_published_numbers(name: str, group_size: int):
    recipe = load_recipe([ROOT / "recipes" / f"{name}.yaml"])
    trajectories = recipe.learner.groups_per_batch * recipe.rollout.group_size
    assert (recipe.learner.groups_per_batch, recipe.rollout.group_size, trajectories // recipe.learner.mini_batches) == (512, group_size, 256)
    kl, advantage = recipe.algorithm.kl, recipe.algorithm.advantage
    if recipe.critic is not None:
        assert (recipe.critic.learning_rate, recipe.critic.schedule.warmup, recipe.critic.clip, recipe.critic.warmup_steps) == (1e-5, 0.015, 0.5, 0)
        assert (advantage.estimator, advantage.gamma, advantage.lam) == ("gae", 1.0, 1.0)
    assert (kl.where, kl.estimate, kl.coefficient) == (("loss", "k3", 0.001) if recipe.critic is None else ("reward", "k1", 0.001))
    assert (recipe.learner.learning_rate, recipe.learner.schedule.warmup, recipe.run.steps) == (1e-6, 0.285, 1005)
    limits = recipe.rollout.limits
    assert (limits.prompt_tokens, limits.completion_tokens, limits.observation_tokens, limits.context_tokens) == (2048, 500, 500, 4096)
    assert recipe.resources.engine_gpus * recipe.engine.replicas + recipe.resources.learner_gpus * recipe.learner.ranks == 8


def test_the_search_recipes_evaluate_on_search_r1s_seven_sets():
    from agentrl.data.public_sets import PUBLIC_SETS

    for name in ("search_r1_nq", "search_r1_nq_grpo"):
        base = ROOT / "recipes" / f"{name}.yaml"
        recipe, whole = load_recipe([base]), load_recipe([base, ROOT / "recipes" / "search_r1_full_eval.yaml"])
        sets = [known for known in PUBLIC_SETS.values() if known.kind == "questions"]
        assert set(recipe.eval.sets) == set(whole.eval.sets) == {known.name for known in sets}
        for known in sets:
            assert Path(whole.eval.sets[known.name].tasks[0].path or "").parts[-3:] == ("data", known.folder, f"{known.used[-1]}.jsonl")
            assert whole.eval.sets[known.name].tasks[0].limit is None
        assert recipe.tasks.train[0].path == str(Path.cwd() / "data" / "nq" / "train.jsonl")


def test_two_nodes_have_sixteen_gpus_in_use():
    for name in ("search_r1_nq", "search_r1_nq_grpo"):
        recipe = load_recipe([ROOT / "recipes" / f"{name}.yaml", ROOT / "recipes" / "search_r1_nq_2nodes.yaml"])
        booked = recipe.resources.engine_gpus * recipe.engine.replicas * recipe.engine.tensor_parallel
        assert booked + recipe.resources.learner_gpus * recipe.learner.ranks == 16
        assert recipe.run.ray_address == "auto"


def test_the_gsm8k_recipe_has_verls_published_numbers():
    recipe = load_recipe([ROOT / "recipes" / "gsm8k_ppo.yaml"])
    trajectories = recipe.learner.groups_per_batch * recipe.rollout.group_size
    assert (trajectories, trajectories // recipe.learner.mini_batches, recipe.run.epochs) == (1024, 256, 15)
    critic, advantage, kl = recipe.critic, recipe.algorithm.advantage, recipe.algorithm.kl
    assert critic is not None
    assert (recipe.learner.learning_rate, critic.learning_rate, critic.clip, critic.warmup_steps) == (1e-6, 1e-5, 0.5, 0)
    assert (advantage.estimator, advantage.gamma, advantage.lam) == ("gae", 1.0, 1.0)
    assert (kl.where, kl.estimate, kl.coefficient) == ("reward", "k1", 0.001)
    assert (recipe.rollout.limits.prompt_tokens, recipe.rollout.limits.completion_tokens) == (512, 512)


def test_the_gsm8k_recipes_smoke_run_is_shown_right_answers_to_its_own_prompts():
    from envs.numeric_answer import numeric_answer
    from envs.qa import PROMPT

    smoke = ROOT / "recipes" / "smoke"
    for task, shown in zip(rows_of(smoke / "gsm8k.jsonl"), rows_of(smoke / "gsm8k_demonstrations.jsonl"), strict=True):
        prompt, answer = (segment["text"] for segment in shown["segments"])
        assert f"<|im_start|>user\n{PROMPT.replace('{question}', task['question'])}<|im_end|>\n" in prompt
        assert numeric_answer(answer, [task["answer"]]) == 1.0


def test_the_quick_start_searches_in_the_format_of_its_warm_start():
    from envs.quickstart import ENV_OPTIONS

    recipe = load_recipe([ROOT / "recipes" / "quickstart.yaml"])
    assert recipe.env.options == dict(ENV_OPTIONS)
    assert recipe.prepare is not None
    assert recipe.warm_start is not None
    told = {name: recipe.prepare.options[f"warm_start_{name}"] for name in ("steps", "tokens_per_step", "pool")}
    assert told == {name: getattr(recipe.warm_start, name) for name in told}


@pytest.mark.slow
@each_smoke_run
def test_a_recipe_runs_small(path: Path, tmp_path: Path):
    ran = agentrl("run", str(path), "--smoke", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "runs" / f"{path.stem}-smoke" / "summary.json").read_text())
    assert summary["steps"] == 2


@pytest.mark.slow
@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f"no data at {REAL_DATA}; set AGENTRL_TEST_DATA")
def test_the_headline_runs_small_on_real_questions_and_passages(tmp_path: Path):
    questions, corpus = REAL_DATA / "nq_open" / "dev.jsonl", REAL_DATA / "xquad_en" / "corpus.jsonl"
    recipe = ROOT / "recipes" / "search_r1_nq.yaml"
    arguments = [f"tasks.train[0].path={questions}", f"eval.sets.nq.tasks[0].path={questions}", f"retriever.corpus={corpus}"]
    ran = agentrl("run", str(recipe), "--smoke", *arguments, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [row for row in evaluated(tmp_path / "runs" / "search_r1_nq-smoke") if row["set"] == "nq"]
    asked = {row["question"] for row in rows_of(questions)}
    assert {row["question"] for row in rows} <= asked
    assert [row["reward"] for row in rows] == [exact_match(row) for row in rows], "scored again from the completions alone"
    titles = {row["title"] for row in rows_of(corpus)}
    retrieved = [turn["observation"] for row in rows for turn in row["turns"] if turn["action"] == "search" and turn["observation"]]
    assert retrieved, "nothing was searched for"
    assert all(re.findall(r'Doc 1\(Title: "(.*?)"\)', observation)[0] in titles for observation in retrieved)


@pytest.mark.slow
def test_the_headline_at_full_size_says_what_is_missing(tmp_path: Path):
    ran = agentrl("run", str(ROOT / "recipes" / "search_r1_nq.yaml"), cwd=tmp_path)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "sglang" in ran.stderr


def evaluated(run_dir: Path) -> list[dict[str, Any]]:
    """The episodes of all evaluations of a run."""
    return [row for path in sorted((run_dir / "eval").glob("*.jsonl")) for row in rows_of(path)]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def exact_match(row: dict[str, Any]) -> float:
    """SQuAD's exact match of the last answer the policy itself wrote."""
    written = re.findall(r"<answer>(.*?)</answer>", "\n".join(turn["completion"] for turn in row["turns"]), re.DOTALL)
    return float(bool(written) and normalised(written[-1]) in {normalised(answer) for answer in row["answers"]})


def normalised(text: str) -> str:
    without_signs = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", without_signs).split())
