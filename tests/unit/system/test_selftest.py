"""What a self-test makes of a recipe, of the files its run leaves behind, of a model's directory and of a chat template."""

import json
from pathlib import Path

import pytest
import trio
from learner_scene import tiny_recipe, tiny_tokenizer
from trio.testing import MockClock

from agentrl.config.load import load_recipe
from agentrl.errors import EngineRefused
from agentrl.rollout.chat import ChatTemplate
from agentrl.rollout.tokens import TokenEncoder
from agentrl.system.check import Check, canary, log_probs, nothing_changes
from agentrl.system.driver import with_beside
from agentrl.system.probe import template, tokenizer, vocabulary
from agentrl.system.selftest import selftest_recipe
from agentrl.testing.engine import FakeEngine
from agentrl.testing.tokenizer import CHAT_TEMPLATE

ROOT = Path(__file__).parents[3]
RECIPES = [path for path in sorted((ROOT / "recipes").glob("*.yaml")) if "\nname: " in path.read_text()]  # others are laid on these
BOUNDS = (1e-3, 1e-4)

# Qwen3's way with thoughts: those of all turns but the last are left out.
FORGETFUL = """\
{%- for message in messages %}
    {%- set words = message.content %}
    {%- if message.role == 'assistant' and '</think>' in words %}{% set words = words.split('</think>')[-1].lstrip('\\n') %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + words + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def write_lines(file: Path, *lines: dict) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def step(largest: float, mean: float, tokens: float) -> dict:
    return {"step": 1, "metrics": {"learner/logprob_gap_max": largest, "learner/logprob_gap_mean": mean, "learner/tokens": tokens}}


def heard(version: int, *, sent: str = "a", held: str = "a", gap: float = 1e-6, unheard: tuple[int, ...] = ()) -> dict:
    return {"version": version, "checksum": sent, "engines": [{"engine": 0, "gap_max": gap, "checksum": held}], "unheard": list(unheard)}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("smoke", [False, True], ids=["whole", "smoke"])
def test_every_recipe_has_a_self_test_that_trains_nothing(path, smoke):
    recipe = load_recipe([path], [], smoke=smoke)
    tested = selftest_recipe(recipe)
    assert tested.name == f"{recipe.name}-selftest"
    assert (tested.run.steps, tested.learner.learning_rate, tested.weights.publish_every) == (3, 0.0, 1)
    assert (tested.canary.every, tested.canary.checksums) == (1, True)
    assert (tested.engine, tested.model, tested.resources, tested.tasks) == (recipe.engine, recipe.model, recipe.resources, recipe.tasks)


def test_what_would_keep_tokens_from_being_compared_is_taken_out():
    recipe = tiny_recipe(
        buffer={"filter": "mixed", "stops": {"context_limit": "mask"}},
        algorithm={"max_token_age": 1},
        canary=None,
        critic={"warmup_steps": 5},
        algorithm__advantage={"estimator": "gae"},
        learner={"mini_batches": 4, "groups_per_batch": 32, "ranks": 3},
    )
    tested = selftest_recipe(recipe)
    assert (tested.buffer.filter, tested.buffer.stops.context_limit, tested.algorithm.max_token_age) == ("none", "train", None)
    assert (tested.critic.warmup_steps, tested.critic.learning_rate) == (0, 0.0)
    assert (tested.learner.mini_batches, tested.learner.groups_per_batch) == (1, 3)
    assert tested.canary.every == 1


def test_a_line_says_whether_it_passed_and_only_then_what_to_do():
    assert str(Check(name="canary", passed=True, told="2 checks", remedy="look")) == "ok    canary            2 checks"
    assert str(Check(name="canary", passed=False, told="2 checks", remedy="look")) == "FAIL  canary            2 checks. look"


def test_log_probs_are_the_largest_and_the_mean_over_all_steps_tokens(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", step(5e-4, 2e-5, 100), step(2e-4, 6e-5, 300), {"step": 3, "metrics": {}})
    assert log_probs(tmp_path, BOUNDS).passed
    assert "of 400 tokens that engines sampled: 0.0005 at most and 5e-05 on average" in log_probs(tmp_path, BOUNDS).told
    assert not log_probs(tmp_path, (4e-4, 1e-4)).passed
    assert not log_probs(tmp_path, (1e-3, 4e-5)).passed
    assert "no token" in log_probs(tmp_path / "elsewhere", BOUNDS).told


def test_weights_that_change_at_learning_rate_0_are_the_learners_or_the_engines(tmp_path):
    file = tmp_path / "canary.jsonl"
    write_lines(file, heard(0), heard(1))
    assert nothing_changes(tmp_path).passed
    write_lines(file, heard(0), heard(1, sent="b", held="b"))
    assert (nothing_changes(tmp_path).passed, "2 checksums at the learner" in nothing_changes(tmp_path).told) == (False, True)
    write_lines(file, heard(0), heard(1, held="b"))
    assert (nothing_changes(tmp_path).passed, "several at engine 0" in nothing_changes(tmp_path).told) == (False, True)
    write_lines(file, heard(0))
    assert not nothing_changes(tmp_path).passed  # one version proves nothing


def test_the_canary_must_have_been_heard_at_every_engine(tmp_path):
    write_lines(tmp_path / "canary.jsonl", heard(0, unheard=(1,)), heard(1, gap=2e-6) | {"unheard": []})
    told = canary(tmp_path)
    assert (told.passed, told.told) == (False, "2 checks of 1 engines under 2 versions: 2e-06 at most")
    assert "engine 1" in told.remedy
    write_lines(tmp_path / "canary.jsonl", heard(0), heard(1, gap=2e-6))
    assert canary(tmp_path).passed
    write_lines(tmp_path / "canary.jsonl", heard(0), heard(1), {"version": 1, "verdict": "the canary: engine 0 and the learner"})
    assert str(canary(tmp_path)) == "FAIL  canary            the canary: engine 0 and the learner"


@pytest.mark.parametrize(("dead", "told"), [(True, "could not be asked"), (False, "have a tokenizer?")])
def test_an_engine_that_does_not_answer_says_nothing_about_its_tokenizer(tmp_path, dead, told):
    folder = tiny_tokenizer(tmp_path)
    engine = FakeEngine(lambda body: (), encoder=TokenEncoder.load(folder))
    engine.dead, engine.scores = dead, refuse
    line = str(trio.run(tokenizer, engine.client(), folder, ["a text"]))
    assert line.startswith("FAIL  tokenizer ")
    assert told in line


def refuse(ids):
    raise EngineRefused("no tokenizer")


@pytest.mark.parametrize(("phase", "asked"), [("finished", True), ("stopped", False)])
def test_a_run_that_finishes_waits_for_what_is_asked_beside_it_and_one_that_is_stopped_does_not(phase, asked):
    answers = []

    async def follow():
        await trio.sleep(1.0)
        return phase

    async def beside():
        await trio.sleep(60.0)
        answers.append("all")

    async def main():
        assert await with_beside(follow, beside, patience_s=100.0) == phase
        assert await with_beside(follow, trio.sleep_forever, patience_s=100.0) == phase
        assert await with_beside(follow, None) == phase

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert bool(answers) == asked


@pytest.mark.parametrize(
    ("config", "passed", "remedy"),
    [
        ({"vocab_size": 64, "eos_token_id": 2}, True, ""),
        ({"vocab_size": 47, "eos_token_id": 2}, False, "Ids beyond the embedding"),
        ({"vocab_size": 48, "eos_token_id": [2, 48]}, False, "is no id of the model"),
        ({"vocab_size": 48, "eos_token_id": 1}, False, "Add 2 to eos_token_id"),
    ],
)
def test_every_id_has_a_row_and_the_model_ends_where_the_tokenizer_says(tmp_path, config, passed, remedy):
    (tiny_tokenizer(tmp_path) / "config.json").write_text(json.dumps(config))
    check = vocabulary(tmp_path)
    assert (check.passed, remedy in check.remedy) == (passed, True)
    assert check.told.startswith(f"48 ids of the tokenizer for {config['vocab_size']} rows")


def test_a_template_that_only_appends_passes_and_one_that_forgets_thoughts_does_not():
    assert template(ChatTemplate(CHAT_TEMPLATE, {}), "user", "tool").passed
    check = template(ChatTemplate(FORGETFUL, {}), "user", "user")
    assert not check.passed
    whole = r"'an answer<|im_end|>\n<|im_start|>user\nmes'"
    ours = r"'<think>\na thought\n</think>\n\nan answer<|i'"
    opening = len("<|im_start|>user\nmessage 0<|im_end|>\n<|im_start|>assistant\n")
    assert check.told == f"after {opening} characters a whole conversation has {whole} where turn by turn there is {ours}"
    assert template(ChatTemplate(FORGETFUL, {}), "user", None).passed  # observations are appended as they are
    assert template(None, "user", "user").passed
    assert template(ChatTemplate(FORGETFUL, {}), None, None).passed
