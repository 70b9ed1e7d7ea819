import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from minilm import MINILM, needs_minilm
from tiny_bert import write_sentence_transformer, write_tokenizer

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.files import ModelFiles
from retriever.encoders.models import KNOWN, describe, examine

ROOT = Path(__file__).resolve().parents[3]
CONFIG = {"model_type": "bert", "hidden_size": 32, "max_position_embeddings": 64, "pad_token_id": 0}


def model(directory: Path, **config: object) -> Path:
    """A model's files, but for weights that could be loaded."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    (directory / "model.safetensors").write_bytes(b"weights")
    write_tokenizer(directory)
    return directory


@needs_minilm
def test_what_minilm_is_stands_in_its_files():
    found = examine(str(MINILM))
    assert (found.settings.pooling, found.settings.dim, found.settings.normalize, found.settings.max_query_tokens) == ("mean", 384, True, 256)
    assert found.settings.weights_sha256 == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert found.settings.model == str(MINILM)
    assert found.sources["pooling"] == "1_Pooling/config.json"
    assert found.sources["max_document_tokens"] == "max_seq_length of sentence_bert_config.json"
    assert found.sources["query_prefix"] == "nothing says so"


@pytest.mark.parametrize(("mode", "pooling"), [("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last")])
def test_pooling_and_length_of_vectors_are_those_of_sentence_transformers(tmp_path: Path, mode: str, pooling: str):
    found = describe(str(write_sentence_transformer(model(tmp_path / "m"), pooling=mode, normalize=False)))
    assert (found.pooling, found.normalize) == (pooling, False)


def test_the_newer_form_of_a_pooling_config_is_read(tmp_path: Path):
    directory = write_sentence_transformer(model(tmp_path / "m"))
    (directory / "1_Pooling/config.json").write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": "lasttoken", "include_prompt": True}))
    assert describe(str(directory)).pooling == "last"


def test_prefixes_are_the_files_prompts_and_what_is_told_comes_first(tmp_path: Path):
    prompts = {"prompts": {"query": "ask: ", "passage": "text: "}, "default_prompt_name": None}
    directory = str(write_sentence_transformer(model(tmp_path / "m"), config_sentence_transformers=prompts))
    assert (describe(directory).query_prefix, describe(directory).document_prefix) == ("ask: ", "text: ")
    told = examine(directory, {"query_prefix": "", "pooling": None})
    assert (told.settings.query_prefix, told.settings.document_prefix) == ("", "text: ")
    assert (told.sources["query_prefix"], told.sources["document_prefix"]) == ("told", "config_sentence_transformers.json")


def test_the_fewest_tokens_that_any_file_allows_are_read(tmp_path: Path):
    directory = model(tmp_path / "m")
    assert describe(str(directory), pooling="mean").max_query_tokens == 64
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))
    assert describe(str(directory), pooling="mean").max_query_tokens == 64
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48}))
    assert describe(str(directory), pooling="mean", max_query_tokens=20).max_query_tokens == 20
    assert describe(str(directory), pooling="mean", max_query_tokens=20).max_document_tokens == 48
    with pytest.raises(EncoderFault, match=r"max_document_tokens 49 is more than .* can read: 48"):
        describe(str(directory), pooling="mean", max_document_tokens=49)


def test_positions_of_roberta_begin_after_its_padding(tmp_path: Path):
    directory = model(tmp_path / "m", model_type="xlm-roberta", pad_token_id=1, max_position_embeddings=514)
    assert describe(str(directory), pooling="mean").max_query_tokens == 512


def test_a_directory_named_like_a_known_model_is_not_that_model(tmp_path: Path):
    directory = model(tmp_path / "e5-base-v2")
    with pytest.raises(EncoderFault, match=r"tell it, --pooling mean\|cls\|last"):
        describe(str(directory))
    assert describe(str(directory), pooling="mean").query_prefix == ""


def test_known_models_are_named_in_full_with_the_source_of_their_prefixes():
    assert (KNOWN["intfloat/e5-base-v2"].query_prefix, KNOWN["intfloat/e5-base-v2"].document_prefix) == ("query: ", "passage: ")
    assert KNOWN["BAAI/bge-base-en-v1.5"].query_prefix == "Represent this sentence for searching relevant passages: "
    assert KNOWN["BAAI/bge-base-en-v1.5"].pooling == "cls"
    assert KNOWN["sentence-transformers/all-MiniLM-L6-v2"].query_prefix == ""
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+", name) and known.source.endswith(name) for name, known in KNOWN.items())


def test_weights_of_several_files_are_hashed_in_the_order_of_their_names(tmp_path: Path):
    directory = model(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"b")
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"a")
    assert ModelFiles.locate(str(directory)).weights_sha256() == hashlib.sha256(b"ab").hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("modules.json", [{"type": "sentence_transformers.models.Dense", "path": ""}], "is made of Dense; only"),
        ("modules.json", {"a": 1}, "is no list of modules"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling by pooling_mode_max_tokens is not supported"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "is not supported; one of mean"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt false"),
        ("config.json", {"model_type": "bert", "max_position_embeddings": 8}, "has no hidden_size"),
        ("config.json", {"hidden_size": 8}, "does not say how many tokens it reads"),
        ("config.json", [], "is no JSON object"),
    ],
)
def test_a_model_of_another_kind_is_refused_with_its_file(tmp_path: Path, name: str, content: object, told: str):
    directory = write_sentence_transformer(model(tmp_path / "m"))
    (directory / name).write_text(json.dumps(content))
    with pytest.raises(EncoderFault, match=told):
        describe(str(directory))


@pytest.mark.parametrize(
    ("missing", "told"),
    [("config.json", "it is no model"), ("tokenizer.json", "write it with transformers"), ("model.safetensors", "convert its weights")],
)
def test_a_missing_file_is_told_with_what_makes_it(tmp_path: Path, missing: str, told: str):
    directory = model(tmp_path / "m")
    (directory / missing).unlink()
    (directory / "pytorch_model.bin").write_bytes(b"a pickle: never read")
    with pytest.raises(EncoderFault, match=told):
        describe(str(directory))


def test_a_path_that_is_no_directory_is_not_looked_for_on_the_hub():
    with pytest.raises(EncoderFault, match=r"there is no directory \./nothing"):
        describe("./nothing")


@pytest.mark.slow
def test_a_hub_id_is_found_in_the_cache_offline_and_what_is_not_there_is_told_with_the_command_that_brings_it(tmp_path: Path):
    hub = tmp_path / "hub/models--intfloat--e5-base-v2"
    model(hub / "snapshots" / ("a" * 40))
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("a" * 40)
    code = """
from retriever.encoders.models import examine
found = examine("intfloat/e5-base-v2")
print(found.settings.model, repr(found.settings.query_prefix), found.sources["query_prefix"], sep="|")
try:
    examine("nobody/has-this")
except ValueError as error:
    print(error)
"""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    first, *rest = ran.stdout.splitlines()
    assert first == "intfloat/e5-base-v2|'query: '|the model card, huggingface.co/intfloat/e5-base-v2"
    assert "hf download nobody/has-this --include '*.json' 'model*.safetensors'" in rest[-1]
