"""`agentrl selftest`: a run of a recipe at learning rate 0, a few steps long, and what it says about engines, learner, tokenizer and template.

It is a run like any other, in `<run.dir>/<name>-selftest`: the same processes, placement, transfer and models. Nothing is learned in it, so every
version has the same weights, and whatever differs is a mistake.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.config.canary import CanaryRecipe
from agentrl.config.recipe import Recipe
from agentrl.errors import AgentRLError
from agentrl.system.check import Check, canary, log_probs, nothing_changes, verdict
from agentrl.system.probe import Probe
from agentrl.system.run import run

__all__ = ["selftest", "selftest_recipe"]

_STEPS = 3
_GROUPS = 2
# Too small to matter, but an entropy bonus has a gradient at every token: without one, groups whose rewards are all equal are not computed.
_ENTROPY = 1e-6


def selftest(recipe: Recipe, *, command: list[str], smoke: bool) -> int:
    """Run the self-test and print a line per check. Returns the exit code: 1 where one failed.

    Raises:
        ConfigError: the recipe asks for what this version cannot do.
        AgentRLError: the run failed by something else than what is tested.
    """
    tested = selftest_recipe(recipe)
    assert tested.canary is not None
    bounds, directory = tested.canary.bounds(tested.model.dtype, tested.weights.dtype), Path(tested.run.dir).resolve() / tested.name
    probe, code = Probe(), 0
    try:
        code = run(tested, command=command, smoke=smoke, fresh=True, beside=probe)
    except AgentRLError:
        if verdict(directory) is None:
            raise
    if code:
        return code  # stopped by a signal
    asked = [probe.checks.get(name, _unasked(name)) for name in ("tokenizer", "vocabulary", "template")]
    checks = [log_probs(directory, bounds), *asked, nothing_changes(directory), canary(directory)]
    for check in checks:
        print(check)
    failed = sum(not check.passed for check in checks)
    print(f"{len(checks) - failed} of {len(checks)} checks passed; the run they are about: {directory}")
    return int(failed > 0)


def selftest_recipe(recipe: Recipe) -> Recipe:
    """The recipe at learning rate 0: a few small steps, every version checked, nothing filtered, no evaluation, no alarm that acts."""
    plain = recipe.model_dump(mode="json")
    plain["name"] = f"{recipe.name}-selftest"
    plain["run"] |= {"steps": _STEPS, "epochs": None, "hours": None}
    groups = min(recipe.learner.groups_per_batch, max(_GROUPS, recipe.learner.ranks))
    plain["learner"] |= {"learning_rate": 0.0, "weight_decay": 0.0, "mini_batches": 1, "ppo_epochs": 1, "groups_per_batch": groups}
    if recipe.critic is not None:
        plain["critic"] |= {"learning_rate": 0.0, "weight_decay": 0.0, "warmup_steps": 0, "mini_batches": None, "ppo_epochs": None}
    if recipe.model.lora is not None:
        plain["model"]["lora"]["dropout"] = 0.0
    plain["algorithm"] |= {"entropy": {"coefficient": _ENTROPY}, "max_token_age": None}
    plain["buffer"] = {"acknowledge": recipe.buffer.acknowledge}
    plain["weights"] |= {"publish_every": 1, "keep_snapshots": False}
    plain["eval"] |= {"initial": False, "final": False, "every": None}
    plain["checkpoint"]["every"] = _STEPS
    plain["metrics"]["sinks"] = []
    plain["health"] = {}
    plain["canary"] = (recipe.canary or CanaryRecipe()).model_dump() | {"every": 1, "checksums": True}
    return Recipe.model_validate(plain)


def _unasked(name: str) -> Check:
    return Check(name=name, passed=False, told="the run ended before it could be asked", remedy="See the other lines")
