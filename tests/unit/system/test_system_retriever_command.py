"""How a run starts its retriever."""

from __future__ import annotations

import pytest

from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError
from agentrl.system.roles.retriever import serve_command

BASE = {"name": "r", "model": {"path": "m"}, "tasks": {"train": [{"path": "t.jsonl"}]}, "env": {"factory": "my:Env"}}


def command(retriever, **run):
    return serve_command(Recipe.model_validate(BASE | {"retriever": retriever, "run": {"steps": 1} | run, "rollout": {"max_staleness": 0}}))[1:]


def test_it_serves_the_recipes_corpus_with_its_number_of_passages():
    assert command({"corpus": "c.jsonl", "topk": 5}) == ["-m", "retriever", "serve", "c.jsonl", "--topk", "5", "--cache", "runs/.cache/index"]


def test_a_deterministic_run_searches_query_by_query():
    assert command({"index": "made"}, deterministic=True) == ["-m", "retriever", "serve", "made", "--topk", "3", "--deterministic"]


def test_a_retriever_that_runs_elsewhere_is_not_started():
    with pytest.raises(ConfigError, match=r"needs retriever\.corpus or retriever\.index"):
        command({"url": "http://127.0.0.1:1"})
