"""Every metric of a run, as data. `docs/metrics.md` is `render()`; a run that logs a name which is not here fails a test.

A name may hold placeholders in angle brackets, each standing for one part of a name (the last one for all that follows).
verl's names are those of its PPO trainer and its fully asynchronous one; a tilde says that the definition differs, and the definition how.
"""

from __future__ import annotations

from collections.abc import Iterable

from agentrl.metrics.learner_catalogue import CRITIC, LEARNER
from agentrl.metrics.metric import GENERATED, TRAJECTORIES, UPDATES, Metric, metric

__all__ = ["CATALOGUE", "Metric", "render", "unknown"]


def unknown(names: Iterable[str]) -> list[str]:
    """Those of `names` that the catalogue does not define, sorted."""
    exact = {metric.name for metric in CATALOGUE}
    patterns = [metric for metric in CATALOGUE if "<" in metric.name]
    return sorted(name for name in set(names) - exact if not any(metric.matches(name) for metric in patterns))


def render() -> str:
    """docs/metrics.md."""
    rows = [
        f"| `{m.name}` | {m.definition} | {m.unit} | {m.denominator or '-'} | {', '.join(f'`{v}`' for v in m.verl.split()) or '-'} |"
        for m in CATALOGUE
    ]
    return "\n".join([_PREFACE, "| name | definition | unit | mean or share over | verl |", "|---|---|---|---|---|", *rows, ""])


_PREFACE = """# Metrics

Every number a run logs. `metrics.jsonl` holds a line `{"step", "time", "metrics"}` per step; a value that is not finite is null there and named
under `nonfinite`. Means and shares of a training step are over the whole batch, all ranks and micro-batches together. `<...>` stands for a
name of the run's own. "Generated" tokens are those with `loss_mask` 1, "trained" ones those with `train_mask` 1, "info" tokens are observations;
trajectories "with a gradient" are those whose advantage is not 0, and all of them while there is an entropy bonus. A tilde before verl's name
says that verl defines it otherwise. This table is made from `agentrl/metrics/catalogue.py`; a test compares them.
"""


_RUN = (
    metric("run/step", "trained batches so far; goes back with a rollback", "steps", "", "training/global_step"),
    metric("run/elapsed_s", "wall time of the run, summed over resumes", "s"),
    metric("weights/version", "newest version that every live engine reports", "version", "", "fully_async/current_param_version"),
    metric("weights/bytes", "size of that version's weights as sent to one engine", "bytes"),
    metric("weights/pause_s", "rest of generation for it, of the engine that rested longest; computing keys and values anew comes after", "s"),
    metric("weights/broadcast_s", "... of publishing it: from the first bucket to the last, of the slowest group", "s"),
    metric("weights/gather_s", "copying it out of the ranks, bucket by bucket", "s"),
    metric("canary/gap_max", "largest gap of log-probs between learner and engines on fixed tokens; told with the step after a check", "nats"),
    metric("canary/gap_mean", "the same, the mean of the engine that is furthest off", "nats", "tokens of the canary"),
)

_BATCH = (
    metric("batch/groups", "groups in the batch", "groups"),
    metric("batch/trajectories", "trajectories in the batch", "trajectories"),
    metric("batch/reward_mean", "mean of the episodes' total rewards", "reward", TRAJECTORIES, "critic/score/mean"),
    metric("batch/reward_std", "their standard deviation (of the population)", "reward", TRAJECTORIES),
    metric("batch/reward_min", "the smallest total reward", "reward", "", "critic/score/min"),
    metric("batch/reward_max", "the largest total reward", "reward", "", "critic/score/max"),
    metric(
        "batch/reward/<part>", "mean of one named part of the reward, or measure beside it; an episode without it counts 0", "reward", TRAJECTORIES
    ),
    metric("batch/groups_all_right", "groups in which every episode's total reward exceeds 0.5", "share", "groups"),
    metric("batch/groups_mixed", "groups with right and wrong episodes", "share", "groups"),
    metric("batch/groups_all_wrong", "groups in which no episode's total reward exceeds 0.5", "share", "groups"),
    metric("batch/prompt_tokens", "tokens before the first completion", "tokens", TRAJECTORIES, "prompt_length/mean"),
    metric("batch/response_tokens", "generated tokens (verl's length counts observations too)", "tokens", TRAJECTORIES, "~response_length/mean"),
    metric("batch/info_tokens", "tokens of observations", "tokens", TRAJECTORIES),
    metric("batch/turns", "completions per episode (verl counts messages of both sides)", "turns", TRAJECTORIES, "~num_turns/mean"),
    metric("batch/searches", "turns whose action is `search`", "turns", TRAJECTORIES),
    metric("batch/valid_action_share", "turns whose action is not `invalid`", "share", "turns the environment named an action for"),
    metric("batch/stop/<reason>", "episodes that ended for this reason", "share", TRAJECTORIES),
    metric("batch/episode_s", "wall time from dispatch to the end of an episode", "s", TRAJECTORIES, "~fully_async/processing_time/avg"),
    metric("batch/staleness_mean", "staleness of generated tokens: step minus the step their version was made at", "steps", GENERATED),
    metric("batch/staleness_max", "staleness of the stalest generated token", "steps", "", "~fully_async/max_version_gap"),
    metric("batch/staleness/<n>", "generated tokens of staleness n", "share", GENERATED),
    metric("batch/versions_mean", "different versions that wrote a trajectory", "versions", "trajectories with generated tokens"),
    metric(
        "batch/multi_version_share",
        "trajectories written by two or more versions",
        "share",
        "trajectories with generated tokens",
        "fully_async/partial/partial_ratio",
    ),
)

_PACE = (
    metric("engine/current", "engines that have the newest version: episodes sit at these", "engines"),
    metric("engine/deaths", "engines that died, or stopped answering where the run is attached to them, since it was started or resumed", "engines"),
    metric("engine/tokens_per_s", "tokens generated by all engines per second of wall time", "tokens/s", "", "~perf/throughput"),
    metric("learner/tokens_per_s", "generated tokens trained on per second of the training step", "tokens/s", "", "~perf/throughput"),
    metric(
        "idle/engine",
        "time in which an engine had nothing to generate or was paused",
        "share",
        "wall time x engines",
        "fully_async/rollouter/idle_ratio",
    ),
    metric("idle/learner", "time in which the learner waited for a batch", "share", "wall time", "fully_async/trainer/idle_ratio"),
    metric("seconds/step", "one training step, from the batch to its last update", "s", "", "~timing_s/step"),
    metric("seconds/prepare", "... of it: packing, advantages, proximal log-probs", "s", "", "~timing_s/old_log_prob timing_s/adv"),
    metric("seconds/update", "... of it: forward, backward and optimizer of one update", "s", UPDATES, "timing_s/update_actor"),
    metric("seconds/wait_batch", "waiting for the batch before the step", "s", "", "~timing_s/gen"),
    metric("seconds/asleep", "engines that share the learner's GPUs slept for it (resources.colocate)", "s"),
    metric("seconds/fall_asleep", "waiting before it: until the last version was out and they slept", "s"),
    metric("seconds/publish", "bringing a version to the engines, beside training", "s", "", "timing_s/update_weights"),
    metric("seconds/checkpoint", "writing a checkpoint", "s", "", "timing_s/save_checkpoint"),
    metric("buffer/running", "groups with episodes still running", "groups"),
    metric("buffer/buffered", "complete groups that wait for a batch", "groups"),
    metric("buffer/training", "groups in a batch whose version is not yet published", "groups"),
    metric("buffer/completed", "groups that were complete since the start of the run", "groups"),
    metric("buffer/filtered", "groups dropped when they were complete, by the filter or because stops left too few trajectories", "groups"),
    metric("drops/<cause>", "samples dropped for this cause since the start of the run", "samples", "", "~fully_async/count/dropped_stale_samples"),
    metric("memory_mb/<process>", "resident memory of a process", "MB", "", "~perf/cpu_memory_used_gb"),
)

_EVALUATION = (
    metric(
        "eval/<set>/em",
        "exact match: the reward part or measure `exact_match`, or the total reward where there is neither",
        "share",
        "scored trajectories",
        "val-core/<source>/acc/mean@n",
    ),
    metric("eval/<set>/em_low", "lower end of its 95 % interval (bootstrap over prompts)", "share", "prompts"),
    metric("eval/<set>/em_high", "upper end", "share", "prompts"),
    metric(
        "eval/<set>/em/<source>", "exact match of one source's tasks", "share", "scored trajectories of the source", "val-core/<source>/acc/mean@n"
    ),
    metric("eval/<set>/reward", "total reward", "reward", "scored trajectories", "val-core/<source>/reward/mean@n"),
    metric("eval/<set>/tokens", "generated tokens", "tokens", "scored trajectories"),
    metric("eval/<set>/turns", "completions per episode", "turns", "scored trajectories", "~val-aux/num_turns/mean"),
    metric("eval/<set>/searches", "turns whose action is `search`", "turns", "scored trajectories"),
    metric("eval/<set>/stop/<reason>", "episodes that ended for this reason", "share", "scored trajectories"),
    metric("eval/<set>/trajectories", "scored trajectories", "trajectories"),
    metric("eval/<set>/failures", "samples without a score because the infrastructure failed", "samples"),
    metric("eval/<set>/version_low", "lowest version that generated", "version"),
    metric("eval/<set>/version_high", "highest version that generated: the same as the lowest in the first and the last evaluation", "version"),
)

_HEALTH = (metric("alarm/<name>", "1 in a step that raises this alarm of the recipe's `health.alarms`; else it is not there", "-"),)

CATALOGUE: tuple[Metric, ...] = (*_RUN, *_BATCH, *LEARNER, *CRITIC, *_PACE, *_HEALTH, *_EVALUATION)
