"""The files of a Hugging Face directory that belong to the model but are not its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from agentrl.errors import ConfigError

__all__ = ["copy_tokenizer", "require_same_tokens"]

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


def require_same_tokens(model_dir: Path, other: str, *, key: str) -> None:
    """Refuse a model that would read the policy's token ids as other text, or not at all. Without a `tokenizer.json` only numbers are compared.

    Args:
        key: the recipe's key that names `other`.

    Raises:
        ConfigError: naming a token that differs, or the numbers of tokens.
    """
    ours, theirs = _tokens(model_dir), _tokens(Path(other))
    differing = next((place for place, token in ours.items() if theirs.get(place, token) != token), None)
    if differing is not None:
        told = f"token {differing} is {theirs[differing]!r} there and {ours[differing]!r} here"
        raise ConfigError(f"{key}: {other} has another tokenizer than the policy, {told}: it would read other text than the policy wrote")
    rows = json.loads((Path(other) / "config.json").read_text("utf-8")).get("vocab_size")
    if rows is not None and rows <= max(ours, default=-1):
        raise ConfigError(f"{key}: {other} has embeddings of {rows} tokens; the policy's tokenizer has ids up to {max(ours)}")


def _tokens(directory: Path) -> dict[int, str]:
    if not (directory / "tokenizer.json").is_file():
        return {}
    vocabulary: dict[str, int] = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab(with_added_tokens=True)
    return {place: token for token, place in vocabulary.items()}


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
