"""How well documents answer a question, by a model that reads both at once: any of transformers' for sequence classification with one logit."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retriever.encoders.encoder import EncoderFault
from retriever.encoders.files import ModelFiles
from retriever.encoders.graphs import GraphSource, onnx_program
from retriever.encoders.layouts import Layout
from retriever.encoders.models import token_limit
from retriever.encoders.modules import scoring_module
from retriever.encoders.probes import PASSAGES, QUESTIONS
from retriever.encoders.program import Program, torch_program
from retriever.encoders.settings import Runtime
from retriever.encoders.tokens import ChunkLimits, TextTokenizer

__all__ = ["CrossEncoder"]

MIN_TOKENS = 16  # half of them may be the question's, and some are special
SCORING = "ForSequenceClassification"  # the end of transformers' names of classes that score
PAIRS_AT_A_TIME = 1024  # are tokenized and sorted by length together

Scores = npt.NDArray[np.float32]  # [N]


class CrossEncoder:
    """Scores pairs of a question and a document: the model's logit, the higher the better. Threads take turns."""

    def __init__(self, description: Mapping[str, Any], max_tokens: int, limits: ChunkLimits, tokenizer: TextTokenizer, program: Program) -> None:
        self._description = description
        self._max_tokens = max_tokens
        self._limits = limits
        self._tokenizer = tokenizer
        self._program = program
        self._turn = threading.Lock()

    @classmethod
    def open(cls, model: str, runtime: Runtime, *, max_tokens: int | None = None) -> CrossEncoder:
        """A model of a directory or of a hub id.

        Args:
            max_tokens: of a pair, the rest of the document is cut off; None: as many as the model reads.

        Raises:
            EncoderFault: the model is not there, has more than one logit, or does not read that many tokens.
        """
        files = ModelFiles.locate(model)
        _check_one_logit(files)
        limit, source = token_limit(files)
        if not MIN_TOKENS <= (max_tokens or limit) <= limit:
            raise EncoderFault(f"max_tokens {max_tokens or limit} is not between {MIN_TOKENS} and what {model} can read: {limit} ({source})")
        tokenizer = TextTokenizer(files, threads=runtime.tokenizing_threads)
        max_tokens, sha256 = max_tokens or limit, files.weights_sha256()
        layout = Layout.padded(files, runtime.device)
        program, loss = _program(files, sha256, max_tokens, runtime, layout, tokenizer)
        made_of = {"model": files.model, "weights_sha256": sha256, "max_tokens": max_tokens, **runtime.info}
        return cls({**made_of, **({"loss": dict(loss)} if loss else {})}, max_tokens, layout.limits, tokenizer, program)

    @staticmethod
    def check(model: str) -> None:
        """Whether a directory may hold a reranker. Of a hub id nothing is known before it is downloaded.

        Raises:
            EncoderFault: there is no model, or it is another kind of one.
        """
        if Path(model).expanduser().is_dir() or model.startswith((".", "~", "/")):
            _check_one_logit(ModelFiles.locate(model))

    def is_of(self, model: str) -> bool:
        """Whether it is what would be opened: the same model, with the weights that lie there now."""
        files = ModelFiles.locate(model)
        return (self._description["model"], self._description["weights_sha256"]) == (files.model, files.weights_sha256())

    def score_pairs(self, pairs: Sequence[tuple[str, str]]) -> Scores:
        """[N], one per pair of a question and a document."""
        scores = np.zeros(len(pairs), np.float32)
        for start in range(0, len(pairs), PAIRS_AT_A_TIME):
            some = pairs[start : start + PAIRS_AT_A_TIME]
            with self._turn:
                for chunk in self._tokenizer.pair_chunks(some, max_tokens=self._max_tokens, limits=self._limits):
                    scores[start + chunk.places] = self._program(chunk)[:, 0]
        return scores

    def info(self) -> Mapping[str, Any]:
        """What it is and what runs it."""
        return dict(self._description)


def _program(
    files: ModelFiles, sha256: str, max_tokens: int, runtime: Runtime, layout: Layout, tokenizer: TextTokenizer
) -> tuple[Program, Mapping[str, float] | None]:
    if runtime.resolved == "torch":
        return torch_program(scoring_module(files), layout, runtime), None
    answered = list(zip(QUESTIONS, PASSAGES, strict=True))
    besides = list(zip(QUESTIONS, [*PASSAGES[1:], " ".join(PASSAGES)], strict=True))
    source = GraphSource(
        files=files,
        weights_sha256=sha256,
        name="scores",
        layout=layout,
        module=lambda: scoring_module(files),
        probes=list(tokenizer.pair_chunks([*answered, *besides], max_tokens=max_tokens, limits=layout.limits)),
        loss=_difference,
    )
    return onnx_program(source, runtime)


def _difference(before: Scores, after: Scores) -> Mapping[str, float]:
    correlation = float(np.corrcoef(before[:, 0], after[:, 0])[0, 1])
    return {"correlation": correlation, "largest difference of a logit": float(np.abs(before - after).max())}


def _check_one_logit(files: ModelFiles) -> None:
    config = files.config()
    kinds = config.get("architectures") or []
    if kinds and not any(str(kind).endswith(SCORING) for kind in kinds):
        raise EncoderFault(f"{files.model} is an encoder and no cross-encoder: its config.json says {kinds[0]}, and a reranker is a ...{SCORING}")
    labels = config.get("num_labels", len(config.get("id2label") or (0, 1)))  # transformers' own default is two
    if labels != 1:
        raise EncoderFault(f"{files.model} has {labels} logits, a reranker has one (num_labels or id2label of config.json)")
