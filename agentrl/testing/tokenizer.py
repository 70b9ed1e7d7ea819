"""Two tiny tokenizers, made on the spot: one word per token, and byte-level pieces with control tokens of Qwen's kind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from tokenizers.trainers import BpeTrainer

from agentrl.rollout.chat import ChatTemplate
from agentrl.rollout.tokens import TokenEncoder

__all__ = ["CHAT_TEMPLATE", "TAGS", "byte_encoder", "byte_tokenizer", "word_encoder", "word_tokenizer", "write_tokenizer"]

TAGS = tuple(f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/"))

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ADDED = ("<tool_call>", "</tool_call>")  # as Qwen's: added, not special


def word_tokenizer(words: Iterable[str]) -> Tokenizer:
    """One token per word between blanks; the tags are vocabulary words and added tokens; everything else is `<unk>`."""
    vocabulary = ["<unk>", "<bos>", "<eos>", *TAGS, *dict.fromkeys(words)]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(dict.fromkeys(vocabulary))}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<bos>", "<eos>"])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def byte_tokenizer(corpus: Iterable[str] = (), *, vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE, trained on `corpus`, which can write any text; with Qwen's control tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.train_from_iterator(corpus, BpeTrainer(vocab_size=vocab_size, initial_alphabet=ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _ADDED])
    return tokenizer


def word_encoder(words: Iterable[str]) -> TokenEncoder:
    """A `TokenEncoder` over `word_tokenizer`, without a chat template."""
    return TokenEncoder(_definition(word_tokenizer(words)))


def byte_encoder(corpus: Iterable[str] = (), *, vocab_size: int = 400, chat: bool = True) -> TokenEncoder:
    """A `TokenEncoder` over `byte_tokenizer`, with Qwen's chat template or none."""
    return TokenEncoder(_definition(byte_tokenizer(corpus, vocab_size=vocab_size)), template=ChatTemplate(CHAT_TEMPLATE, {}) if chat else None)


def write_tokenizer(tokenizer: Tokenizer, directory: Path, *, chat: bool = False) -> None:
    """Write the files that `TokenEncoder.load` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if chat:
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>" if chat else "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _definition(tokenizer: Tokenizer) -> dict[str, Any]:
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    return definition
