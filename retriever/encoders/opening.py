"""Records of manifests to encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from retriever.encoders import hashed, settings
from retriever.encoders.encoder import Encoder, EncoderFault
from retriever.encoders.hashed import HashedEncoder, HashedSettings
from retriever.encoders.settings import Runtime, TransformerSettings
from retriever.encoders.transformer import TransformerEncoder

__all__ = ["open_encoder"]


def open_encoder(record: Mapping[str, Any], runtime: Runtime, *, table: Path | None) -> Encoder:
    """The encoder that made an index's vectors.

    Args:
        record: `Encoder.record`, as the manifest keeps it.
        table: idf.npy of a hashed encoder; a transformer has none.

    Raises:
        EncoderFault: the record is not one of an encoder, the model is not there, or it has other weights.
    """
    kind = record.get("kind")
    if kind == settings.KIND:
        if table is not None:
            raise EncoderFault(f"a transformer has no table, got {table}")
        return TransformerEncoder.open(TransformerSettings.of(record), runtime)
    if kind == hashed.KIND:
        return _open_hashed(record, table)
    raise EncoderFault(f"an encoder is of kind {hashed.KIND} or {settings.KIND}, got {kind!r}")


def _open_hashed(record: Mapping[str, Any], table: Path | None) -> HashedEncoder:
    names = {field.name for field in fields(HashedSettings)}
    if record.keys() != names | {"kind", "passages"} or table is None:
        raise EncoderFault(f"a hashed encoder's record has {', '.join(sorted(names))} and passages, and a table beside it; got {dict(record)}")
    values = {name: record[name] for name in names}
    return HashedEncoder(HashedSettings(**values), passages=record["passages"], table=np.load(table, allow_pickle=False))
