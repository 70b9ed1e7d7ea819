"""A recipe's essentials as lines to read before a run: what a step is made of, how long, how stale, which processes, what is missing."""

from __future__ import annotations

import math
from fractions import Fraction

from agentrl.config.cautions import cautions
from agentrl.config.paths import missing_files
from agentrl.config.recipe import Recipe, RetrieverRecipe, TaskSource
from agentrl.config.tasks import HASHED

__all__ = ["essentials"]

PROXIMAL = {
    "behaviour": "the behaviour policy",
    "recompute": "the policy at the start of the step",
    "interpolate": "a policy between the behaviour and the current one",
}


def essentials(recipe: Recipe) -> list[tuple[str, str]]:
    """(what, said in words), in reading order."""
    rows = [
        ("run", f"{recipe.run.dir}/{recipe.name}, seed {recipe.seed}, processes by {recipe.run.launcher}"),
        ("model", _model(recipe)),
        ("tasks", ", ".join(map(_source, recipe.tasks.train))),
        ("environment", recipe.env.factory),
        ("step", _step(recipe)),
        ("algorithm", _algorithm(recipe)),
        ("end", _end(recipe)),
        ("staleness", _staleness(recipe)),
        ("processes", _processes(recipe)),
        ("evaluation", _evaluation(recipe)),
    ]
    return rows + [("caution", line) for line in cautions(recipe)] + [("missing", line) for line in missing_files(recipe)]


def _model(recipe: Recipe) -> str:
    model = recipe.model
    lora = f", LoRA of rank {model.lora.rank}" if model.lora else ""
    warm = f"{lora}, warm start of {recipe.warm_start.steps:,} steps" if recipe.warm_start else lora
    if model.path is not None or model.architecture is None:
        return f"{model.path}{warm}"
    shape = model.architecture
    return f"{shape.family} made on the spot: {shape.layers} layers, hidden size {shape.hidden_size}{warm}"


def _source(source: TaskSource) -> str:
    limit = f" (at most {source.limit:,})" if source.limit else ""
    return f"{source.path or source.factory}{limit}"


def _step(recipe: Recipe) -> str:
    groups, size, learner = recipe.learner.groups_per_batch, recipe.rollout.group_size, recipe.learner
    updates = learner.mini_batches * learner.ppo_epochs
    return f"{groups} groups x {size} = {groups * size:,} trajectories, {updates} optimizer update{'s' if updates > 1 else ''}"


def _algorithm(recipe: Recipe) -> str:
    algorithm, kl = recipe.algorithm, recipe.algorithm.kl
    parts = [f"{algorithm.advantage.estimator} advantages", f"{algorithm.loss.name} loss against {PROXIMAL[algorithm.proximal]}"]
    parts += [f"rejection by {rule.statistic}" for rule in algorithm.rejection]
    if recipe.critic is not None:
        parts.append("a critic" + (f" alone for {recipe.critic.warmup_steps:,} steps" if recipe.critic.warmup_steps else ""))
    if kl.where != "none":
        parts.append(f"KL ({kl.estimate} x {kl.coefficient:g}) in the {kl.where}")
    return ", ".join(parts)


def _end(recipe: Recipe) -> str:
    run = recipe.run
    if run.hours is not None:
        return f"after {run.hours:g} hours"
    if run.steps is None:
        return f"after {run.epochs:g} epochs; the number of steps is fixed when the tasks are read"
    return f"after {run.steps:,} steps = {run.steps * recipe.learner.groups_per_batch * recipe.rollout.group_size:,} trajectories"


def _staleness(recipe: Recipe) -> str:
    behind, publish_every, groups = recipe.rollout.max_staleness, recipe.weights.publish_every, recipe.learner.groups_per_batch
    replay, over_sample = recipe.buffer.replay, recipe.buffer.over_sample
    if behind == 0 and publish_every == 1 and replay.fresh == 1.0 and over_sample == 0.0:
        return "K = 0: synchronous"
    alive = math.ceil((1 + Fraction(str(over_sample))) * (behind + 1) * groups)
    fresh = math.ceil(replay.fresh * groups)
    longer = min(replay.reuse, groups / fresh) if fresh else replay.reuse  # fewer groups leave per step: docs/staleness.md
    bound = alive / groups * longer - 1 + (publish_every - 1) / 2
    reused = ", when they are first trained on" if replay.reuse > 1 else ""
    return f"K = {behind}: at most {alive:,} groups alive, first tokens on average at most {bound:g} steps old{reused}"


def _processes(recipe: Recipe) -> str:
    engine, placed = recipe.engine, recipe.resources
    counts = [
        f"{recipe.learner.ranks} x learner ({recipe.learner.device}{_gpus(placed.learner_gpus)})",
        f"{len(engine.urls) or engine.replicas} x engine ({engine.kind}, {'attached' if engine.urls else engine.device}{_gpus(placed.engine_gpus)})",
        f"{recipe.rollout.workers} x worker ({recipe.rollout.concurrency} episodes at a time)",
        "1 x buffer",
    ]
    if recipe.retriever is not None:
        counts.append(_retriever(recipe.retriever, placed.retriever_gpus))
    return ", ".join(counts)


def _retriever(retriever: RetrieverRecipe, gpus: float) -> str:
    """Nothing but the number where it is the simplest one."""
    if retriever.url is not None:
        return f"retriever at {retriever.url}"
    on_gpu = f"cuda{_gpus(gpus)}" if retriever.device == "cuda" else ""
    how = [on_gpu, retriever.encoder if retriever.encoder != HASHED else "", retriever.mode or ""]
    told = ", ".join(filter(None, how))
    return f"1 x retriever ({told})" if told else "1 x retriever"


def _gpus(share: float) -> str:
    return f", {share:g} GPU" if share else ""


def _evaluation(recipe: Recipe) -> str:
    if not recipe.eval.sets:
        return "none"
    every = f"every {recipe.eval.every} steps" if (recipe.eval.every or 0) > 1 else "every step" if recipe.eval.every else ""
    when = ", ".join(filter(None, ["before" if recipe.eval.initial else "", every, "at the end" if recipe.eval.final else ""]))
    return f"{', '.join(recipe.eval.sets)}: {when}"
