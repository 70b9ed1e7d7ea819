"""The engines that generate: embedded ones, or SGLang servers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from agentrl.config.section import Positive, Seconds, Section

__all__ = ["EngineRecipe"]


def _with_scheme(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"http:// is missing: http://{url}")
    return url


Url = Annotated[str, AfterValidator(_with_scheme)]
Flag = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
# Where the server is, what it serves, who may ask it.
SET_BY_RUN = frozenset({"host", "port", "model_path", "weight_version", "api_key", "admin_api_key", "config"})
FlagValue = bool | int | float | str | None


class EngineRecipe(Section):
    """The engines that generate. docs/engines.md compares the kinds."""

    kind: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: the engine of this project. `sglang`: SGLang servers, started with `python` or attached to by `urls`."""
    replicas: Positive = 1
    """Number of engines that are started."""
    urls: list[Url] = []
    """Running servers to attach to instead. They are neither started nor stopped by the run; their weights become the run's."""
    slots: Positive = 64
    """Sequences generated at a time by an engine (SGLang: max_running_requests)."""
    context_tokens: Positive = 4096
    """Longest sequence; at least rollout.limits.context_tokens."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where engines compute."""
    threads: Positive = 1
    """CPU threads of an engine on the CPU."""
    tensor_parallel: Positive = 1
    """GPUs (SGLang on the CPU: processes) that share one engine's model."""
    python: str | None = None
    """The Python that has sglang, in its own environment: it pins torch and transformers."""
    options: dict[Flag, FlagValue] = {}
    """Further launch flags of SGLang: `mem_fraction_static: 0.8` is `--mem-fraction-static 0.8`; `true` is the bare flag, `false` and null none."""
    environment: dict[str, str] = {}
    """Further environment variables of an SGLang server."""
    api_key_variable: str | None = None
    """Name of the environment variable with the servers' API key. The key itself stands in no recipe and on no command line; an SGLang
    server writes it into its log, which only its owner can read."""
    admin_key_variable: str | None = None
    """The same for the admin key, which SGLang wants for its control calls where it has one."""
    start_deadline_s: Seconds = 600.0
    """How long a server may take to start: loading a large model takes minutes."""

    @model_validator(mode="after")
    def _not_ours(self) -> EngineRecipe:
        if taken := sorted(SET_BY_RUN & self.options.keys()):
            raise ValueError(f"engine.options.{taken[0]} is set by the run itself: leave it out")
        return self
