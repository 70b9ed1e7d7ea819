"""Whose a run directory is."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError
from agentrl.system.rundir import RunDirectory, is_running


def recipe(directory: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r",
            "run": {"steps": 1, "dir": str(directory)},
            "model": {"path": "m"},
            "tasks": {"train": [{"path": "t.jsonl"}]},
            "env": {"factory": "envs.search:SearchEnv"},
        }
    )


@pytest.mark.slow  # a start tries for a moment
def test_a_run_runs_while_its_directory_is_open_and_a_second_start_is_refused(tmp_path):
    assert not is_running(tmp_path / "r")
    with RunDirectory.open(recipe(tmp_path), resolved="", command=[], fresh=False) as directory:
        assert is_running(directory.path)
        with pytest.raises(ConfigError, match="is in use by process"), RunDirectory.open(recipe(tmp_path), resolved="", command=[], fresh=False):
            pass
    assert not is_running(tmp_path / "r")


def test_asking_whether_it_runs_does_not_keep_the_lock(tmp_path):
    (tmp_path / ".lock").touch()
    assert not is_running(tmp_path)
    with open(tmp_path / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert is_running(tmp_path)
