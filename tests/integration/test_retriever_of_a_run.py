"""The retriever that a run starts: who has the run's token is answered, and nobody can read it off a command line."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from agentrl.config.recipe import Recipe
from agentrl.system.process import ProcessSpec, Role, StopSignal
from agentrl.system.retriever_token import TOKEN_VARIABLE
from agentrl.system.roles.retriever import main
from envs import shared_retriever
from retriever.commands import bench, serve

TOKEN = "a-token-that-nobody-guesses"
START_S = 60.0


def test_one_variable_carries_the_token():
    assert {TOKEN_VARIABLE, shared_retriever.TOKEN_VARIABLE, serve.TOKEN_VARIABLE, bench.TOKEN} == {"AGENTRL_RETRIEVER_TOKEN"}


@pytest.mark.slow
def test_the_run_retriever_answers_who_brings_the_runs_token(tmp_path: Path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "1", "title": "Oslo", "text": "The capital of Norway."}\n')
    sections = {"run": {"steps": 1, "dir": str(tmp_path)}, "retriever": {"corpus": str(corpus), "topk": 1}}
    recipe = Recipe.model_validate({"name": "r", "model": {"path": "m"}, "tasks": {"train": [{"path": "t"}]}, "env": {"factory": "a:B"}} | sections)
    spec = ProcessSpec(
        role=Role.RETRIEVER, index=0, incarnation=1, run_dir=str(tmp_path), recipe=recipe.model_dump(mode="json"), payload={"retriever_token": TOKEN}
    )
    ready: queue.Queue[str] = queue.Queue()
    stop = StopSignal()
    role = threading.Thread(target=main, args=(spec, lambda told: ready.put(told["url"]), stop))
    role.start()
    try:
        url = ready.get(timeout=START_S)
        commands = [word for process in psutil.Process().children(recursive=True) for word in process.cmdline()]
        asked = {"queries": ["capital of Norway"]}
        refused = httpx.post(f"{url}/retrieve", json=asked)
        answered = httpx.post(f"{url}/retrieve", json=asked, headers={"authorization": f"Bearer {TOKEN}"})
    finally:
        stop.set()
        role.join()
    assert (refused.status_code, answered.status_code) == (401, 200)
    assert answered.json()["result"][0][0]["id"] == "1"
    assert "serve" in commands
    assert not [word for word in commands if TOKEN in word]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
