"""Tasks, the environment that asks them, and its retriever."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.config.section import Positive, Section

__all__ = ["CurriculumRecipe", "EnvRecipe", "RetrieverRecipe", "TaskSource", "TasksRecipe"]


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
    """A retriever started with the run, or reached: exactly one of url, corpus, index. The environment's options get its `retriever_url`."""

    url: str | None = None
    """A running server with Search-R1's API."""
    corpus: str | None = None
    """JSONL of `{id, contents}` or `{id, title, text}`: indexed once per content, kept in `<run.dir>/.cache`."""
    index: str | None = None
    """A directory made by `agentrl retriever build`."""
    topk: Positive = 3
    """Passages a query gets where it does not say."""

    @model_validator(mode="after")
    def _one_origin(self) -> RetrieverRecipe:
        if sum(x is not None for x in (self.url, self.corpus, self.index)) != 1:
            raise ValueError("a retriever has exactly one of url, corpus and index")
        return self
