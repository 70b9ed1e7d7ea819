import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.env import Segment
from envs.search_prompts import PROMPTS, fill, with_question_mark

QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
VALUES = {"question": "who wrote Peer Gynt?", "context": 'Doc 1(Title: "Peer Gynt") A play.\nDoc 2(Title: "x") y\n'}


def byte_level_bpe(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=700, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )
    return tokenizer


@pytest.mark.parametrize("name", PROMPTS)
def test_tokens_of_the_segments_are_those_of_the_whole_prompt(name: str):
    whole = PROMPTS[name].replace("{question}", VALUES["question"]).replace("{context}", VALUES["context"])
    segments = fill(PROMPTS[name], VALUES)
    tokenizer = byte_level_bpe([whole] * 3)
    assert "".join(segment.text for segment in segments) == whole
    assert [token for segment in segments for token in tokenizer.encode(segment.text).ids] == tokenizer.encode(whole).ids


def test_values_are_untrusted_and_frames_are_not():
    assert fill("a {question} b {context}", {"question": "Q", "context": "C"}) == (
        Segment(text="a"),
        Segment(text=" Q", untrusted=True),
        Segment(text=" b"),
        Segment(text=" C", untrusted=True),
    )
    assert fill("{question}{context}", {"question": "Q", "context": ""}) == (Segment(text="Q", untrusted=True),)


def test_a_value_is_not_a_template():
    [segment] = fill("{question}", {"question": "{context} {0} {", "context": "C"})
    assert segment.text == "{context} {0} {"


@pytest.mark.parametrize(("question", "asked"), [(" who ", "who?"), ("who?", "who?"), ("who ?\n", "who ?"), ("", "?")])
def test_a_question_ends_with_one_question_mark(question: str, asked: str):
    assert with_question_mark(question) == asked
