"""Writes tiny random models of transformers' BERT kind, with a word tokenizer that knows pairs, in Hugging Face form."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

__all__ = ["WORDS", "write_sentence_transformer", "write_tiny_model", "write_tokenizer"]

WORDS = [f"w{i}" for i in range(60)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": len(SPECIAL) + len(WORDS),
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.4,  # large enough that every token matters
}


def write_tiny_model(directory: Path, kind: str = "bert", *, labels: int | None = None, seed: int = 0, **options: object) -> Path:
    """A model directory. With `labels` it classifies pairs; without, it only has states."""
    directory.mkdir(parents=True, exist_ok=True)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **options}, **({"num_labels": labels} if labels else {}))
    torch.manual_seed(seed)
    loader = transformers.AutoModelForSequenceClassification if labels else transformers.AutoModel
    loader.from_config(config).eval().save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json: words of `WORDS` between [CLS] and [SEP], pairs as BERT has them."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))


def write_sentence_transformer(directory: Path, *, pooling: str = "mean_tokens", normalize: bool = True, **files: object) -> Path:
    """The files by which sentence-transformers says what it does with a model's states; `files` are others, by their names without `.json`."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [{"path": "" if i == 0 else f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (directory / "1_Pooling").mkdir(parents=True, exist_ok=True)
    (directory / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True, "pooling_mode_max_tokens": False}))
    for name, content in {"modules": modules, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory
