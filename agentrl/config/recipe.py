"""The recipe: one pydantic model per component. Unknown keys are errors. Imports neither torch nor ray.

Read top to bottom it is the manual of a recipe; `docs/recipes.md` is made from it. Loading (strict YAML, overrides, files and lines in
error messages) is in `config.load`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.config.deterministic import unmet_conditions

__all__ = [
    "AlgorithmRecipe",
    "Architecture",
    "BufferRecipe",
    "CheckpointRecipe",
    "EngineRecipe",
    "EntropyRecipe",
    "EnvRecipe",
    "EvalRecipe",
    "EvalSet",
    "ImportanceRecipe",
    "LearnerRecipe",
    "LimitsRecipe",
    "LossRecipe",
    "MetricsRecipe",
    "ModelRecipe",
    "PrepareRecipe",
    "Recipe",
    "ReplayRecipe",
    "ResourcesRecipe",
    "RetrieverRecipe",
    "RolloutRecipe",
    "RunRecipe",
    "ScheduleRecipe",
    "Section",
    "TaskSource",
    "TasksRecipe",
    "TokenizerTraining",
    "WarmStartRecipe",
    "WeightsRecipe",
]

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]


class Section(BaseModel):
    """Base of all sections: strict about types and names, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, use_attribute_docstrings=True)


class RunRecipe(Section):
    """Where and how long."""

    dir: str = "runs"
    """Runs are kept in `<dir>/<name>`."""
    launcher: Literal["ray", "local"] = "ray"
    """What starts the processes: Ray, or plain subprocesses. All of them run on one machine."""
    ray_address: str | None = None
    """Address of a Ray that runs already; by default a private one is started."""
    steps: Positive | None = None
    """End after this many steps. Exactly one of steps, epochs and hours is set."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """End after this many passes over the training tasks: steps = epochs x tasks / groups_per_batch, rounded down."""
    hours: Annotated[float, Field(gt=0.0)] | None = None
    """End after this much time, summed over resumes; schedules follow the share of it that has passed."""
    deterministic: bool = False
    """Bit-reproducible: one engine, one worker, one thread, K=0, fixed slots, fp32 on the CPU, exact search query by query, no evaluation."""
    debug: bool = False
    """Check the ledger's balance after every record."""

    @model_validator(mode="after")
    def _one_end(self) -> RunRecipe:
        given = [name for name in ("steps", "epochs", "hours") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a run ends by exactly one of steps, epochs and hours; given: {', '.join(given) or 'none'}")
        return self


class PrepareRecipe(Section):
    """Files made on the spot before the run, cached by content; other paths refer to them as `prepared:NAME`."""

    factory: str
    """`module:function(out_dir: Path, *, seed: int, **options)`, which writes its files into `out_dir`."""
    options: dict[str, Any] = {}


class Architecture(Section):
    """A model made on the spot, with random weights: the fields of its Hugging Face configuration."""

    family: Literal["qwen2"] = "qwen2"
    hidden_size: Positive = 128
    intermediate_size: Positive = 384
    layers: Positive = 2
    heads: Positive = 4
    kv_heads: Positive = 4
    max_positions: Positive = 512
    rope_theta: float = 10000.0
    tie_embeddings: bool = True
    initializer_range: float = 0.05
    initialisation: Literal["normal", "mimetic"] = "normal"
    """`mimetic`: attention starts where trained transformers end up (Trockman & Kolter 2023)."""

    @model_validator(mode="after")
    def _divides(self) -> Architecture:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of heads ({self.heads}), and heads of kv_heads ({self.kv_heads})")
        if self.initialisation == "mimetic" and (self.kv_heads != self.heads or self.heads < 2):
            raise ValueError(f"initialisation mimetic needs kv_heads ({self.kv_heads}) equal to heads ({self.heads}), at least 2")
        return self


class TokenizerTraining(Section):
    """A byte-level BPE with Qwen's pre-tokenizer, control tokens and chat template, trained on the spot."""

    corpus: str
    """JSONL: every string of every row is text."""
    vocab_size: Positive = 2048


class ModelRecipe(Section):
    """The policy: a Hugging Face directory or hub name, or an architecture with random weights."""

    path: str | None = None
    tokenizer: str | None = None
    """Directory or hub name; by default the model's own."""
    train_tokenizer: TokenizerTraining | None = None
    """Make the tokenizer on the spot instead."""
    architecture: Architecture | None = None
    """With `path`: used by `--smoke` only. Without: the model is made from it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    gradient_checkpointing: bool = False

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
    tokens_per_step: Positive = 1024
    """Padded tokens of a step."""
    pool: Positive = 256
    """Rows bucketed by length at a time."""
    muon_learning_rate: Annotated[float, Field(ge=0)] = 6e-3
    """For hidden matrices (Muon, match_rms_adamw)."""
    adam_learning_rate: Annotated[float, Field(ge=0)] = 3e-3
    """For embeddings, norms and biases (AdamW)."""
    warmup_steps: NonNegative = 30
    decay_share: Share = 0.4
    """Linear decay over this last share."""
    threads: Positive = 2


class TaskSource(Section):
    """A file of tasks, or a class that yields them."""

    path: str | None = None
    """JSONL; with the `data` extra also .parquet, or `hub:ORG/NAME[/CONFIG][:SPLIT]`."""
    factory: str | None = None
    """`module:Class(**options)`, an iterable of `agentrl.types.Task`."""
    options: dict[str, Any] = {}
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


class TasksRecipe(Section):
    """The training tasks."""

    train: Annotated[list[TaskSource], Field(min_length=1)]
    shuffle: bool = True
    """A new seeded shuffle every epoch."""
    over_long: Literal["refuse", "filter"] = "refuse"
    """What to do with a task whose prompt exceeds rollout.limits.prompt_tokens."""


class EnvRecipe(Section):
    """The environment: `factory(**options)` for every episode."""

    factory: str
    """`module:Class`."""
    options: dict[str, Any] = {}


class RetrieverRecipe(Section):
    """A retriever started with the run, or reached: exactly one of url, corpus, index. The environment's options get its `retriever_url`."""

    url: str | None = None
    corpus: str | None = None
    """JSONL of `{id, contents}` or `{id, title, text}`: indexed once per content, kept in `<run.dir>/.cache`."""
    index: str | None = None
    """A directory made by `agentrl retriever build`."""
    topk: Positive = 3

    @model_validator(mode="after")
    def _one_origin(self) -> RetrieverRecipe:
        if sum(x is not None for x in (self.url, self.corpus, self.index)) != 1:
            raise ValueError("a retriever has exactly one of url, corpus and index")
        return self


class EngineRecipe(Section):
    """The engines that generate. This version starts embedded ones only: `kind: sglang` validates, and a run of it ends with exit code 2."""

    kind: Literal["embedded", "sglang"] = "embedded"
    replicas: Positive = 1
    urls: list[str] = []
    """Running servers to attach to. This version refuses them: leave it empty."""
    slots: Positive = 64
    """Sequences generated at a time by an embedded engine."""
    context_tokens: Positive = 4096
    """Longest sequence; at least rollout.limits.context_tokens."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: Positive = 1
    python: str | None = None
    """The Python that has sglang (engine.kind sglang): its own environment."""
    options: dict[str, Any] = {}
    """Further launch flags of SGLang."""


class LimitsRecipe(Section):
    """Token limits. Defaults are Search-R1's (max_start_length, max_response_length, max_obs_length, max_prompt_length)."""

    prompt_tokens: Positive = 2048
    completion_tokens: Positive = 500
    """Per turn."""
    observation_tokens: Positive = 500
    """Per turn; cuts untrusted text only."""
    context_tokens: Positive = 4096
    """Prompt and all turns. The question is never cut off: the episode ends instead."""


class RolloutRecipe(Section):
    """The rollout workers. `top_p` must be 1 and `top_k` -1: a truncated distribution would need a correction that is not there."""

    workers: Positive = 1
    concurrency: Positive = 128
    """Episodes per worker at a time."""
    group_size: Positive = 8
    """n: trajectories per task."""
    max_staleness: NonNegative = 2
    """K: running + buffered + training groups <= (K+1) x groups_per_batch. 0 is the synchronous trainer."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    limits: LimitsRecipe = LimitsRecipe()
    episode_deadline_s: Seconds = 300.0
    request_deadline_s: Seconds = 120.0
    """Total deadline of one generation request, weight updates included."""

    @model_validator(mode="after")
    def _untruncated(self) -> RolloutRecipe:
        if self.top_p != 1.0 or self.top_k != -1:
            raise ValueError(
                "top_p must be 1 and top_k -1 in training: behaviour log-probs are of log_softmax(logits / T), not of the truncated distribution"
            )
        return self


class ReplayRecipe(Section):
    """Training on a group more than once."""

    reuse: Positive = 1
    """In how many batches a group may be trained on."""
    fresh: Share = 1.0
    """At least this share of a batch's groups is new."""
    select: str = "oldest"
    """Which reused groups: oldest, uniform, or `module:function`."""


class BufferRecipe(Section):
    """The replay buffer."""

    acknowledge: Literal["memory", "wal", "fsync"] = "wal"
    """When a record counts as written: in memory, in the file (survives kill -9), or on the disk (survives power loss)."""
    segment_mb: Positive = 64
    max_attempts: Positive = 3
    """Attempts of a sample before its group closes as group_incomplete."""
    max_lost: Positive = 10
    """Lost attempts of a sample (a process of ours died) before it counts as exhausted."""
    partial_groups: bool = False
    """Train groups of at least 2 where a sample exhausted its attempts."""
    max_failed_share: Share = 0.2
    """The run ends when more than this share of the last tickets (at least 100) failed."""
    replay: ReplayRecipe = ReplayRecipe()


class EntropyRecipe(Section):
    """An entropy bonus."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    schedule: Literal["constant", "linear"] = "constant"
    """`linear`: to 0 at the end of the run."""


class LossRecipe(Section):
    """Importance-weighted PPO."""

    form: Literal["two_policy", "decoupled"] = "two_policy"
    """`two_policy`: ratio current/behaviour, clipped. `decoupled`: ratio current/proximal clipped, weight proximal/behaviour truncated."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.2


class ImportanceRecipe(Section):
    """Correction of proximal/behaviour in the decoupled form."""

    truncate: Annotated[float, Field(gt=0)] = 2.0
    """Token weights are cut at this value (truncated importance sampling)."""


class AlgorithmRecipe(Section):
    """What is optimised."""

    advantage: Literal["grpo"] = "grpo"
    normalise_by_std: bool = True
    """Divide by the group's standard deviation (off: Dr. GRPO)."""
    loss: LossRecipe = LossRecipe()
    importance: ImportanceRecipe = ImportanceRecipe()
    aggregation: Literal["token_mean"] = "token_mean"
    entropy: EntropyRecipe = EntropyRecipe()
    max_token_age: NonNegative | None = None
    """Tokens staler than this many steps are masked from the loss (train_mask)."""


class ScheduleRecipe(Section):
    """The learning rate over the run."""

    shape: Literal["constant", "linear", "cosine"] = "constant"
    final_share: Share = 0.0
    """Of the peak, at the end of the run (linear, cosine)."""
    warmup: Annotated[float, Field(ge=0)] = 0.0
    """Linear warm-up: steps where >= 1, share of the run where < 1."""


class LearnerRecipe(Section):
    """The learner: FSDP2 ranks."""

    ranks: Positive = 1
    groups_per_batch: Positive = 32
    """G: groups of one step."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    schedule: ScheduleRecipe = ScheduleRecipe()
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    mini_batches: Positive = 1
    """Optimizer updates per pass over a batch."""
    ppo_epochs: Positive = 1
    """Passes over a batch."""
    tokens_per_micro_batch: Positive = 16384
    """Padded tokens of one forward and backward pass of a rank."""
    max_skipped_batches: Positive = 5
    """Batches in a row without a finite update before the run ends."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: Positive = 1
    collective_deadline_s: Seconds = 120.0


class WeightsRecipe(Section):
    """Publishing weights to the engines: in buckets by a process group (`backend`), or by disk. `pause`: what happens to open requests."""

    publish_every: Positive = 1
    """Steps between versions; the last step always publishes."""
    transport: Literal["group", "disk"] = "group"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    bucket_mb: Positive = 256
    pause: Literal["retract", "abort"] = "retract"
    deadline_s: Seconds = 60.0
    """Per engine and version."""
    keep_snapshots: bool = False
    """Keep every published version as safetensors in the run directory (for exactness checks)."""


class CheckpointRecipe(Section):
    """Checkpoints. The newest `keep` are kept."""

    every: Positive = 50
    """Steps. Checkpoint 0 and the last step's are always written."""
    keep: Positive = 2


class EvalSet(Section):
    """A held-out set."""

    tasks: Annotated[list[TaskSource], Field(min_length=1)]
    n: Positive = 1
    """Trajectories per task."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 is greedy."""


class EvalRecipe(Section):
    """Evaluation on named held-out sets."""

    sets: dict[str, EvalSet] = {}
    every: Positive | None = None
    """Steps between evaluations beside training. `initial` and `final`: whether one runs before it and one after it."""
    initial: bool = True
    final: bool = True
    headline: str | None = None
    """The set whose EM is the run's headline; by default the first."""


class MetricsRecipe(Section):
    """Where metrics go: metrics.jsonl always, the console, and trackers (`sinks`, under the name `project`; each needs its extra)."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    sinks: list[Literal["wandb", "tensorboard", "swanlab"]] = []
    project: str = "agentrl"


class ResourcesRecipe(Section):
    """What the processes are placed on (Ray). CPUs are shares Ray books, not limits."""

    engine_gpus: Annotated[float, Field(ge=0)] = 0
    """Per engine."""
    learner_gpus: Annotated[float, Field(ge=0)] = 0
    """Per rank."""
    engine_cpus: Annotated[float, Field(ge=0)] = 0
    learner_cpus: Annotated[float, Field(ge=0)] = 0
    worker_cpus: Annotated[float, Field(ge=0)] = 0
    placement: Literal["pack", "spread"] = "pack"


class Recipe(Section):
    """One run. `name` names its directory, `seed` decides everything random."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: int = 0
    run: RunRecipe
    prepare: PrepareRecipe | None = None
    model: ModelRecipe
    warm_start: WarmStartRecipe | None = None
    tasks: TasksRecipe
    env: EnvRecipe
    retriever: RetrieverRecipe | None = None
    engine: EngineRecipe = EngineRecipe()
    rollout: RolloutRecipe = RolloutRecipe()
    buffer: BufferRecipe = BufferRecipe()
    learner: LearnerRecipe = LearnerRecipe()
    algorithm: AlgorithmRecipe = AlgorithmRecipe()
    weights: WeightsRecipe = WeightsRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    eval: EvalRecipe = EvalRecipe()
    metrics: MetricsRecipe = MetricsRecipe()
    resources: ResourcesRecipe = ResourcesRecipe()
    smoke: dict[str, Any] = {}
    """Overrides (`a.b: value`) that `--smoke` applies on top of its own."""

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        engine, context = self.engine.context_tokens, self.rollout.limits.context_tokens
        if engine < context:
            raise ValueError(
                f"engine.context_tokens ({engine}) is below rollout.limits.context_tokens ({context}): raise the first or lower the second"
            )
        if self.algorithm.advantage == "grpo" and self.rollout.group_size < 2:
            raise ValueError("algorithm.advantage grpo needs rollout.group_size >= 2: a group of one has no baseline")
        return self

    @model_validator(mode="after")
    def _deterministic(self) -> Recipe:
        if self.run.deterministic and (unmet := unmet_conditions(self.model_dump())):
            raise ValueError(f"run.deterministic needs {', '.join(unmet)}")
        return self
