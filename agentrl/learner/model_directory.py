"""The files of a Hugging Face directory that belong to the model but are not its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

__all__ = ["copy_tokenizer"]

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)
MODEL_FILES = ("config.json", "generation_config.json")


def copy_tokenizer(source: Path, target: Path, *, model: bool = False) -> None:
    """Copy the files of a tokenizer, those there are, and with `model` the model's configuration too."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (*TOKENIZER_FILES, *(MODEL_FILES if model else ())):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    _keep_tokenizer_class(target)


def _keep_tokenizer_class(directory: Path) -> None:
    """Make `AutoTokenizer` read `tokenizer.json` as it is.

    Beside a Qwen2 model transformers 5 ignores the class a tokenizer names and rebuilds Qwen's byte-level BPE from its vocabulary: a
    tokenizer of another kind loads without an error and encodes every text to nothing. An `auto_map` entry, which without
    `trust_remote_code` is ignored as well, is what makes it look at `tokenizer_class` after all.
    """
    settings, definition = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not settings.is_file() or not definition.is_file() or json.loads(definition.read_text("utf-8"))["model"]["type"] == "BPE":
        return
    told = json.loads(settings.read_text("utf-8"))
    told |= {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": [None, "transformers.PreTrainedTokenizerFast"]}}
    settings.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
