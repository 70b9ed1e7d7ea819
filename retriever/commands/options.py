"""Flags that several commands share: which encoder, and what runs it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retriever.encoders.hashed import HashedSettings
    from retriever.encoders.settings import Runtime, TransformerSettings

__all__ = [
    "HASHED",
    "NONE",
    "OF_HASHED",
    "OF_MODELS",
    "add_encoder",
    "add_model",
    "add_place",
    "add_runtime",
    "devices_of",
    "encoder_of",
    "runtime_of",
]

HASHED, NONE = "hashed", "none"
CPU = "cpu"
OF_MODELS = ("pooling", "query_prefix", "document_prefix", "max_query_tokens", "max_document_tokens", "normalize")
OF_HASHED = ("dim", "word_weight", "trigram_weight")


def add_encoder(parser: argparse._ActionsContainer, *, default: str) -> None:
    """What makes vectors of texts."""
    parser.add_argument(
        "--encoder", default=default, metavar=f"MODEL|{HASHED}|{NONE}", help=f"a directory or an id of the Hugging Face hub ({default})"
    )
    add_model(parser)
    parser.add_argument("--dim", type=int, metavar="N", help="of the hashed encoder (1024); 2048 finds a little more in long passages")
    parser.add_argument("--word-weight", type=float, metavar="W", help="of the hashed encoder (1.0)")
    parser.add_argument("--trigram-weight", type=float, metavar="W", help="of the hashed encoder (0.4)")


def add_model(parser: argparse._ActionsContainer) -> None:
    """What a model's own files do not say, or say wrong."""
    parser.add_argument("--pooling", choices=("mean", "cls", "last"), help="of a model whose files do not say")
    parser.add_argument("--query-prefix", metavar="TEXT", help='before a question, e.g. "query: "')
    parser.add_argument("--document-prefix", metavar="TEXT", help='before a passage, e.g. "passage: "')
    parser.add_argument("--max-query-tokens", type=int, metavar="N")
    parser.add_argument("--max-document-tokens", type=int, metavar="N")
    parser.add_argument("--normalize", action=argparse.BooleanOptionalAction, help="make vectors of length 1, or not")


def add_place(parser: argparse._ActionsContainer) -> None:
    """Where the model of an index is found."""
    parser.add_argument("--model", metavar="DIR|NAME", help="that made the index's vectors, where it lies now: of the same weights")


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """What runs a model."""
    parser.add_argument("--runtime", choices=("auto", "onnx", "torch"), default="auto", help="auto: ONNX Runtime on a CPU, PyTorch on a GPU")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16", "int8"), default="fp32")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of a CPU (1)")


def encoder_of(arguments: argparse.Namespace) -> TransformerSettings | HashedSettings | None:
    """The encoder that the flags name.

    Raises:
        ValueError: a flag is one of another kind of encoder, or the model cannot be used.
    """
    kind = arguments.encoder
    _refuse(arguments, OF_MODELS if kind in (HASHED, NONE) else (), kind)
    _refuse(arguments, OF_HASHED if kind != HASHED else (), kind)
    if kind == NONE:
        return None
    if kind == HASHED:
        from retriever.encoders.hashed import HashedSettings

        return HashedSettings(**{name: value for name in OF_HASHED if (value := getattr(arguments, name, None)) is not None})
    from retriever.encoders.models import describe

    return describe(kind, **{name: getattr(arguments, name) for name in OF_MODELS})


def runtime_of(arguments: argparse.Namespace, device: str = CPU) -> Runtime:
    """What the flags say of it, on a device. The threads are those of a CPU."""
    from retriever.encoders.settings import Runtime

    threads = arguments.threads if device == CPU else 1
    return Runtime(kind=arguments.runtime, precision=arguments.precision, device=device, threads=threads)


def devices_of(text: str) -> tuple[str, ...]:
    """`cuda:0,cuda:1`."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], kind: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name, None) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} would change nothing with --encoder {kind}: leave out, or name another encoder")
