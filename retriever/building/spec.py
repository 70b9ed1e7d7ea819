"""What an index is to be: everything that decides the bytes of its vectors, and how they are computed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from retriever.encoders.hashed import HashedSettings
from retriever.encoders.settings import Runtime, TransformerSettings
from retriever.manifest import BLOCKS, IndexFault

__all__ = ["BuildSpec", "Dtype", "check_index", "differences", "encoder_record"]

RESCORE_DEPTH = 100  # RaBitQ's first 100 hold the exact first 3 of all but a thousandth of the queries

Dtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSpec:
    """What an index is to be.

    Args:
        encoder: None: words only (`bm25`).
        index: a FAISS factory string, or "blocks": rows of `dtype`, searched exactly.
        dtype: of the row shards; None: float32 for a FAISS index that keeps float32 ("Flat", "HNSW32"), otherwise float16.
        rescore: keep the row shards, and score the best `rescore_depth` of a search again by them.
        shard_rows: documents between two marks that a build goes on from; None: about two minutes of work.
        devices: one process each embeds; "cpu" may come several times.
        runtime: what runs the encoder; its device is not read.
        threads: that make a FAISS index; None: as many as the runtime's.
    """

    encoder: TransformerSettings | HashedSettings | None = field(default_factory=HashedSettings)
    index: str = "Flat"
    dtype: Dtype | None = None
    rescore: bool = False
    rescore_depth: int = RESCORE_DEPTH
    bm25: bool = False
    shard_rows: int | None = None
    devices: tuple[str, ...] = ("cpu",)
    runtime: Runtime = field(default_factory=Runtime)
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.encoder is None and not self.bm25:
            raise ValueError("an index without an encoder finds by words: add --bm25")
        if self.encoder is None and (self.rescore or self.dtype or self.index != "Flat"):
            raise ValueError("--index, --dtype and --rescore are of vectors, and there is no encoder: leave them out")
        if self.dtype is not None and self.dtype not in get_args(Dtype):
            raise ValueError(f"--dtype is one of {', '.join(get_args(Dtype))}, got {self.dtype!r}")
        if self.index == BLOCKS and self.rescore:
            raise ValueError("blocks are searched exactly: --rescore would change nothing. Leave it out")
        if self.index == BLOCKS and self.dtype == "float32":
            raise ValueError("blocks are float16 or bfloat16; for float32 vectors use --index Flat")
        if re.search(r"IVF.*,PQ\d+x4fs", self.index) and not self.rescore:
            raise ValueError(f"FAISS cannot decode the vectors of --index {self.index}, by which an index is checked: add --rescore")
        if self.index == "Flat" and self.rescore:
            raise ValueError("Flat is searched exactly: --rescore would change nothing. Leave it out")
        if isinstance(self.encoder, HashedSettings) and (self.runtime.kind, self.runtime.precision) != ("auto", "fp32"):
            raise ValueError("--runtime and --precision are a model's, and the hashed encoder has none: leave them out")
        if not self.devices:
            raise ValueError("--device names no device")
        if isinstance(self.encoder, HashedSettings) and set(self.devices) != {"cpu"}:
            raise ValueError(f"the hashed encoder computes on CPUs, not on {', '.join(self.devices)}; --device cpu,cpu takes two processes")
        for name, number in (("--shard-rows", self.shard_rows), ("--threads", self.threads)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")

    @property
    def shard_dtype(self) -> Dtype:
        """In what the vectors are kept while the index is built, and after it as blocks or for scoring again."""
        exact = self.index != BLOCKS and not self.rescore and re.fullmatch(r"Flat|HNSW\d+(,Flat)?|IVF\d+(_HNSW\d+)?,Flat", self.index)
        return self.dtype or ("float32" if exact else "float16")

    def content(self) -> dict[str, Any]:
        """What decides the bytes: equal values, same index. Devices, threads and the runtime's kind only decide when it is done."""
        if self.encoder is None:
            return {"encoder": None, "bm25": self.bm25}
        return {
            "encoder": encoder_record(self.encoder),
            "precision": self.runtime.precision,
            "index": self.index,
            "dtype": self.shard_dtype,
            "rescore": self.rescore_depth if self.rescore else None,
            "bm25": self.bm25,
        }


def check_index(spec: BuildSpec, count: int | None = None) -> None:
    """Try the index with hardly any vectors, before something long begins.

    Args:
        count: of the vectors, if it is known.

    Raises:
        IndexFault: FAISS has no such index, or not for vectors of this length, or not for so few.
    """
    if spec.encoder is None or spec.index == BLOCKS:
        return
    from retriever.searchers.faiss_index import check_factory
    from retriever.searchers.searcher import SearcherError

    try:
        check_factory(spec.encoder.dim, spec.index, count)
    except SearcherError as error:
        raise IndexFault(f"--index {spec.index}: {error}") from error


def encoder_record(encoder: TransformerSettings | HashedSettings) -> dict[str, Any]:
    """What a manifest keeps of it."""
    return encoder.record if isinstance(encoder, TransformerSettings) else {"kind": "hashed", **asdict(encoder)}


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any], within: str = "") -> list[str]:
    """What differs, one line each: `encoder.dim 384, now 768`."""
    told = []
    for key in sorted({*found, *wanted}):
        old, new = found.get(key), wanted.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            told += differences(old, new, f"{within}{key}.")
        elif old != new:
            told.append(f"{within}{key} {old!r}, now {new!r}")
    return told
