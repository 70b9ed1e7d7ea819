"""Parameters of a search in a FAISS index, by a string: "nprobe=32", "efSearch=128,nprobe=32"."""

from __future__ import annotations

from typing import Any

import faiss

from retriever.searchers.searcher import SearcherError

__all__ = ["apply_parameters", "known_parameters"]


def apply_parameters(index: Any, parameters: str) -> dict[str, int]:
    """Set parameters of an index, and return them.

    Raises:
        SearcherError: a parameter is none of this index, comes twice, or its value is no positive integer.
    """
    known = known_parameters(index)
    values: dict[str, int] = {}
    for part in parameters.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in known:
            fitting = f"there are {', '.join(known)}" if known else "it has none"
            raise SearcherError(f"parameters: {name!r} is no parameter of a search in {type(index).__name__}: {fitting}")
        if name in values:
            raise SearcherError(f"parameters: {name} comes twice in {parameters!r}")
        if not value.isascii() or not value.isdigit() or not 1 <= int(value) < 2**31:
            raise SearcherError(f"parameters: {name} is a positive integer, as in {name}=32, got {value!r}")
        values[name] = int(value)
    for name, number in values.items():
        faiss.ParameterSpace().set_index_parameter(index, name, number)
    return values


def known_parameters(index: Any) -> list[str]:
    """The parameters that a search in this index has."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform | faiss.IndexIDMap):
        return known_parameters(index.index)
    if isinstance(index, faiss.IndexRefine):
        return [*known_parameters(index.base_index), "k_factor_rf"]
    if isinstance(index, faiss.IndexHNSW):
        return ["efSearch"]
    if isinstance(index, faiss.IndexIVF):
        return ["nprobe", *(f"quantizer_{name}" for name in known_parameters(index.quantizer))]
    return []
