"""How a run starts its retriever, and what only its own workers know."""

from __future__ import annotations

import pytest

from agentrl.config.recipe import Recipe
from agentrl.errors import ConfigError
from agentrl.system.retriever_token import TOKEN_VARIABLE, retriever_token
from agentrl.system.roles.retriever import relay, serve_command

BASE = {"name": "r", "model": {"path": "m"}, "tasks": {"train": [{"path": "t.jsonl"}]}, "env": {"factory": "my:Env"}}


def recipe(retriever, *, resources=None, **run):
    sections = {"retriever": retriever, "run": {"steps": 1} | run, "rollout": {"max_staleness": 0}, "resources": resources or {}}
    return Recipe.model_validate(BASE | sections)


def command(retriever, **rest):
    return serve_command(recipe(retriever, **rest))[1:]


def test_it_serves_the_recipes_corpus_with_its_number_of_passages():
    assert command({"corpus": "c.jsonl", "topk": 5}) == ["-m", "retriever", "serve", "c.jsonl", "--topk", "5", "--cache", "runs/.cache/index"]


def test_a_deterministic_run_searches_query_by_query():
    assert command({"index": "made"}, deterministic=True) == ["-m", "retriever", "serve", "made", "--topk", "3", "--deterministic"]


def test_what_the_recipe_chooses_is_said_and_what_it_does_not_is_left_to_the_server():
    of_a_corpus = {"corpus": "c.jsonl", "encoder": "org/encoder", "index_type": "HNSW32,SQ8", "bm25": True, "mode": "hybrid", "precision": "bf16"}
    assert command(of_a_corpus)[6:] == [
        *("--cache", "runs/.cache/index", "--encoder", "org/encoder", "--index", "HNSW32,SQ8", "--mode", "hybrid", "--precision", "bf16", "--bm25")
    ]
    of_an_index = {"index": "made", "threads": 8, "parameters": "efSearch=128", "reranker": "org/reranker", "runtime": "torch", "model": "/m"}
    assert command(of_an_index)[6:] == [
        *("--model", "/m", "--runtime", "torch", "--threads", "8", "--reranker", "org/reranker", "--parameters", "efSearch=128")
    ]


@pytest.mark.parametrize(("gpus", "devices"), [(0.5, "cuda:0"), (1, "cuda:0"), (3, "cuda:0,cuda:1,cuda:2")])
def test_its_devices_are_the_gpus_that_were_booked(gpus: float, devices: str):
    assert command({"index": "made", "device": "cuda"}, resources={"retriever_gpus": gpus})[6:] == ["--device", devices]


def test_a_retriever_that_runs_elsewhere_is_not_started():
    with pytest.raises(ConfigError, match=r"needs retriever\.corpus or retriever\.index"):
        command({"url": "http://127.0.0.1:1"})


def test_what_a_server_said_last_is_told_where_it_ends():
    # the driver named the log twice, and the reason was in it
    ready: list[dict[str, object]] = []
    lines = ["retriever: opening 1 of 2\n", "ready http://a:1\n", "Traceback\n", "retriever: /x is no index: build it\n", "\n"]
    assert relay(lines, ready.append) == "/x is no index: build it"
    assert ready == [{"url": "http://a:1"}]
    assert relay(["Killed\n"], ready.append) == ""


def test_a_retriever_that_other_machines_reach_gets_a_new_token_every_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    reached = recipe({"index": "made"}, bind="node")
    first, second = retriever_token(reached), retriever_token(reached)
    assert first is not None
    assert second is not None
    assert first != second
    assert len(first) == 43  # 32 bytes as base64
    assert retriever_token(recipe({"index": "made"})) is None, "of this machine alone"
    assert retriever_token(recipe({"url": "http://a:1"}, bind="node")) is None, "another's server"
    assert retriever_token(recipe(None, bind="node")) is None


def test_the_environments_token_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "given")
    for retriever in ({"index": "made"}, {"url": "http://a:1"}):
        assert retriever_token(recipe(retriever)) == "given"
