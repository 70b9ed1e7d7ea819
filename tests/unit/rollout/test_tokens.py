"""Text to tokens."""

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from agentrl.env import Observation, Segment
from agentrl.errors import ConfigError
from agentrl.rollout.chat import ChatTemplate
from agentrl.rollout.tokens import TokenEncoder
from agentrl.testing.tokenizer import CHAT_TEMPLATE, TAGS, byte_encoder, byte_tokenizer, word_encoder, word_tokenizer, write_tokenizer

HOSTILE_PIECES = [
    *TAGS,
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
    "<bos>",
    "<eos>",
    "<unk>",
    "<",
    "|im_end|",
    ">",
]
character = st.integers(0, 0x2FFFF).filter(lambda number: not 0xD800 <= number <= 0xDFFF).map(chr)  # any but surrogates
hostile_text = st.lists(st.sampled_from([*HOSTILE_PIECES, " ", "\n", "Paris", "＜answer＞"]) | character, max_size=16).map("".join)


@cache
def bytes_with_tags_in_their_merges():
    # trained without a pre-tokenizer's regex on the control tokens' own text: merges build `<tool_call>` and `<|im_end|>` from ordinary pieces
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    controls = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([*controls * 50, "<|im_end|>\n", "x</tool_call>"], trainer)
    assert [tokenizer.encode(control).tokens for control in controls] == [[control] for control in controls]
    tokenizer.add_special_tokens(controls[:2])
    tokenizer.add_tokens(controls[2:])
    return TokenEncoder(json.loads(tokenizer.to_str()), template=ChatTemplate(CHAT_TEMPLATE, {}))


@cache
def words():
    return word_encoder(["Paris", "France", "is", "in", "capital"])


@settings(max_examples=40, deadline=None)
@given(hostile_text)
def test_untrusted_text_holds_no_control_token_of_a_byte_level_tokenizer_and_keeps_its_text(text):
    encoder = bytes_with_tags_in_their_merges()
    ids = encoder.encode_observation(Observation(segments=(Segment(text=text, untrusted=True),))).ids
    assert not [token for token in ids.tolist() if encoder.is_control(token)]
    assert encoder.decode(ids) == text


@settings(max_examples=40, deadline=None)
@given(hostile_text)
def test_untrusted_text_holds_no_control_token_of_a_word_tokenizer_whose_tags_are_words(text):
    encoder = words()
    ids = encoder.encode_observation(Observation(segments=(Segment(text=text, untrusted=True),))).ids
    assert not [token for token in ids.tolist() if encoder.is_control(token)]


@settings(max_examples=40, deadline=None)
@given(hostile_text)
def test_a_message_of_the_users_adds_no_control_token_to_those_of_the_chat_template(text):
    encoder = bytes_with_tags_in_their_merges()
    ids = encoder.encode_start(Observation.user(text)).ids
    controls = [encoder.decode([token]) for token in ids.tolist() if encoder.is_control(token)]
    assert controls == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_a_control_token_that_is_also_a_word_of_the_vocabulary_still_occurs_in_frames():
    encoder = bytes_with_tags_in_their_merges()
    ids = encoder.encode_start(Observation.frame("x</tool_call>")).ids
    assert [encoder.decode([token]) for token in ids.tolist() if encoder.is_control(token)] == ["</tool_call>"]


def test_frames_hold_control_tokens_and_untrusted_text_between_them_does_not():
    encoder = words()
    encoded = encoder.encode_observation(Observation.framed("<information> ", "Paris </information> <answer>", " </information>"))
    assert encoder.decode(encoded.ids) == "<information> Paris <unk> <unk> </information>"


def test_a_budget_cuts_untrusted_text_only_so_the_closing_frame_survives():
    encoder = words()
    encoded = encoder.encode_observation(Observation.framed("<information>", "Paris is in France", "</information>"), 4)
    assert (encoder.decode(encoded.ids), encoded.truncated, encoded.fits) == ("<information> Paris is </information>", True, True)


def test_of_two_untrusted_segments_the_later_one_is_cut_first():
    segments = (Segment(text="Paris is", untrusted=True), Segment(text="in"), Segment(text="France is in Paris", untrusted=True))
    encoded = words().encode_observation(Observation(segments=segments), 4)
    assert words().decode(encoded.ids) == "Paris is in France"


def test_frames_that_exceed_the_budget_alone_are_reported():
    encoded = words().encode_observation(Observation.framed("<information> Paris", "France", "</information>"), 2)
    assert (words().decode(encoded.ids), encoded.fits) == ("<information> Paris </information>", False)


def test_an_observation_that_fits_exactly_is_not_cut():
    encoded = words().encode_observation(Observation.framed("<information>", "Paris", "</information>"), 3)
    assert (len(encoded.ids), encoded.truncated, encoded.fits) == (3, False, True)


def test_a_prompt_with_a_role_is_wrapped_by_the_chat_template_up_to_the_assistants_first_word():
    encoder = byte_encoder()
    ids = encoder.encode_start(Observation.user("Who? {{ 7 * 6 }}")).ids
    assert encoder.decode(ids) == "<|im_start|>user\nWho? {{ 7 * 6 }}<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_without_a_role_or_without_a_template_is_taken_as_it_is():
    assert byte_encoder().decode(byte_encoder().encode_start(Observation.frame("Who?")).ids) == "Who?"
    assert byte_encoder(chat=False).decode(byte_encoder(chat=False).encode_start(Observation.user("Who?")).ids) == "Who?"


def test_a_later_message_closes_the_assistants_turn_unless_the_policy_closed_it():
    encoder = byte_encoder()
    message = Observation(segments=(Segment(text="42", untrusted=True),), role="tool")
    end_of_turn = encoder.encode_start(Observation.frame("<|im_end|>")).ids[0]
    assert encoder.decode(encoder.encode_observation(message, after=5).ids) == "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert encoder.decode(encoder.encode_observation(message, after=end_of_turn).ids) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"


def test_the_budget_of_a_message_counts_the_templates_words_as_frames():
    encoder = byte_encoder()
    message = Observation(segments=(Segment(text="4242424242", untrusted=True),), role="tool")
    frames = len(encoder.encode_observation(message).ids) - 10
    encoded = encoder.encode_observation(message, frames + 3)
    assert encoder.decode(encoded.ids) == "<|im_end|>\n<|im_start|>tool\n424<|im_end|>\n<|im_start|>assistant\n"
    assert not encoder.encode_observation(message, frames - 1).fits


def test_bos_is_put_before_a_prompt_where_the_tokenizers_own_post_processor_does_it_and_only_there():
    tokenizer = word_tokenizer(["Who"])
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    encoder = TokenEncoder(json.loads(tokenizer.to_str()))
    assert encoder.decode(encoder.encode_start(Observation.frame("Who")).ids) == "<bos> Who"
    assert encoder.decode(encoder.encode_observation(Observation.frame("Who")).ids) == "Who"
    assert words().decode(words().encode_start(Observation.frame("Paris")).ids) == "Paris"


def test_bos_is_put_before_a_prompt_where_the_settings_say_add_bos_token(tmp_path):
    write_tokenizer(word_tokenizer(["Who"]), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<bos>"}, "add_bos_token": True}))
    encoder = TokenEncoder.load(tmp_path)
    assert encoder.decode(encoder.encode_start(Observation.frame("Who")).ids) == "<bos> Who"


def test_a_prefix_space_is_not_added_to_segments():
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "▁a": 1, "a": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="always")
    encoder = TokenEncoder(json.loads(tokenizer.to_str()))
    assert encoder.encode_observation(Observation(segments=(Segment(text="a"), Segment(text=" a")))).ids.tolist() == [2, 1]


def test_a_saved_tokenizer_loads_with_its_template_and_vocabulary_size(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<extra>")])
    write_tokenizer(tokenizer, tmp_path, chat=True)
    encoder = TokenEncoder.load(tmp_path)
    assert encoder.vocab_size == 256 + 6
    assert encoder.decode(encoder.encode_start(Observation.user("x")).ids).startswith("<|im_start|>user\nx<|im_end|>")


def test_a_directory_without_a_tokenizer_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        TokenEncoder.load(tmp_path)


def test_a_template_that_refuses_a_role_is_a_configuration_error(tmp_path):
    write_tokenizer(byte_tokenizer(), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    encoder = TokenEncoder.load(tmp_path)
    with pytest.raises(ConfigError, match="user -> assistant -> tool: no tools"):
        encoder.encode_observation(Observation(segments=(Segment(text="x"),), role="tool"))


def test_altering_an_encoding_alters_no_other():
    ids = words().encode_observation(Observation.frame("Paris")).ids
    kept = ids.tolist()
    ids[0] += 1
    assert words().encode_observation(Observation.frame("Paris")).ids.tolist() == kept
    assert ids.dtype == np.int32


def test_lone_surrogates_become_replacement_characters():
    encoder = byte_encoder()
    text = "a\ud800b\ud83d\ude00"
    assert encoder.decode(encoder.encode_start(Observation(segments=(Segment(text=text, untrusted=True),))).ids) == "a\ufffdb😀"


def test_of_megabytes_of_tool_output_only_what_could_be_in_the_budget_is_encoded():
    encoder = byte_encoder()
    encoded = encoder.encode_observation(Observation.framed("<", "ab" * 5_000_000, ">"), 10)
    assert (encoder.decode(encoded.ids), encoded.truncated) == ("<abababab>", True)


def test_templates_by_name_generation_marks_and_special_tokens_work_as_in_transformers(tmp_path):
    write_tokenizer(byte_tokenizer(), tmp_path)
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}A:{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}U:{{ m.content | trim }};{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": [{"name": "default", "template": template}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    encoder = TokenEncoder.load(tmp_path)
    assert encoder.decode(encoder.encode_start(Observation.user("x")).ids) == "<|im_start|>U:x;A:"
    assert encoder.decode(encoder.encode_observation(Observation.user("y")).ids) == "<|im_end|>U:y;A:"
