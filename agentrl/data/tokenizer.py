"""A tokenizer made on the spot: byte-level BPE with Qwen2's pre-tokenizer, control tokens and a chat template like Qwen2.5's.

Saved as `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`: what `tokenizers` and `AutoTokenizer` load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from agentrl.config.recipe import TokenizerTraining
from agentrl.data.readers import jsonl_rows
from agentrl.errors import ConfigError, DataError

__all__ = ["ADDED_TOKENS", "CHAT_TEMPLATE", "SPECIAL_TOKENS", "train_tokenizer"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Not special in Qwen2.5 either: shown when decoding skips special tokens, and yet matched as one token wherever they occur in a text.
ADDED_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip

# Of Qwen2's tokenizer.json: contractions, words with one leading sign, single digits, runs of signs, line ends, spaces.
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = 256

# A system message is put in front where there is none; neighbouring tool messages become one message of the user's.
CHAT_TEMPLATE = """\
{%- if not messages or messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def train_tokenizer(training: TokenizerTraining, out_dir: Path) -> None:
    """Train on every string of every row of `training.corpus` and write the tokenizer's directory.

    The same corpus gives the same files.

    Raises:
        ConfigError: the vocabulary has no room for the bytes and the control tokens.
        DataError: the corpus cannot be read or holds no text.
    """
    control = len(SPECIAL_TOKENS) + len(ADDED_TOKENS)
    if training.vocab_size < _BYTES + control:
        raise ConfigError(f"model.train_tokenizer.vocab_size must be at least {_BYTES + control}, got {training.vocab_size}")
    texts = [text for _, row in jsonl_rows(Path(training.corpus)) for text in _strings(row)]
    if not texts:
        raise DataError(f"{training.corpus}: no text to train a tokenizer on")
    tokenizer = _untrained()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=training.vocab_size - control, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer=trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED_TOKENS])
    _save(tokenizer, out_dir)


def _untrained() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _save(tokenizer: Any, out_dir: Path) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (out_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _strings(child)
    elif isinstance(value, list):
        for child in value:
            yield from _strings(child)
