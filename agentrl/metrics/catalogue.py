"""Every metric of a run, as data. `docs/metrics.md` is `render()`; a run that logs a name which is not here fails a test.

A name may hold placeholders in angle brackets, each standing for one part of a name (the last one for all that follows).
verl's names are those of its PPO trainer and its fully asynchronous one; a tilde says that the definition differs, and the definition how.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["CATALOGUE", "Metric", "render", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """What a number means."""

    name: str
    definition: str
    unit: str
    denominator: str = ""  # what a mean or a share is taken over; empty for counts, extremes and readings
    verl: str = ""  # verl's name, "~" before one that is defined otherwise

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric."""
        head, *rest = re.split(r"<[^>]+>", self.name)
        if not rest:
            return name == head
        pattern = re.escape(head) + "".join(r"[^/]+" + re.escape(part) for part in rest[:-1]) + ".+" + re.escape(rest[-1])
        return re.fullmatch(pattern, name) is not None


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


def _m(name: str, definition: str, unit: str, denominator: str = "", verl: str = "") -> Metric:
    return Metric(name=name, definition=definition, unit=unit, denominator=denominator, verl=verl)


_GENERATED = "generated tokens"
_TRAJECTORIES = "trajectories"
_COMPUTED = "trained tokens with a gradient, of the first update"
_TRAINED = "trained tokens with a gradient"
_UPDATES = "updates of the step"

_RUN = (
    _m("run/step", "trained batches so far; goes back with a rollback", "steps", "", "training/global_step"),
    _m("run/elapsed_s", "wall time of the run, summed over resumes", "s"),
    _m("weights/version", "newest version that every live engine reports", "version", "", "fully_async/current_param_version"),
    _m("weights/bytes", "size of that version's weights as sent to one engine", "bytes"),
)

_BATCH = (
    _m("batch/groups", "groups in the batch", "groups"),
    _m("batch/trajectories", "trajectories in the batch", "trajectories"),
    _m("batch/reward_mean", "mean of the episodes' total rewards", "reward", _TRAJECTORIES, "critic/score/mean"),
    _m("batch/reward_std", "their standard deviation (of the population)", "reward", _TRAJECTORIES),
    _m("batch/reward_min", "the smallest total reward", "reward", "", "critic/score/min"),
    _m("batch/reward_max", "the largest total reward", "reward", "", "critic/score/max"),
    _m("batch/reward/<part>", "mean of one named part of the reward; an episode without that part counts 0", "reward", _TRAJECTORIES),
    _m("batch/groups_all_right", "groups in which every episode's total reward exceeds 0.5", "share", "groups"),
    _m("batch/groups_mixed", "groups with right and wrong episodes", "share", "groups"),
    _m("batch/groups_all_wrong", "groups in which no episode's total reward exceeds 0.5", "share", "groups"),
    _m("batch/prompt_tokens", "tokens before the first completion", "tokens", _TRAJECTORIES, "prompt_length/mean"),
    _m("batch/response_tokens", "generated tokens (verl's length counts observations too)", "tokens", _TRAJECTORIES, "~response_length/mean"),
    _m("batch/info_tokens", "tokens of observations", "tokens", _TRAJECTORIES),
    _m("batch/turns", "completions per episode (verl counts messages of both sides)", "turns", _TRAJECTORIES, "~num_turns/mean"),
    _m("batch/searches", "turns whose action is `search`", "turns", _TRAJECTORIES),
    _m("batch/valid_action_share", "turns whose action is not `invalid`", "share", "turns the environment named an action for"),
    _m("batch/stop/<reason>", "episodes that ended for this reason", "share", _TRAJECTORIES),
    _m("batch/episode_s", "wall time from dispatch to the end of an episode", "s", _TRAJECTORIES, "~fully_async/processing_time/avg"),
    _m("batch/staleness_mean", "staleness of generated tokens: step minus the step their version was made at", "steps", _GENERATED),
    _m("batch/staleness_max", "staleness of the stalest generated token", "steps", "", "~fully_async/max_version_gap"),
    _m("batch/staleness/<n>", "generated tokens of staleness n", "share", _GENERATED),
    _m("batch/versions_mean", "different versions that wrote a trajectory", "versions", "trajectories with generated tokens"),
    _m(
        "batch/multi_version_share",
        "trajectories written by two or more versions",
        "share",
        "trajectories with generated tokens",
        "fully_async/partial/partial_ratio",
    ),
)

_LEARNER = (
    _m("learner/loss", "what is minimised: policy loss minus the entropy bonus", "loss", _GENERATED, "actor/loss"),
    _m("learner/policy_loss", "clipped and importance-weighted policy loss", "loss", _GENERATED, "actor/pg_loss"),
    _m("learner/entropy", "entropy of the policy at temperature T", "nats", "generated tokens of trajectories with a gradient", "actor/entropy"),
    _m("learner/entropy_coefficient", "weight of the entropy bonus in this step", "-"),
    _m("learner/grad_norm", "norm of the gradient before clipping", "norm", _UPDATES, "actor/grad_norm"),
    _m("learner/learning_rate", "learning rate of the step", "-", "", "actor/lr"),
    _m("learner/advantage_mean", "mean advantage", "-", _GENERATED, "critic/advantages/mean"),
    _m("learner/advantage_std", "its standard deviation", "-", _GENERATED),
    _m("learner/ratio_mean", "importance ratio p/b, learner over behaviour, before the first update", "ratio", _COMPUTED),
    _m("learner/ratio_min", "the smallest of these ratios", "ratio"),
    _m("learner/ratio_max", "the largest of these ratios", "ratio"),
    _m("learner/clip_low_share", "tokens whose loss is held by the lower clip bound", "share", _TRAINED, "~actor/pg_clipfrac"),
    _m("learner/clip_high_share", "tokens whose loss is held by the upper clip bound", "share", _TRAINED, "~actor/pg_clipfrac"),
    _m("learner/kl_k1", "behaviour to learner before the first update: mean of log b - log p", "nats", _COMPUTED, "rollout_corr/kl"),
    _m("learner/kl_k3", "the same by k3, p/b - 1 - log(p/b): never negative", "nats", _COMPUTED, "rollout_corr/k3_kl"),
    _m(
        "learner/ess",
        "effective sample size of the weights p/b, (sum w)^2 / (n sum w^2): 1 where both agree",
        "share",
        _COMPUTED,
        "rollout_corr/rollout_is_eff_sample_size",
    ),
    _m(
        "learner/importance_mean",
        "importance weight proximal/behaviour after truncation (decoupled)",
        "ratio",
        _TRAINED,
        "rollout_corr/rollout_is_mean",
    ),
    _m(
        "learner/importance_truncated_share",
        "tokens whose weight was truncated (decoupled)",
        "share",
        _TRAINED,
        "rollout_corr/rollout_is_ratio_fraction_high",
    ),
    _m("learner/train_mask_share", "tokens that correction by age or rejection left to train on", "share", _GENERATED),
    _m("learner/updates_done", "optimizer updates made", "updates"),
    _m("learner/updates_skipped", "updates skipped because loss or gradient was not finite", "updates"),
    _m("learner/tokens", "generated tokens trained on", "tokens", "", "~perf/total_num_tokens"),
)

_PACE = (
    _m("engine/tokens_per_s", "tokens generated by all engines per second of wall time", "tokens/s", "", "~perf/throughput"),
    _m("learner/tokens_per_s", "generated tokens trained on per second of the training step", "tokens/s", "", "~perf/throughput"),
    _m(
        "idle/engine",
        "time in which an engine had nothing to generate or was paused",
        "share",
        "wall time x engines",
        "fully_async/rollouter/idle_ratio",
    ),
    _m("idle/learner", "time in which the learner waited for a batch", "share", "wall time", "fully_async/trainer/idle_ratio"),
    _m("seconds/step", "one training step, from the batch to its last update", "s", "", "~timing_s/step"),
    _m("seconds/prepare", "... of it: packing, advantages, proximal log-probs", "s", "", "~timing_s/old_log_prob timing_s/adv"),
    _m("seconds/update", "... of it: forward, backward and optimizer of one update", "s", _UPDATES, "timing_s/update_actor"),
    _m("seconds/wait_batch", "waiting for the batch before the step", "s", "", "~timing_s/gen"),
    _m("seconds/publish", "bringing a version to the engines, beside training", "s", "", "timing_s/update_weights"),
    _m("seconds/checkpoint", "writing a checkpoint", "s", "", "timing_s/save_checkpoint"),
    _m("buffer/running", "groups with episodes still running", "groups"),
    _m("buffer/buffered", "complete groups that wait for a batch", "groups"),
    _m("buffer/training", "groups in a batch whose version is not yet published", "groups"),
    _m("drops/<cause>", "samples dropped for this cause since the start of the run", "samples", "", "~fully_async/count/dropped_stale_samples"),
    _m("memory_mb/<process>", "resident memory of a process", "MB", "", "~perf/cpu_memory_used_gb"),
)

_EVALUATION = (
    _m(
        "eval/<set>/em",
        "exact match: the reward part `exact_match`, or the total reward",
        "share",
        "scored trajectories",
        "val-core/<source>/acc/mean@n",
    ),
    _m("eval/<set>/em_low", "lower end of its 95 % interval (bootstrap over prompts)", "share", "prompts"),
    _m("eval/<set>/em_high", "upper end", "share", "prompts"),
    _m("eval/<set>/em/<source>", "exact match of one source's tasks", "share", "scored trajectories of the source", "val-core/<source>/acc/mean@n"),
    _m("eval/<set>/reward", "total reward", "reward", "scored trajectories", "val-core/<source>/reward/mean@n"),
    _m("eval/<set>/tokens", "generated tokens", "tokens", "scored trajectories"),
    _m("eval/<set>/turns", "completions per episode", "turns", "scored trajectories", "~val-aux/num_turns/mean"),
    _m("eval/<set>/searches", "turns whose action is `search`", "turns", "scored trajectories"),
    _m("eval/<set>/stop/<reason>", "episodes that ended for this reason", "share", "scored trajectories"),
    _m("eval/<set>/trajectories", "scored trajectories", "trajectories"),
    _m("eval/<set>/failures", "samples without a score because the infrastructure failed", "samples"),
    _m("eval/<set>/version_low", "lowest version that generated", "version"),
    _m("eval/<set>/version_high", "highest version that generated: the same as the lowest in the first and the last evaluation", "version"),
)

CATALOGUE: tuple[Metric, ...] = (*_RUN, *_BATCH, *_LEARNER, *_PACE, *_EVALUATION)
