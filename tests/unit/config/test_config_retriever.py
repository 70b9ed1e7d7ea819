"""What a recipe says about its retriever, and what of it would do nothing."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentrl.config.cautions import cautions
from agentrl.config.essentials import essentials
from agentrl.config.load import load_recipe
from agentrl.config.modes import require_mode
from agentrl.config.recipe import Recipe
from agentrl.config.smoke import smoke_overrides
from agentrl.errors import ConfigError

BASE = {"name": "r", "run": {"steps": 1}, "model": {"path": "m"}, "tasks": {"train": [{"path": "t.jsonl"}]}, "env": {"factory": "my:Env"}}


def recipe(retriever, **sections) -> Recipe:
    return Recipe.model_validate(BASE | {"retriever": retriever} | sections)


@pytest.mark.parametrize(
    ("retriever", "told"),
    [
        ({}, "exactly one of url, corpus and index"),
        ({"url": "http://a:1", "index": "i"}, r"given: url and index\. Set those that are not meant to null, e\.g\. retriever\.url=null"),
        ({"url": "http://a:1", "threads": 2}, r"retriever\.threads is about a retriever that the run starts, and http://a:1 runs already"),
        ({"url": "http://a:1", "mode": "bm25"}, r"retriever\.mode is about a retriever that the run starts"),
        ({"url": "http://a:1", "encoder": "org/e"}, r"retriever\.encoder is about a retriever that the run starts"),
        ({"index": "i", "encoder": "org/e"}, r"retriever\.encoder is about a corpus, and an index was built with its own"),
        ({"index": "i", "bm25": True}, r"retriever\.bm25 is about a corpus"),
        ({"corpus": "c", "model": "org/e"}, r"retriever\.model says where the model of an index lies"),
        ({"corpus": "c", "precision": "bf16"}, r"retriever\.precision is about a model, and retriever\.encoder is hashed"),
        ({"corpus": "c", "encoder": "none"}, r"leaves words to search by: set retriever\.bm25=true"),
        ({"corpus": "c", "encoder": "none", "bm25": True, "index_type": "SQ8"}, r"retriever\.index_type is about vectors"),
        ({"corpus": "c", "encoder": "none", "bm25": True, "mode": "hybrid"}, r"retriever\.mode hybrid needs vectors"),
        ({"corpus": "c", "mode": "hybrid"}, r"needs an index of words: set retriever\.bm25=true"),
        ({"corpus": "c", "parameters": "nprobe=8"}, r"retriever\.index_type Flat is exact: leave them out"),
        ({"index": "i", "device": "cuda"}, r"retriever\.device cuda needs GPUs: set resources\.retriever_gpus"),
        ({"index": "i", "device": "cuda", "threads": 4}, r"retriever\.threads are those of a CPU"),
        ({"index": "i", "precision": "fp16"}, r"on a CPU bf16 is the fast one"),
        ({"index": "i", "runtime": "onnx", "precision": "bf16"}, r"retriever\.runtime onnx computes fp32 and int8 on the CPU"),
        ({"index": "i", "runtime": "torch", "precision": "int8"}, r"retriever\.precision int8 is onnxruntime's on the CPU"),
        ({"index": "i", "threads": 0}, "greater than 0"),
    ],
)
def test_what_would_do_nothing_is_refused_with_what_to_do(retriever, told):
    with pytest.raises(ValidationError, match=told):
        recipe(retriever)


@pytest.mark.parametrize("retriever", [{"index": "i"}, {"corpus": "c"}])
def test_gpus_for_a_retriever_on_the_cpu_are_refused(retriever):
    with pytest.raises(ValidationError, match=r"retriever_gpus do nothing with retriever\.device cpu"):
        recipe(retriever, resources={"retriever_gpus": 1})


def test_what_fits_is_accepted():
    recipe({"corpus": "c", "encoder": "org/e", "index_type": "HNSW32,SQ8", "bm25": True, "mode": "hybrid", "parameters": "efSearch=64"})
    recipe({"corpus": "c", "encoder": "none", "bm25": True})
    recipe({"index": "i", "device": "cuda", "precision": "bf16"}, resources={"retriever_gpus": 2})
    recipe({"corpus": "c", "reranker": "org/r", "precision": "bf16"})  # the reranker's
    recipe({"url": "http://a:1", "topk": 5})


def test_a_deterministic_run_has_an_encoder_that_is_not_a_model():
    run = {"run": {"steps": 1, "deterministic": True}, "rollout": {"max_staleness": 0}}
    recipe({"corpus": "c"}, **run)
    with pytest.raises(ValidationError, match=r"run\.deterministic needs retriever\.threads 1 \(is 2\), retriever\.encoder hashed \(is org/e\)"):
        recipe({"corpus": "c", "encoder": "org/e", "threads": 2}, **run)


def test_small_it_is_on_one_thread_of_the_cpu_and_a_corpus_needs_no_model():
    asked = {"index": "i", "device": "cuda", "threads": 16, "mode": "hybrid", "precision": "bf16", "reranker": "org/r"}
    small = smoke_overrides({"retriever": asked})
    assert (small["retriever.device"], small["retriever.threads"], small["retriever.reranker"]) == ("cpu", 1, None)
    assert "retriever.mode" not in small, "an index keeps how it is searched"
    small = smoke_overrides({"retriever": asked | {"corpus": "c", "encoder": "org/e", "bm25": True}})
    assert (small["retriever.index"], small["retriever.encoder"], small["retriever.bm25"], small["retriever.mode"]) == (None, "hashed", False, None)
    assert not [key for key in smoke_overrides({"tasks": {}}) if key.startswith("retriever.")]


def test_an_encoder_is_a_name_on_the_hub_or_a_directory_and_hashed_is_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("hashed", "mine"):
        (tmp_path / name).mkdir()
    text = 'name: r\nrun: {steps: 1}\nmodel: {path: m}\ntasks: {train: [{path: t.jsonl}]}\nenv: {factory: "my:Env"}\nretriever: {corpus: c.jsonl}\n'
    (tmp_path / "r.yaml").write_text(text)

    def encoder(*overrides: str) -> str:
        found = load_recipe([tmp_path / "r.yaml"], overrides).retriever
        assert found is not None
        return found.encoder

    assert encoder() == "hashed"
    assert encoder("retriever.encoder=hashed") == "hashed", "a directory of that name is not meant"
    assert encoder("retriever.encoder=org/e") == "org/e"
    assert encoder("retriever.encoder=mine") == str(tmp_path / "mine")


def test_a_reranker_that_nobody_asks_for_is_told():
    asked = {"factory": "my:Env", "options": {"retriever_options": {"rerank": True}}}
    told = [caution for caution in cautions(recipe({"index": "i", "reranker": "org/r"})) if caution.startswith("retriever.reranker")]
    assert len(told) == 1
    assert not [caution for caution in cautions(recipe({"index": "i", "reranker": "org/r"}, env=asked)) if "reranker" in caution]


@pytest.mark.parametrize(
    ("retriever", "gpus", "told"),
    [
        ({"url": "http://a:1"}, 0, "retriever at http://a:1"),
        ({"corpus": "c"}, 0, "1 x retriever"),
        ({"index": "i", "mode": "hybrid"}, 0, "1 x retriever (hybrid)"),
        ({"corpus": "c", "encoder": "org/e", "device": "cuda"}, 2, "1 x retriever (cuda, 2 GPU, org/e)"),
    ],
)
def test_the_essentials_name_it_and_what_is_special_about_it(retriever, gpus, told):
    found = recipe(retriever, resources={"retriever_gpus": gpus})
    assert dict(essentials(found))["processes"].endswith(f"1 x buffer, {told}")


@pytest.mark.parametrize(("bm25", "told"), [(None, "can be searched by dense alone. Ask for that, or build the index with --bm25"), ({}, None)])
def test_a_mode_that_an_index_has_not_is_refused_before_anything_starts(tmp_path: Path, bm25: dict | None, told: str | None):
    # it was found by the retriever, after the warm start
    (tmp_path / "manifest.json").write_text(json.dumps({"dense": {}, "bm25": bm25}))
    asked = Recipe.model_validate(BASE | {"retriever": {"index": str(tmp_path), "mode": "hybrid"}})
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        require_mode(asked)
