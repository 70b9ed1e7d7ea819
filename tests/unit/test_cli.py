"""The command line: quick, and clear about what is wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl import __version__
from agentrl.cli import app
from agentrl.errors import ConfigError
from agentrl.system.engine_server import fitting_context

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
HELP_S, VALIDATE_S = 0.5, 1.0


def agentrl(*arguments: str, after: str = "") -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own. `after` runs when it has ended."""
    code = f"from agentrl.cli import main\ntry: main()\nfinally:\n    import sys; {after or 'pass'}"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


def best_of_3(*arguments: str) -> float:
    """Seconds of the fastest of three runs: what it takes, not what else the machine does."""
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        assert agentrl(*arguments).returncode == 0
        taken.append(time.perf_counter() - started)
    return min(taken)


def test_a_recipe_is_validated_and_its_essentials_told():
    told = CliRunner().invoke(app, ["validate", QUICKSTART, "rollout.max_staleness=0"])
    assert told.exit_code == 0
    assert "24 groups x 16 = 384 trajectories, 1 optimizer update" in told.stdout
    assert "after 50 steps = 19,200 trajectories" in told.stdout
    assert "K = 0: synchronous" in told.stdout


def test_a_resolved_recipe_can_be_printed_whole():
    told = CliRunner().invoke(app, ["validate", QUICKSTART, "--smoke", "--full", "seed=7"])
    assert told.exit_code == 0
    assert "name: quickstart-smoke\nseed: 7\n" in told.stdout


def test_the_version_is_told():
    assert CliRunner().invoke(app, ["version"]).stdout == f"{__version__}\n"


@pytest.mark.slow
def test_help_answers_at_once():
    assert best_of_3("--help") < HELP_S


@pytest.mark.slow
def test_validating_takes_less_than_a_second():
    assert best_of_3("validate", QUICKSTART) < VALIDATE_S


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("validate", QUICKSTART), ("version",)])
def test_nothing_heavy_is_imported_before_it_is_needed(arguments: tuple[str, ...]):
    ran = agentrl(*arguments, after="print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules], file=sys.stderr)")
    assert (ran.returncode, ran.stderr) == (0, "[]\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", QUICKSTART, "lerner.ranks=2"), "override 'lerner.ranks=2': unknown key lerner (did you mean learner?)\n"),
        (("validate", "no.yaml"), "no.yaml: cannot read the recipe: No such file or directory\n"),
        (("validate", "seed=3"), "no recipe file given\n"),
        (("status", "no-such-run"), "no such run: neither no-such-run nor runs/no-such-run is a directory\n"),
        (("export", "no-such-checkpoint", "--out", "x"), "CHECKPOINT: no such directory: no-such-checkpoint\n"),
        (("evaluate", QUICKSTART, "--checkpoint", "nowhere"), "--checkpoint: no such directory: nowhere\n"),
    ],
)
def test_what_is_wrong_is_told_on_stderr_and_exits_with_2(arguments: tuple[str, ...], told: str):
    ran = agentrl(*arguments, after="assert 'torch' not in sys.modules")
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", told)


@pytest.mark.slow
def test_the_retrievers_arguments_are_passed_through():
    ran = agentrl("retriever", "--help")
    assert ran.returncode == 0
    assert "build" in ran.stdout
    assert "serve" in ran.stdout


def test_validate_names_code_that_is_not_there(tmp_path):
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
    told = CliRunner().invoke(app, ["validate", str(recipe), "env.factory=nothing:Here"])
    assert told.exit_code == 0
    assert "missing      env.factory: nothing:Here: module nothing cannot be imported" in told.stdout


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), "missing      engine.kind sglang needs engine.python"),
        (("engine.python=/no/python",), "missing      engine.python /no/python cannot be run"),
        (("engine.urls=[http://127.0.0.1:1]", "engine.api_key_variable=NO_KEY"), "missing      engine.api_key_variable is NO_KEY"),
    ],
)
def test_validate_names_what_an_sglang_engine_lacks(overrides: tuple[str, ...], told: str):
    ran = CliRunner().invoke(app, ["validate", QUICKSTART, "engine.kind=sglang", *overrides])
    assert ran.exit_code == 0
    assert told in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("option", [("--port", "99999"), ("--device", "tpu")])
def test_an_engines_options_out_of_range_are_wrong_arguments(tmp_path: Path, option: tuple[str, str]):
    ran = agentrl("engine", "serve", str(tmp_path), *option, after="assert 'torch' not in sys.modules")
    assert (ran.returncode, "Traceback" in ran.stderr) == (2, False)
    assert f"Invalid value for '{option[0]}'" in ran.stderr


@pytest.mark.slow
def test_a_port_in_use_is_told_before_the_model_is_looked_at(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = agentrl("engine", "serve", str(tmp_path), "--port", str(port))
    assert (ran.returncode, ran.stderr) == (2, f"--host 127.0.0.1 --port {port} cannot be listened at: Address already in use\n")


@pytest.mark.slow
def test_an_engine_serves_as_long_sequences_as_its_model_can(tmp_path: Path):
    config = {"model_type": "qwen2", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    for positions, asked, fitting in ((512, None, 512), (32768, None, 4096), (512, 100, 100)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
        assert fitting_context(tmp_path, asked) == fitting
    with pytest.raises(ConfigError, match=r"--context-tokens 513: .* was made for 512 positions"):
        fitting_context(tmp_path, 513)


@pytest.mark.parametrize(("command", "lacks"), [(["export", "--out", "x"], "manifest.json"), (["engine", "serve"], "config.json")])
def test_a_folder_of_another_kind_is_a_wrong_argument(tmp_path, command, lacks):
    with pytest.raises(ConfigError, match=f"it has no {lacks}"):
        CliRunner().invoke(app, [*command, str(tmp_path)], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "a-host"])
def test_an_engine_that_others_can_reach_wants_a_key(tmp_path, host):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"--host {host} can be reached from other machines.*--api-key-variable NAME"):
        CliRunner().invoke(app, ["engine", "serve", str(tmp_path), "--host", host], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--api-key-variable", "--admin-key-variable"])
def test_a_key_variable_that_is_not_set_is_a_wrong_argument(tmp_path, option):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"{option} NO_SUCH_VARIABLE: the environment variable NO_SUCH_VARIABLE is not set"):
        CliRunner().invoke(app, ["engine", "serve", str(tmp_path), option, "NO_SUCH_VARIABLE"], catch_exceptions=False)
