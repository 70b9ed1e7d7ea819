"""What a model is, from its own files: pooling, prefixes, length and whether vectors have length 1. Never from a part of its name.

A model that sentence-transformers reads says all of it but, often, the prefixes. `KNOWN` has those of the best-known ones, by their exact ids, as
their cards say. What nobody says must be told (pooling), or is empty and said to be (prefixes): `Description.sources` has where each value is from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.files import TOKENIZER, ModelFiles
from retriever.encoders.settings import Pooling, TransformerSettings

__all__ = ["KNOWN", "Description", "KnownModel", "describe", "examine", "token_limit"]

MODULES, SENTENCE_BERT, PROMPTS, TOKENIZER_CONFIG = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "tokenizer_config.json",
)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")  # in sentence-transformers' order
UNLIMITED_TOKENS = 1_000_000  # what transformers writes where a tokenizer has no limit is larger
# These count positions from the padding's id + 1, so that many of their positions are no tokens'.
POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl", "data2vec-text")
TOLD = "told"
NOBODY = "nothing says so"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """What a model's card says."""

    pooling: Pooling
    query_prefix: str = ""
    document_prefix: str = ""
    normalize: bool = True
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A model's settings, and where each of them is from, by the setting's name."""

    settings: TransformerSettings
    sources: Mapping[str, str]


def describe(
    model: str,
    *,
    pooling: Pooling | None = None,
    query_prefix: str | None = None,
    document_prefix: str | None = None,
    max_query_tokens: int | None = None,
    max_document_tokens: int | None = None,
    normalize: bool | None = None,
) -> TransformerSettings:
    """`examine(...)`, without the sources."""
    told = {
        "pooling": pooling,
        "query_prefix": query_prefix,
        "document_prefix": document_prefix,
        "max_query_tokens": max_query_tokens,
        "max_document_tokens": max_document_tokens,
        "normalize": normalize,
    }
    return examine(model, told).settings


def examine(model: str, told: Mapping[str, Any] | None = None) -> Description:
    """What a model is: as told, else as its own files say, else as its card says.

    Args:
        model: a directory, or an id of the Hugging Face hub.
        told: settings by name (`describe`'s arguments); None where nothing is told.

    Raises:
        EncoderFault: the model is not there or is of a kind that is not supported, nobody says how to pool it, or it cannot read that many tokens.
    """
    files = ModelFiles.locate(model)
    _refuse_lowercase(files)
    said = [
        {name: (value, TOLD) for name, value in (told or {}).items() if value is not None},
        _of_modules(files),
        _of_prompts(files),
        _of_card(model),
        {"query_prefix": ("", NOBODY), "document_prefix": ("", NOBODY), "normalize": (True, NOBODY)},
    ]
    limit, source = token_limit(files)
    found = {"max_query_tokens": (limit, source), "max_document_tokens": (limit, source)}
    for saying in reversed(said):
        found |= saying
    if "pooling" not in found:
        raise EncoderFault(f"{model} does not say how its vectors are made of its states: tell it, --pooling {'|'.join(get_args(Pooling))}")
    for name in ("max_query_tokens", "max_document_tokens"):
        if found[name][0] > limit:
            raise EncoderFault(f"{name} {found[name][0]} is more than {model} can read: {limit} ({source})")
    values: dict[str, Any] = {name: value for name, (value, _) in found.items()}
    settings = TransformerSettings(model=files.model, weights_sha256=files.weights_sha256(), dim=_dim(files), **values)
    return Description(settings=settings, sources={name: source for name, (_, source) in found.items()})


Said = dict[str, tuple[Any, str]]  # setting -> value, source


def _of_modules(files: ModelFiles) -> Said:
    """What sentence-transformers does with the states, module by module."""
    modules = files.json(MODULES)
    if modules is None:
        return {}
    try:
        kinds = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (TypeError, KeyError) as error:
        raise EncoderFault(f"{files.directory / MODULES} is no list of modules") from error
    names = [kind for kind, _ in kinds]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or kinds[0][1]:
        raise EncoderFault(f"{files.model} is made of {', '.join(names)}; only Transformer, Pooling and Normalize are supported")
    path = f"{kinds[1][1]}/config.json"
    return {"pooling": (_pooling_of(files, path), path), "normalize": ("Normalize" in names, MODULES)}


def _pooling_of(files: ModelFiles, path: str) -> str:
    config = files.json(path)
    if not isinstance(config, dict):
        raise EncoderFault(f"{files.directory / path} is missing: the model is incomplete")
    if config.get("include_prompt") is False:
        raise EncoderFault(f"{files.directory / path}: include_prompt false, a mean without the prefix's tokens, is not supported")
    keys: dict[str, str] = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_lasttoken": "last",
        "lasttoken": "last",
    }
    on = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True] or [str(config.get("pooling_mode"))]
    found = [keys.get(key, str(key)) for key in on]
    if len(found) != 1 or found[0] not in get_args(Pooling):
        raise EncoderFault(f"{files.directory / path}: pooling by {', '.join(on)} is not supported; one of {', '.join(get_args(Pooling))} is")
    return found[0]


def _of_prompts(files: ModelFiles) -> Said:
    """Prefixes by sentence-transformers' names. Empty ones say nothing: it writes them where nobody thought of any."""
    config = files.json(PROMPTS)
    prompts = config.get("prompts") if isinstance(config, dict) else None
    if config is None or not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        return {}
    default: str = prompts.get(config.get("default_prompt_name"), "")
    document = next((prompts[name] for name in DOCUMENT_PROMPTS if name in prompts), default)
    said: Said = {"query_prefix": (prompts.get("query", default), PROMPTS), "document_prefix": (document, PROMPTS)}
    return said if any(value for value, _ in said.values()) else {}


def _of_card(model: str) -> Said:
    known = KNOWN.get(model)
    if known is None:
        return {}
    names = ("pooling", "query_prefix", "document_prefix", "normalize")
    return {name: (getattr(known, name), known.source) for name in names}


def token_limit(files: ModelFiles) -> tuple[int, str]:
    """The most tokens that the model reads, and what says so."""
    config, tokenizer, sentence_bert = files.config(), files.json(TOKENIZER_CONFIG), files.json(SENTENCE_BERT)
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and config.get("model_type") in POSITIONS_AFTER_PADDING:
        positions -= int(config.get("pad_token_id") or 0) + 1
    limits = [
        (sentence_bert.get("max_seq_length") if isinstance(sentence_bert, dict) else None, f"max_seq_length of {SENTENCE_BERT}"),
        (tokenizer.get("model_max_length") if isinstance(tokenizer, dict) else None, f"model_max_length of {TOKENIZER_CONFIG}"),
        (positions, "max_position_embeddings of config.json"),
    ]
    told = [(int(limit), source) for limit, source in limits if isinstance(limit, int | float) and 0 < limit < UNLIMITED_TOKENS]
    if not told:
        raise EncoderFault(f"{files.model} does not say how many tokens it reads: add max_seq_length to {files.directory / SENTENCE_BERT}")
    return min(told, key=lambda limit: limit[0])


def _dim(files: ModelFiles) -> int:
    config = files.config()
    dim = config.get("hidden_size", config.get("dim"))
    if not isinstance(dim, int):
        raise EncoderFault(f"{files.directory / 'config.json'} has no hidden_size: {files.model} is no encoder of texts")
    return dim


def _refuse_lowercase(files: ModelFiles) -> None:
    """sentence-transformers can put texts into lower case before they are tokenized; only tokenizers that do it themselves are supported."""
    sentence_bert, tokenizer = files.json(SENTENCE_BERT), files.json(TOKENIZER)
    if isinstance(sentence_bert, dict) and sentence_bert.get("do_lower_case") and "lowercase" not in str((tokenizer or {}).get("normalizer")).lower():
        raise EncoderFault(f"{files.directory / SENTENCE_BERT}: do_lower_case is not supported with a tokenizer that keeps capitals")


E5 = {"query_prefix": "query: ", "document_prefix": "passage: ", "pooling": "mean"}
BGE_ENGLISH = {"query_prefix": "Represent this sentence for searching relevant passages: ", "pooling": "cls"}
BGE_CHINESE = {"query_prefix": "为这个句子生成表示以用于检索相关文章：", "pooling": "cls"}
PLAIN_MEAN = {"pooling": "mean"}

_CARDS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    (E5, ("intfloat/e5-small", "intfloat/e5-base", "intfloat/e5-large")),
    (E5, ("intfloat/e5-small-v2", "intfloat/e5-base-v2", "intfloat/e5-large-v2")),
    (E5, ("intfloat/multilingual-e5-small", "intfloat/multilingual-e5-base", "intfloat/multilingual-e5-large")),
    (BGE_ENGLISH, ("BAAI/bge-small-en-v1.5", "BAAI/bge-base-en-v1.5", "BAAI/bge-large-en-v1.5")),
    (BGE_CHINESE, ("BAAI/bge-small-zh-v1.5", "BAAI/bge-base-zh-v1.5", "BAAI/bge-large-zh-v1.5")),
    (BGE_ENGLISH, ("mixedbread-ai/mxbai-embed-large-v1",)),
    (PLAIN_MEAN, ("sentence-transformers/all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L12-v2", "sentence-transformers/all-mpnet-base-v2")),
    (PLAIN_MEAN, ("sentence-transformers/multi-qa-MiniLM-L6-cos-v1", "thenlper/gte-small", "thenlper/gte-base", "thenlper/gte-large")),
    ({"pooling": "mean", "normalize": False}, ("facebook/contriever", "facebook/contriever-msmarco")),
    ({"pooling": "cls"}, ("BAAI/bge-m3",)),
)

KNOWN: dict[str, KnownModel] = {
    model: KnownModel(**card, source=f"the model card, huggingface.co/{model}") for card, models in _CARDS for model in models
}
