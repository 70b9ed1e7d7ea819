"""The model: where it comes from, how it is made on the spot, what is trained before the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.config.section import NonNegative, Positive, PositiveFloat, Section, Share

__all__ = ["Architecture", "LoraRecipe", "ModelRecipe", "PrepareRecipe", "TokenizerTraining", "WarmStartRecipe"]


class PrepareRecipe(Section):
    """Files made on the spot before the run, cached by content; other paths refer to them as `prepared:NAME`."""

    factory: str
    """`module:function(out_dir: Path, *, seed: int, **options)`, which writes its files into `out_dir`."""
    options: dict[str, Any] = {}
    """Further arguments of the factory."""


class Architecture(Section):
    """A model made on the spot, with random weights: the fields of its Hugging Face configuration."""

    family: Literal["qwen2", "qwen3", "llama"] = "qwen2"
    """Architecture of the model, as transformers names it."""
    hidden_size: Positive = 128
    """Width of the residual stream."""
    intermediate_size: Positive = 384
    """Width of the MLPs."""
    layers: Positive = 2
    """Number of layers."""
    heads: Positive = 4
    """Attention heads per layer."""
    kv_heads: Positive = 4
    """Heads of keys and values per layer (fewer than heads: grouped-query attention)."""
    max_positions: Positive = 512
    """Longest sequence."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    tie_embeddings: bool = True
    """One matrix for input and output embeddings."""
    initializer_range: float = 0.05
    """Standard deviation of the initial weights."""
    initialisation: Literal["normal", "mimetic"] = "normal"
    """`mimetic`: attention starts where trained transformers end up (Trockman & Kolter 2023)."""

    @model_validator(mode="after")
    def _divides(self) -> Architecture:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of heads ({self.heads}), and heads of kv_heads ({self.kv_heads})")
        if self.initialisation == "mimetic" and (self.kv_heads != self.heads or self.heads < 2):
            raise ValueError(f"initialisation mimetic needs kv_heads ({self.kv_heads}) equal to heads ({self.heads}), at least 2")
        if self.initialisation == "mimetic" and self.family != "qwen2":
            raise ValueError(f"initialisation mimetic needs family qwen2, whose first heads look back by their biases; {self.family} has none")
        return self


class TokenizerTraining(Section):
    """A byte-level BPE with Qwen's pre-tokenizer, control tokens and chat template, trained on the spot."""

    corpus: str
    """JSONL: every string of every row is text."""
    vocab_size: Positive = 2048
    """Tokens, control tokens included."""


class LoraRecipe(Section):
    """Train low-rank adapters only (Hu et al. 2021), by peft (the `lora` extra)."""

    rank: Positive = 16
    """Inner dimension of the adapters."""
    alpha: PositiveFloat = 32.0
    """The adapters' product is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Above 0 the learner's log-probs differ from the engine's by the noise: leave it 0 in reinforcement learning unless you know why."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get adapters, as peft takes them."""
    publish: Literal["merged", "adapters"] = "merged"
    """What engines are sent: full weights with the adapters merged in. `adapters`, those alone, is not there yet and refused."""


class ModelRecipe(Section):
    """The policy: a Hugging Face directory or hub name, or an architecture with random weights."""

    path: str | None = None
    """Hugging Face directory or hub name."""
    tokenizer: str | None = None
    """Directory or hub name; by default the model's own."""
    train_tokenizer: TokenizerTraining | None = None
    """Make the tokenizer on the spot instead."""
    architecture: Architecture | None = None
    """With `path`: used by `--smoke` only. Without: the model is made from it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of computation, and of published and exported weights; the learner keeps its weights in float32."""
    attention: Literal["sdpa", "flash_attention_2", "varlen"] = "sdpa"
    """The learner's. `sdpa` runs everywhere. `flash_attention_2` (the `gpu` extra) and `varlen` (torch's own, 2.10 and newer) are for GPUs and
    bfloat16, and take trajectories packed end to end."""
    gradient_checkpointing: bool = False
    """Keep fewer activations and compute them again in the backward pass."""
    lora: LoraRecipe | None = None
    """Train adapters instead of all weights."""

    @model_validator(mode="after")
    def _something(self) -> ModelRecipe:
        if self.path is None and (self.architecture is None or (self.tokenizer or self.train_tokenizer) is None):
            raise ValueError("give model.path, or model.architecture together with model.tokenizer or model.train_tokenizer")
        return self


class WarmStartRecipe(Section):
    """Supervised training before the run, standing for pre-training and fine-tuning. Cached by content.

    Rows are JSON lines `{"segments": [{"text": ..., "loss": true|false}, ...]}`, used in the order of the file.
    """

    rows: str
    """The JSONL file."""
    steps: Positive = 1200
    """Optimizer updates."""
    tokens_per_step: Positive = 1024
    """Padded tokens of a step."""
    pool: Positive = 256
    """Rows bucketed by length at a time."""
    muon_learning_rate: Annotated[float, Field(ge=0)] = 6e-3
    """For hidden matrices (Muon, match_rms_adamw)."""
    adam_learning_rate: Annotated[float, Field(ge=0)] = 3e-3
    """For embeddings, norms and biases (AdamW)."""
    warmup_steps: NonNegative = 30
    """Linear warm-up of the learning rates."""
    decay_share: Share = 0.4
    """Linear decay over this last share."""
    threads: Positive = 2
    """CPU threads."""
