"""How an SGLang server is started, and what is said where that cannot be."""

import json
import stat
import sys
from pathlib import Path

import pytest

from agentrl.config.load import load_recipe
from agentrl.errors import ConfigError, EngineUnavailable
from agentrl.system.sglang import SGLangServer, installed_version, launch_command, launch_environment, require_abilities, require_sglang

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


def recipe(*overrides):
    return load_recipe([QUICKSTART], ["engine.kind=sglang", *overrides])


def impostor(tmp_path, does):
    """A `python` that does this instead of starting SGLang."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{does}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def flags(command):
    """Launch flags as a map; True for a bare one."""
    words = command[command.index("sglang.launch_server") + 1 :]
    pairs = list(zip(words, [*words[1:], "--"], strict=True))
    return {word: True if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def test_the_command_line_says_what_the_recipe_says():
    command = launch_command(recipe("engine.python=py", "seed=3", "engine.tensor_parallel=2"), Path("/model"), host="127.0.0.1", port=31)
    assert command[:3] == ["py", "-m", "sglang.launch_server"]
    assert flags(command) == {
        "--model-path": "/model",
        "--host": "127.0.0.1",
        "--port": "31",
        "--dtype": "float32",
        "--context-length": "232",  # 224 that the recipe asks for, and what SGLang keeps for itself
        "--max-running-requests": "128",
        "--tp-size": "2",
        "--random-seed": "3",
        "--weight-version": "0",
        "--log-level-http": "warning",
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--mem-fraction-static": "0.1",
        "--max-total-tokens": str(128 * 224),
    }


def test_options_are_further_flags_and_win():
    options = ("engine.options.mem_fraction_static=0.3", "engine.options.enable_metrics=true", "engine.options.disable_radix_cache=false")
    told = flags(launch_command(recipe("engine.python=py", *options), Path("/model"), host="127.0.0.1", port=31))
    assert (told["--mem-fraction-static"], told["--enable-metrics"]) == ("0.3", True)
    assert "--disable-radix-cache" not in told


def test_the_servers_environment_is_not_ours(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = launch_environment(recipe("engine.python=py", "engine.threads=2", "engine.environment.MINE=yes", "engine.tensor_parallel=2"))
    assert "PYTHONPATH" not in environment
    assert (environment["OMP_NUM_THREADS"], environment["MINE"]) == ("2", "yes")
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"


@pytest.mark.slow
def test_keys_reach_the_server_by_a_file_for_its_owner_that_is_gone_when_it_is_ready(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    asked = recipe(f"engine.python={impostor(tmp_path, 'echo api_key secret; exec sleep 600')}", "engine.api_key_variable=MY_KEY")
    with SGLangServer.start(asked, Path("/model"), log=tmp_path / "server.log") as server:
        assert "secret" not in " ".join(server.guardian.args)
        [file] = tmp_path.glob(".sglang-*.yaml")
        assert (json.loads(file.read_text()), file.stat().st_mode & 0o777) == ({"api-key": "secret"}, 0o600)
        assert flags(server.guardian.args)["--config"] == str(file)
        with pytest.raises(EngineUnavailable, match="api_key <key>"):
            server.wait_ready(0.5)
        assert server.log.stat().st_mode & 0o777 == 0o600
    assert not file.exists()


def test_a_key_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"engine\.admin_key_variable is NO_KEY, and the environment has no such variable: export NO_KEY"):
        require_sglang(recipe("engine.admin_key_variable=NO_KEY"))


@pytest.mark.parametrize("option", ["port=30000", "host=0.0.0.0", "api_key=x"])
def test_what_the_run_sets_itself_is_no_option(option):
    with pytest.raises(ConfigError, match=rf"engine\.options\.{option.split('=')[0]} is set by the run itself"):
        recipe(f"engine.options.{option}")


def test_a_recipe_without_a_python_is_told_how_to_get_one():
    with pytest.raises(ConfigError, match=r"needs engine\.python.*pip install \"sglang==0\.5\.23\".*engine\.urls"):
        require_sglang(recipe())
    require_sglang(recipe("engine.urls=[http://127.0.0.1:1]"))


@pytest.mark.slow
def test_a_python_that_is_none_or_has_no_sglang_is_told_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.python /no/python cannot be run"):
        installed_version("/no/python")
    with pytest.raises(ConfigError, match="has no sglang"):
        installed_version(sys.executable)
    assert installed_version(str(impostor(tmp_path, "echo 0.5.23"))) == "0.5.23"


def test_a_version_without_spans_is_only_taken_where_no_reply_can_have_two_versions():
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.17 does not say which weights wrote which token"):
        require_abilities("0.5.17", recipe())
    require_abilities("0.5.17", recipe("weights.pause=abort"))
    require_abilities("0.5.20", recipe())


@pytest.mark.slow
def test_a_server_that_ends_while_it_starts_is_told_with_its_last_lines(tmp_path):
    python = impostor(tmp_path, "echo loading; echo out of memory >&2; exit 3")
    with (
        SGLangServer.start(recipe(f"engine.python={python}"), Path("/model"), log=tmp_path / "server.log") as server,
        pytest.raises(EngineUnavailable, match=r"ended with code 3 while it started(?s:.*)loading\n    out of memory"),
    ):
        server.wait_ready(20)


@pytest.mark.slow
def test_a_flag_that_sglang_does_not_know_is_named_as_the_option_it_is(tmp_path):
    usage = "for i in 1 2 3; do echo usage: $i; done; echo sglang serve: error: unrecognized arguments: --mem-fraction-statik 0.3 >&2"
    python = impostor(tmp_path, f'[ "$1" = -c ] && {{ echo 0.5.23; exit 0; }}\n{usage}; exit 2')
    asked = recipe(f"engine.python={python}", "engine.options.mem_fraction_statik=0.3")
    with SGLangServer.start(asked, Path("/model"), log=tmp_path / "server.log") as server, pytest.raises(EngineUnavailable) as told:
        server.wait_ready(20)
    assert str(told.value).startswith("engine.options names what SGLang 0.5.23 does not know: --mem-fraction-statik; the SGLang server ended")
    assert str(told.value).endswith("server.log:\n    sglang serve: error: unrecognized arguments: --mem-fraction-statik 0.3")
    assert "usage" not in str(told.value)


@pytest.mark.slow
def test_the_log_of_the_server_before_is_kept(tmp_path):
    log = tmp_path / "server.log"
    for said in ("first", "second"):
        with SGLangServer.start(recipe(f"engine.python={impostor(tmp_path, f'echo {said}')}"), Path("/model"), log=log) as server:
            server.wait()
    assert (log.read_text(), log.with_name("server.log.old").read_text()) == ("second\n", "first\n")


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path):
    python = impostor(tmp_path, "echo waiting; exec sleep 600")
    with SGLangServer.start(recipe(f"engine.python={python}"), Path("/model"), log=tmp_path / "server.log") as server:
        with pytest.raises(EngineUnavailable, match=r"not ready within engine\.start_deadline_s \(0\.5 s\)(?s:.*)waiting"):
            server.wait_ready(0.5)
        server.stop()
        assert server.wait() == 128 + 15
