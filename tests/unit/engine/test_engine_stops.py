"""Stop strings are found exactly when they are completed, whatever the tokens look like."""

import random

import pytest
from tiny_qwen2 import write_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.engine.stops import TokenText

CORPUS = ["<search> capital of France </search>", "<answer> Paris </answer>", "größe 東京 naïve 🙂", "a > b >> c"]


@pytest.fixture(scope="module")
def byte_level() -> TokenText:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|im_end|>"]))
    return TokenText(tokenizer, tokenizer.get_vocab_size())


def first_match(text: TokenText, ids: list[int], stops: list[str]) -> tuple[int, str] | None:
    """Where a completion that grows token by token stops: its length and the stop string."""
    watched = text.watched(stops)
    for length in range(1, len(ids) + 1):
        if ids[length - 1] in watched and (found := text.matched(ids[:length], stops)) is not None:
            return length, found
    return None


def naive_match(text: TokenText, ids: list[int], stops: list[str]) -> tuple[int, str] | None:
    """The same by decoding everything after every token."""
    for length in range(1, len(ids) + 1):
        words = text.decode(ids[:length], skip_special_tokens=False)
        if (found := next((stop for stop in stops if stop in words), None)) is not None:
            return length, found
    return None


@pytest.mark.parametrize("stop", ["</search>", "</answer>", "l of", "東", "東京", "🙂", ">>", " ", "France ", "<|im_end|>", "größe"])
def test_a_stop_string_over_byte_level_tokens_is_found_where_full_decoding_finds_it(byte_level, stop):
    ids = byte_level.encode(" ".join(CORPUS) + "<|im_end|>")
    assert first_match(byte_level, ids, [stop]) == naive_match(byte_level, ids, [stop]) is not None


def test_random_byte_level_tokens_stop_where_full_decoding_stops(byte_level):
    source, stops = random.Random(1), ["</", "ch>", "京", "a "]
    for _ in range(100):
        ids = [source.randrange(300) for _ in range(60)]
        assert first_match(byte_level, ids, stops) == naive_match(byte_level, ids, stops)


def test_a_tag_split_over_many_tokens_after_a_long_completion_is_found(byte_level):
    ids = byte_level.encode("words and words " * 50) + [byte_level.encode(character)[0] for character in "</search>"]
    assert first_match(byte_level, ids, ["</search>"]) == (len(ids), "</search>")


def test_few_byte_level_tokens_are_watched_for_a_tag(byte_level):
    watched = byte_level.watched(["</search>"])
    assert byte_level.encode(">")[0] in watched
    assert byte_level.encode("s")[0] not in watched


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> TokenText:
    directory = tmp_path_factory.mktemp("words")
    write_tokenizer(directory, 20)
    text = TokenText.load(directory, 20)
    assert text is not None
    return text


@pytest.mark.parametrize("stop", ["</search>", "w7", "w7 ", "w7 w8", "7 w8 w9", "nothing"])
def test_word_tokens_are_joined_as_the_decoder_joins_them(words, stop):
    ids = words.encode("w6 w7 w8 w9 <search> w1 w17 </search> w7 w8 w9")
    assert first_match(words, ids, [stop]) == naive_match(words, ids, [stop])


def test_the_first_stop_string_in_order_of_the_request_is_told(words):
    assert first_match(words, words.encode("w6 </search>"), ["search>", "</search>"]) == (2, "search>")


def test_a_model_without_a_tokenizer_has_no_text(tmp_path):
    assert TokenText.load(tmp_path, 20) is None
