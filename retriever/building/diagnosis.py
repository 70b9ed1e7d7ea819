"""Why the vectors of an index are not those that an encoder makes: looked for among what usually goes wrong.

An index that others made says nothing of how. Eight of its vectors are compared with what the encoder makes of their documents. Where they
differ, it is tried whether the rows are shifted, whether another pooling or prefix makes the same vectors, and whether another length does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import numpy.typing as npt

from retriever.documents import DocumentStore
from retriever.encoders.encoder import Encoder
from retriever.encoders.opening import open_encoder
from retriever.encoders.settings import Pooling, Runtime, TransformerSettings
from retriever.index import probe_rows
from retriever.query import Vectors
from retriever.searchers.searcher import Searcher

__all__ = ["Diagnosis", "diagnose"]

SAME = 0.99  # cosine
SAME_LENGTH = 0.02  # of vectors, relative: fp16 rounds to .0005
SHIFTS = (1, -1, 2, -2, 3, -3)  # a line too many or too few before the first probe: a header, an empty line, a count from 1
PREFIXES = ("", "passage: ", "query: ", "search_document: ", "Represent this sentence for searching relevant passages: ")
TOKENS = (64, 128, 180, 256, 350, 512)  # lengths that passages are usually cut to


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The least cosine of the compared vectors, and what is probably wrong; None if nothing is."""

    cosine: float
    fault: str | None


def diagnose(documents: DocumentStore, dense: Searcher, encoder: Encoder, settings: object, runtime: Runtime, *, lossy: bool) -> Diagnosis:
    """Compare stored vectors with an encoder's.

    Args:
        settings: the encoder's; of a transformer, others are tried.
        lossy: the index keeps less than the vectors: the nearest of the compared documents must be the vector's own.
    """
    rows = probe_rows(len(documents))
    texts = [documents.contents(row) for row in rows]
    fresh, stored = encoder.encode_documents(texts), dense.stored(rows)
    cosines = _cosines(fresh, stored)
    least = float(cosines.diagonal().min())
    if least >= SAME or (lossy and np.array_equal(cosines.argmax(axis=1), np.arange(len(rows)))):
        return Diagnosis(cosine=least, fault=_length_fault(fresh, stored, settings))
    reason = _shifted(fresh, dense, rows) or _otherwise(texts, stored, settings, runtime) or _unknown(cosines)
    return Diagnosis(cosine=least, fault=f"the stored vectors are not those of these documents (least cosine {least:.3f}): {reason}")


def _cosines(a_ND: Vectors, b_MD: Vectors) -> npt.NDArray[np.float64]:
    """[N, M]; 1 on the diagonal where both say nothing."""
    norms_a, norms_b = np.linalg.norm(a_ND.astype(np.float64), axis=1), np.linalg.norm(b_MD.astype(np.float64), axis=1)
    norms = np.outer(norms_a, norms_b)
    cosines = np.where(norms > 0, a_ND.astype(np.float64) @ b_MD.astype(np.float64).T / np.where(norms > 0, norms, 1), 0.0)
    for i in range(min(cosines.shape)):
        if norms_a[i] == 0 == norms_b[i]:
            cosines[i, i] = 1.0
    return cosines


def _length_fault(fresh: Vectors, stored: Vectors, settings: object) -> str | None:
    """Inner products of vectors that are longer or shorter than the encoder's are others."""
    ours, theirs = np.linalg.norm(fresh, axis=1), np.linalg.norm(stored, axis=1)
    if np.all(np.abs(ours - theirs) <= SAME_LENGTH * np.maximum(ours, theirs)):
        return None
    lengths = f"{theirs.min():.3g} to {theirs.max():.3g} long, the encoder's {ours.min():.3g} to {ours.max():.3g}"
    told = f"the stored vectors point where the encoder's do, but are {lengths}"
    if isinstance(settings, TransformerSettings):
        told += f": they were made with {'--no-normalize' if settings.normalize else '--normalize'}"
    return told


def _shifted(fresh: Vectors, dense: Searcher, rows: Sequence[int]) -> str | None:
    for shift in SHIFTS:
        inside = [i for i, row in enumerate(rows) if 0 <= row + shift < dense.count]
        if len(inside) < max(1, len(rows) // 2):
            continue
        moved = dense.stored([rows[i] + shift for i in inside])
        if _cosines(fresh[inside], moved).diagonal().min() >= SAME:
            row = rows[inside[0]]
            return f"row {row + shift} of the index holds document {row}: all are shifted by {shift}, so this is not the file that was embedded"
    return None


def _otherwise(texts: Sequence[str], stored: Vectors, settings: object, runtime: Runtime) -> str | None:
    """With which other settings the encoder makes these vectors."""
    if not isinstance(settings, TransformerSettings):
        return None
    best, found = -1.0, settings
    for other in _others(settings):
        least = _least(other, texts, stored, runtime)
        if least > best:
            best, found = least, other
        if best >= SAME:
            break
    longest = max(settings.max_document_tokens, settings.max_query_tokens)  # what the model reads at least
    for tokens in (tokens for tokens in TOKENS if best < SAME and tokens <= longest):
        other = replace(found, max_document_tokens=tokens)
        least = _least(other, texts, stored, runtime)
        if least > best:
            best, found = least, other
    if best < SAME:
        return None
    flags = []
    if found.pooling != settings.pooling:
        flags.append(f"--pooling {found.pooling} (not {settings.pooling})")
    if found.document_prefix != settings.document_prefix:
        flags.append(f"--document-prefix {found.document_prefix!r} (not {settings.document_prefix!r})")
    if found.max_document_tokens != settings.max_document_tokens:
        flags.append(f"--max-document-tokens {found.max_document_tokens} (not {settings.max_document_tokens})")
    return f"with {' and '.join(flags)} they would be (least cosine {best:.3f})"


def _others(settings: TransformerSettings) -> Iterator[TransformerSettings]:
    """One change before two."""
    poolings = [settings.pooling, *(pooling for pooling in get_args(Pooling) if pooling != settings.pooling)]
    prefixes = [settings.document_prefix, *(prefix for prefix in PREFIXES if prefix != settings.document_prefix)]
    changes = [(pooling, prefix) for pooling in poolings for prefix in prefixes]
    for pooling, prefix in sorted(changes, key=lambda change: (change[0] != poolings[0]) + (change[1] != prefixes[0])):
        yield replace(settings, pooling=pooling, document_prefix=prefix)


def _least(settings: TransformerSettings, texts: Sequence[str], stored: Vectors, runtime: Runtime) -> float:
    if runtime.device == "cpu":
        runtime = Runtime(kind="torch", threads=runtime.threads)  # ONNX Runtime would need a graph of every pooling
    encoder = open_encoder(settings.record, runtime, table=None)
    return float(_cosines(encoder.encode_documents(texts), stored).diagonal().min())


def _unknown(cosines: npt.NDArray[np.float64]) -> str:
    mean = float(cosines.diagonal().mean())
    own = int((cosines.argmax(axis=1) == np.arange(len(cosines))).sum())
    if own == len(cosines):
        return f"no pooling, prefix or length that is usual explains it (mean {mean:.3f}): it was made with other weights, or another prefix"
    return f"{own} of {len(cosines)} are nearest to their own document, and no usual setting explains it: another model, or another corpus"
