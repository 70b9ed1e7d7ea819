"""What makes an encoder's vectors (`TransformerSettings`: in the manifest) and what only makes them fast (`Runtime`: a flag of the server)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from retriever.encoders.encoder import EncoderFault

__all__ = ["KIND", "Pooling", "Precision", "Runtime", "TransformerSettings"]

KIND = "transformer"

Pooling = Literal["mean", "cls", "last"]
Precision = Literal["fp32", "bf16", "fp16", "int8"]

MIN_TOKENS = 4  # two of them are special, in most models
RUNTIMES = ("auto", "onnx", "torch")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerSettings:
    """A transformer that makes one vector of a text. Two indexes with equal settings hold comparable vectors.

    Args:
        model: a directory, or an id of the Hugging Face hub.
        weights_sha256: over the bytes of its .safetensors files, in the order of their names.
        dim: length of a vector.
        pooling: the vector is the mean of the last layer's states, the first token's ("cls"), or the last token's.
        query_prefix: what precedes a question, e.g. "query: ".
        document_prefix: what precedes a passage.
        max_query_tokens: what follows is cut off; prefix and special tokens count.
        max_document_tokens: as max_query_tokens.
        normalize: vectors have length 1, and inner products are cosines.
    """

    model: str
    weights_sha256: str
    dim: int
    pooling: Pooling
    query_prefix: str
    document_prefix: str
    max_query_tokens: int
    max_document_tokens: int
    normalize: bool

    def __post_init__(self) -> None:
        wrong = [field.name for field in fields(self) if type(getattr(self, field.name)) is not _TYPES[str(field.type)]]
        if wrong:
            raise EncoderFault(f"an encoder's record has a wrong {wrong[0]}: {getattr(self, wrong[0])!r}")
        if self.pooling not in get_args(Pooling):
            raise EncoderFault(f"pooling is one of {', '.join(get_args(Pooling))}, got {self.pooling!r}")
        for name, least in (("dim", 1), ("max_query_tokens", MIN_TOKENS), ("max_document_tokens", MIN_TOKENS)):
            if getattr(self, name) < least:
                raise EncoderFault(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def record(self) -> dict[str, Any]:
        """What a manifest keeps."""
        return {"kind": KIND, **asdict(self)}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> TransformerSettings:
        """Of a manifest's record.

        Raises:
            EncoderFault: a key is missing, unknown or of a wrong type.
        """
        values = {key: value for key, value in record.items() if key != "kind"}
        names = {field.name for field in fields(cls)}
        if values.keys() != names:
            raise EncoderFault(f"an encoder's record has the keys {', '.join(sorted(names))}; these differ: {sorted(values.keys() ^ names)}")
        return cls(**values)


_TYPES = {"str": str, "int": int, "bool": bool, "Pooling": str}


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """What runs a transformer.

    Args:
        kind: "onnx" is ONNX Runtime, "torch" PyTorch; "auto" is ONNX Runtime on a CPU in fp32 and int8, and else PyTorch.
        precision: of the matrix products. Vectors are always float32.
        device: "cpu", or a device of PyTorch such as "cuda:0".
        threads: of a matrix product, on a CPU.
        cache: where exported graphs are kept; None: $XDG_CACHE_HOME/agentrl/onnx, or ~/.cache/agentrl/onnx.
    """

    kind: Literal["auto", "onnx", "torch"] = "auto"
    precision: Precision = "fp32"
    device: str = "cpu"
    threads: int = 1
    cache: Path | None = None

    def __post_init__(self) -> None:
        if self.kind not in RUNTIMES or self.precision not in get_args(Precision) or self.threads < 1:
            raise EncoderFault(f"a runtime is one of {RUNTIMES} with a precision of {get_args(Precision)} and threads >= 1, got {self}")
        if self.resolved == "onnx" and (self.device != "cpu" or self.precision not in ("fp32", "int8")):
            raise EncoderFault(f"the onnx runtime computes fp32 and int8 on the CPU, not {self.precision} on {self.device}: use --runtime torch")
        if self.resolved == "torch" and self.precision == "int8":
            raise EncoderFault("the torch runtime computes fp32, bf16 and fp16, not int8: use --runtime onnx on a CPU")
        if self.device == "cpu" and self.precision == "fp16":
            raise EncoderFault("fp16 is for GPUs; on a CPU bf16 is the fast one: --precision bf16")
        if self.device != "cpu" and self.threads != 1:
            raise EncoderFault(f"threads are those of a CPU; {self.device} has none to set")

    @property
    def info(self) -> dict[str, Any]:
        """For people and programs."""
        return {"runtime": self.resolved, "precision": self.precision, "device": self.device, "threads": self.threads}

    @property
    def tokenizing_threads(self) -> int:
        """All cores where a GPU computes, which would wait for the tokens of one thread. It has not been measured on a GPU."""
        return self.threads if self.device == "cpu" else len(os.sched_getaffinity(0))

    @property
    def resolved(self) -> Literal["onnx", "torch"]:
        """What "auto" stands for."""
        if self.kind != "auto":
            return self.kind
        return "onnx" if self.device == "cpu" and self.precision in ("fp32", "int8") else "torch"
