"""A transformer that makes one vector of a text: prefix, tokens, chunks, states, pooling, length 1."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.files import ModelFiles
from retriever.encoders.graphs import GraphSource, onnx_program
from retriever.encoders.layouts import Layout
from retriever.encoders.modules import vector_module
from retriever.encoders.probes import PASSAGES, QUESTIONS
from retriever.encoders.program import Program, torch_program
from retriever.encoders.settings import Runtime, TransformerSettings
from retriever.encoders.tokens import ChunkLimits, TextTokenizer
from retriever.query import Vectors

__all__ = ["TransformerEncoder"]

TEXTS_AT_A_TIME = 1024  # are tokenized and sorted by length together
SMALLEST_NORM = 1e-12  # a state of zeros stays zeros


class TransformerEncoder:
    """Encodes texts by a program that computes chunks of them. `loss` is what int8 costs, measured. Threads take turns."""

    def __init__(
        self,
        settings: TransformerSettings,
        runtime: Runtime,
        tokenizer: TextTokenizer,
        limits: ChunkLimits,
        program: Program,
        loss: Mapping[str, float] | None = None,
    ) -> None:
        self.settings = settings
        self.runtime = runtime
        self.loss = loss
        self._tokenizer = tokenizer
        self._limits = limits
        self._program = program
        self._turn = threading.Lock()

    @classmethod
    def open(cls, settings: TransformerSettings, runtime: Runtime) -> TransformerEncoder:
        """The encoder of these settings.

        Raises:
            EncoderFault: the model is not there, or has other weights than the settings say.
        """
        files = ModelFiles.locate(settings.model)
        _check_weights(files, settings)
        tokenizer = TextTokenizer(files, threads=runtime.tokenizing_threads)
        _check_prefixes(settings, tokenizer)
        layout = Layout.fastest(files, runtime.device)
        program, loss = _program(files, settings, runtime, layout, tokenizer)
        return cls(settings, runtime, tokenizer, layout.limits, program, loss)

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self.settings.dim

    @property
    def record(self) -> Mapping[str, Any]:
        """What a manifest keeps."""
        return self.settings.record

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """[N, dim]; a zero row where a text is empty or only spaces."""
        return self._encode(texts, self.settings.query_prefix, self.settings.max_query_tokens)

    def encode_documents(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> Vectors:
        """[N, dim]; a zero row where a text is empty or only spaces. `progress` is told how many texts are done."""
        return self._encode(texts, self.settings.document_prefix, self.settings.max_document_tokens, progress)

    def info(self) -> Mapping[str, Any]:
        """What makes the vectors, and what runs it."""
        return {**self.record, **self.runtime.info, **({"loss": dict(self.loss)} if self.loss else {})}

    def _encode(self, texts: Sequence[str], prefix: str, max_tokens: int, progress: Callable[[int], None] | None = None) -> Vectors:
        vectors = np.zeros((len(texts), self.dim), np.float32)
        spoken = np.array([i for i, text in enumerate(texts) if text and not text.isspace()], np.int64)
        done = len(texts) - len(spoken)
        for start in range(0, len(spoken), TEXTS_AT_A_TIME):
            places = spoken[start : start + TEXTS_AT_A_TIME]
            prefixed = [prefix + texts[place] for place in places]
            with self._turn:
                for chunk in self._tokenizer.chunks(prefixed, max_tokens=max_tokens, limits=self._limits):
                    vectors[places[chunk.places]] = self._vectors(self._program(chunk))
                    done += len(chunk.places)
                    if progress is not None:
                        progress(done)
        return vectors

    def _vectors(self, pooled: Vectors) -> Vectors:
        if pooled.shape[1] != self.dim:
            raise EncoderFault(f"{self.settings.model} makes vectors of {pooled.shape[1]} dimensions, its record says {self.dim}")
        if not self.settings.normalize:
            return pooled
        norms = np.sqrt(np.einsum("nd,nd->n", pooled, pooled))
        unit: Vectors = pooled / np.maximum(norms, SMALLEST_NORM)[:, None]
        return unit


def _program(
    files: ModelFiles, settings: TransformerSettings, runtime: Runtime, layout: Layout, tokenizer: TextTokenizer
) -> tuple[Program, Mapping[str, float] | None]:
    if runtime.resolved == "torch":
        return torch_program(vector_module(files, settings.pooling, layout), layout, runtime), None
    limit = min(settings.max_query_tokens, settings.max_document_tokens)
    texts = [*QUESTIONS, *PASSAGES, " ".join(PASSAGES)]
    source = GraphSource(
        files=files,
        weights_sha256=settings.weights_sha256,
        name=f"{settings.pooling} vectors",
        layout=layout,
        module=lambda: vector_module(files, settings.pooling, layout),
        probes=list(tokenizer.chunks(texts, max_tokens=limit, limits=layout.limits)),
        loss=_cosines,
    )
    return onnx_program(source, runtime)


def _cosines(before: Vectors, after: Vectors) -> Mapping[str, float]:
    cosines = np.einsum("nd,nd->n", before, after) / np.maximum(np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1), SMALLEST_NORM)
    return {"mean cosine": float(cosines.mean()), "lowest cosine": float(cosines.min())}


def _check_prefixes(settings: TransformerSettings, tokenizer: TextTokenizer) -> None:
    for prefix, limit in ((settings.query_prefix, settings.max_query_tokens), (settings.document_prefix, settings.max_document_tokens)):
        if prefix and tokenizer.count(prefix) >= limit:
            raise EncoderFault(f"the prefix {prefix!r} takes all of the {limit} tokens that {settings.model} reads: every vector would be the same")


def _check_weights(files: ModelFiles, settings: TransformerSettings) -> None:
    found = files.weights_sha256()
    if found != settings.weights_sha256:
        raise EncoderFault(
            f"the weights of {settings.model} are others than those of the record (sha256 {found[:16]}..., not {settings.weights_sha256[:16]}...):"
            " vectors of the two cannot be compared. Bring back the model, or build the index again"
        )
