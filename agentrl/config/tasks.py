"""Tasks, the environment that asks them, and its retriever."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.config.section import Positive, Section

__all__ = ["HASHED", "NO_ENCODER", "OF_A_CORPUS", "CurriculumRecipe", "EnvRecipe", "RetrieverRecipe", "TaskSource", "TasksRecipe"]

HASHED, NO_ENCODER = "hashed", "none"  # retriever.encoder: words that name no model
FLAT = "Flat"
EXACT = frozenset({FLAT, "blocks"})
OF_A_CORPUS = ("encoder", "index_type", "bm25")
OF_A_STARTED_ONE = (*OF_A_CORPUS, "model", "mode", "device", "threads", "runtime", "precision", "reranker", "parameters")


class TaskSource(Section):
    """A file of tasks, or a class that yields them."""

    path: str | None = None
    """JSONL; with the `data` extra also .parquet, or `hub:ORG/NAME[/CONFIG][:SPLIT]`."""
    factory: str | None = None
    """`module:Class(**options)`, an iterable of `agentrl.types.Task`."""
    options: dict[str, Any] = {}
    """Further arguments of the factory."""
    name: str | None = None
    """The tasks' source; by default the row's `data_source`, else the file's stem."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the mixture; by default sources count by their number of tasks."""
    limit: Positive | None = None
    """Use a seeded subset of this many tasks."""

    @model_validator(mode="after")
    def _one_origin(self) -> TaskSource:
        if (self.path is None) == (self.factory is None):
            raise ValueError("a task source has either a path or a factory")
        return self


class CurriculumRecipe(Section):
    """Which task comes next, decided by a class of yours."""

    factory: str
    """`module:Class(tasks, **options)`; see `agentrl.data.curriculum`."""
    options: dict[str, Any] = {}
    """Further arguments of the factory."""


class TasksRecipe(Section):
    """The training tasks."""

    train: Annotated[list[TaskSource], Field(min_length=1)]
    """Where they come from; several sources are mixed."""
    shuffle: bool = True
    """A new seeded shuffle every epoch."""
    curriculum: CurriculumRecipe | None = None
    """By default tasks come in their (shuffled) order, each once an epoch."""
    over_long: Literal["refuse", "filter"] = "refuse"
    """What to do with a task whose prompt exceeds rollout.limits.prompt_tokens."""


class EnvRecipe(Section):
    """The environment: `factory(**options)` for every episode."""

    factory: str
    """`module:Class`."""
    options: dict[str, Any] = {}
    """Arguments of the factory."""


class RetrieverRecipe(Section):
    """A retriever started with the run, or reached: exactly one of url, corpus, index. The environment's options get its `retriever_url`.
    docs/retriever.md says what there is to choose from, and what it costs. The keys below `topk` are about one that is started with the run, and
    encoder, index_type and bm25 about a corpus: an index has its own."""

    url: str | None = None
    """A running server with Search-R1's API. A token that it wants is read from AGENTRL_RETRIEVER_TOKEN in the run's environment."""
    corpus: str | None = None
    """JSONL of `{id, contents}` or `{id, title, text}`: indexed once per content, kept in `<run.dir>/.cache`."""
    index: str | None = None
    """A directory made by `agentrl retriever build` or `import`."""
    topk: Positive = 3
    """Passages a query gets where it does not say."""
    encoder: str = HASHED
    """What makes vectors of a corpus: `hashed` (words and trigrams; no model, nothing downloaded), a model's name on the hub or its directory, or
    `none` (BM25 alone)."""
    index_type: str = FLAT
    """How the vectors of a corpus are kept: a FAISS factory (`Flat`, `SQ8`, `HNSW32,SQ8`, ...), or `blocks` (exact, in 16 bits)."""
    bm25: bool = False
    """Index the words of a corpus, too: for mode bm25 and hybrid."""
    model: str | None = None
    """Where the model that made an index's vectors lies, if that is elsewhere than where it was built: of the same weights, by their hash."""
    mode: Literal["dense", "bm25", "hybrid"] | None = None
    """How passages are found where a query does not say; by default by vectors, and by words where there are none."""
    device: Literal["cpu", "cuda"] = "cpu"
    """`cuda`: the resources.retriever_gpus, by index: vectors of `blocks` are spread over all of them."""
    threads: Positive = 1
    """Of the encoder and of the search. More only where the machine has cores to spare: it shares them with workers, engines and learner."""
    runtime: Literal["auto", "onnx", "torch"] = "auto"
    """What the encoder runs in. `auto`: onnxruntime on a CPU, torch on a GPU."""
    precision: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    """The encoder's. int8 finds other passages for some questions; how far its vectors are from fp32 is said when it starts."""
    reranker: str | None = None
    """A cross-encoder on the hub or its directory, for searches that ask for it (envs.search: env.options.retriever_options.rerank)."""
    parameters: str | None = None
    """Of an approximate index's search: `efSearch=512` for HNSW, `nprobe=64` for IVF."""

    @model_validator(mode="after")
    def _one_origin(self) -> RetrieverRecipe:
        given = [name for name in ("url", "corpus", "index") if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"; given: {' and '.join(given)}. Set those that are not meant to null, e.g. retriever.{given[0]}=null" if given else ""
            raise ValueError(f"a retriever has exactly one of url, corpus and index{found}")
        return self

    @model_validator(mode="after")
    def _has_effect(self) -> RetrieverRecipe:
        if self.url is not None and (idle := self._changed(*OF_A_STARTED_ONE)):
            raise ValueError(
                f"retriever.{idle} is about a retriever that the run starts, and {self.url} runs already: leave it out, and set it there"
            )
        if self.index is not None and (idle := self._changed(*OF_A_CORPUS)):
            raise ValueError(f"retriever.{idle} is about a corpus, and an index was built with its own: leave it out")
        if self.corpus is not None and self.model is not None:
            raise ValueError("retriever.model says where the model of an index lies, and a corpus has its retriever.encoder: leave it out")
        if refused := self._refused_computing() or (self._refused_of_a_corpus() if self.corpus is not None else None):
            raise ValueError(refused)
        return self

    def _changed(self, *names: str) -> str | None:
        return next((name for name in names if getattr(self, name) != type(self).model_fields[name].default), None)

    def _refused_computing(self) -> str | None:
        if self.device == "cuda" and self.threads > 1:
            return "retriever.threads are those of a CPU, and retriever.device is cuda: leave them out"
        if self.precision == "fp16" and self.device == "cpu":
            return "retriever.precision fp16 is for GPUs; on a CPU bf16 is the fast one: set retriever.precision=bf16, or fp32"
        if self.runtime == "onnx" and (self.device == "cuda" or self.precision == "bf16"):
            return "retriever.runtime onnx computes fp32 and int8 on the CPU: set retriever.runtime=torch, or auto"
        if self.precision == "int8" and (self.device == "cuda" or self.runtime == "torch"):
            return "retriever.precision int8 is onnxruntime's on the CPU: set retriever.precision=bf16, or leave device and runtime out"
        return None

    def _refused_of_a_corpus(self) -> str | None:
        model_free = self.encoder in (HASHED, NO_ENCODER)
        if model_free and self.reranker is None and (idle := self._changed("runtime", "precision")):
            return f"retriever.{idle} is about a model, and retriever.encoder is {self.encoder}: leave it out, or name a model"
        if self.encoder == NO_ENCODER and (idle := self._changed("index_type", "parameters")):
            return f"retriever.{idle} is about vectors, and with retriever.encoder none there are none: leave it out"
        if self.encoder == NO_ENCODER and not self.bm25:
            return "retriever.encoder none leaves words to search by: set retriever.bm25=true"
        if self.encoder == NO_ENCODER and self.mode in ("dense", "hybrid"):
            return f"retriever.mode {self.mode} needs vectors, and retriever.encoder is none: name an encoder, or leave the mode out"
        if self.mode in ("bm25", "hybrid") and not self.bm25:
            return f"retriever.mode {self.mode} needs an index of words: set retriever.bm25=true"
        if self.index_type in EXACT and self.parameters is not None:
            return f"retriever.parameters are of approximate indexes, and retriever.index_type {self.index_type} is exact: leave them out"
        return None
