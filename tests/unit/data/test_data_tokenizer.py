"""A tokenizer made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

from agentrl.config.recipe import TokenizerTraining
from agentrl.data.tokenizer import ADDED_TOKENS, CHAT_TEMPLATE, SPECIAL_TOKENS, train_tokenizer
from agentrl.errors import ConfigError, DataError

TEXTS = [
    {"id": "1", "contents": "The lighthouse keeper counted the ships, the ships and the gulls."},
    {"id": "2", "title": "Ships", "text": "Ships don't sail in 1984 storms.\nThe lighthouse keeper said so."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    return path


@pytest.fixture
def directory(corpus: Path, tmp_path: Path) -> Path:
    train_tokenizer(TokenizerTraining(corpus=str(corpus), vocab_size=300), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def tokenizer_in(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_any_text_comes_back_as_it_was(directory: Path):
    tokenizer = tokenizer_in(directory)
    text = "  Don't <search> naïve 東京 🚢 </search>\r\n\n\t1984"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_frequent_words_are_learnt_and_digits_stand_alone(directory: Path):
    tokens = tokenizer_in(directory).encode("the ships 1984").tokens
    assert tokens == ["the", "Ġships", "Ġ", "1", "9", "8", "4"]


def test_its_size_is_what_was_asked_for_and_control_tokens_come_last(directory: Path):
    tokenizer = tokenizer_in(directory)
    assert tokenizer.get_vocab_size() <= 300
    first = tokenizer.get_vocab_size() - len(SPECIAL_TOKENS) - len(ADDED_TOKENS)
    assert [tokenizer.token_to_id(token) for token in (*SPECIAL_TOKENS, *ADDED_TOKENS)] == list(range(first, tokenizer.get_vocab_size()))


def test_decoding_without_special_tokens_still_shows_the_others(directory: Path):
    tokenizer = tokenizer_in(directory)
    ids = tokenizer.encode("<|im_start|>a<tool_call>b<|im_end|>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool_call>b"


def test_the_same_corpus_gives_the_same_files(directory: Path, corpus: Path, tmp_path: Path):
    train_tokenizer(TokenizerTraining(corpus=str(corpus), vocab_size=300), tmp_path / "again")
    for file in directory.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def rendered(*messages: tuple[str, str], prompt: bool = False) -> str:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
    return template.render(messages=[{"role": role, "content": content} for role, content in messages], add_generation_prompt=prompt)


def test_the_chat_template_puts_a_system_message_in_front_and_opens_the_answer():
    assert rendered(("user", "hi"), prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered(("system", "Be brief."), ("user", "hi")) == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"


def test_neighbouring_tool_messages_are_one_message_of_the_users():
    assert rendered(("system", "s"), ("tool", "a"), ("tool", "b"), ("assistant", "c")) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n"
    )


def test_a_vocabulary_without_room_for_bytes_is_refused(corpus: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="vocab_size must be at least 267, got 100"):
        train_tokenizer(TokenizerTraining(corpus=str(corpus), vocab_size=100), tmp_path / "t")


def test_a_corpus_without_text_is_refused(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("[1, 2]\n")
    with pytest.raises(DataError, match="no text to train a tokenizer on"):
        train_tokenizer(TokenizerTraining(corpus=str(tmp_path / "empty.jsonl")), tmp_path / "t")


@pytest.mark.slow
def test_transformers_loads_it_and_agrees_on_every_id(directory: Path):
    from transformers import AutoTokenizer

    loaded, raw = AutoTokenizer.from_pretrained(directory), tokenizer_in(directory)
    text = "<|im_start|>user\nThe ships<tool_call> don't 1984<|im_end|>"
    assert loaded.encode(text) == raw.encode(text).ids
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True) == rendered(
        ("user", "hi"), prompt=True
    )
