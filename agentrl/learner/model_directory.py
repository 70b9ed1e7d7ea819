"""The files of a Hugging Face directory that belong to the model but are not its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["TOKENIZER_FILES", "copy_tokenizer"]

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
MODEL_FILES = ("config.json", "generation_config.json")


def copy_tokenizer(source: Path, target: Path, *, model: bool = False) -> list[str]:
    """Copy the tokenizer's files, and with `model` the model's configuration, as they are. Returns the names of those there are."""
    target.mkdir(parents=True, exist_ok=True)
    names = [name for name in (*TOKENIZER_FILES, *(MODEL_FILES if model else ())) if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names
