"""Learning from old weights: what a correction is worth, at an equal budget of time.

    python benchmarks/offpolicy.py --out runs/offpolicy.jsonl --plot docs/offpolicy.png [--workers 2] [--only "two_policy age=4" ...] [--full]

Each run is one process with one thread and a budget of 75 seconds of its CPU time, in which it generates and learns in turn; the evaluations
(500 held-out questions, greedy) and the start are not counted. Batch s is sampled from the weights that are `age` steps old, that is those
before step s - age (the first ones from the initial weights); a step is one batch, of one update or of four. With `reuse` n every
group is in n batches, and 1/n of each batch is new. All runs start from one warm start, that of recipes/quickstart.yaml with seed 0; their seed
chooses questions and tokens.

The learner is the product's own (`agentrl.learner.train_step`), as is the engine; only the machinery between them is left out, because it
does not keep an age exactly. All settings are the recipe's but for those below: 24 questions x 16 episodes a batch, learning rate 2e-3 with
a linear decay to a tenth over the budget, betas .9 and .98, gradients clipped at 1, token mean, entropy bonus .01 with a linear decay to 0, no KL.
A step of four mini-batches has half the learning rate (with a batch a quarter the size, the square-root rule for Adam: Malladi et al. 2022).

    none            -A log pi: no ratio, no bound
    two_policy      PPO, clip .2, on current / behaviour
    two_policy_4    the same, 4 mini-batches
    decoupled_tis   PPO on current / proximal, weights proximal / behaviour truncated at 2, 4 mini-batches
    icepop          PPO on current / proximal, weights outside [.5, 5] set to 0, 4 mini-batches
    geometric       two_policy, and trajectories whose geometric mean of current / behaviour is outside [.8, 1.25] left out
    mask=off        two_policy with the loss on retrieved tokens as well, counted in the denominators too

A finished run is a line of --out and is not run again. The table says the mean final EM over seeds, each seed's, and the mean over the whole
budget, which a run that learns fast and stays there has high.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import cycle, islice, pairwise, product
from pathlib import Path
from typing import Any

from real_command import ROOT, hardware

sys.path.insert(0, str(ROOT / "examples"))

import torch
from one_file_loop import RECIPE, Player, exact_match, prepared
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.algorithm.loss_inputs import LossInputs
from agentrl.config.load import load_recipe
from agentrl.config.recipe import Recipe
from agentrl.data.sources import TaskList, load_tasks
from agentrl.learner.batch import TrainingBatch
from agentrl.learner.optimizer import make_optimizer
from agentrl.learner.policy import PolicyModel
from agentrl.learner.ranks import Ranks
from agentrl.learner.state import LearnerState
from agentrl.learner.train_step import train_step
from agentrl.record import Recorder
from agentrl.seeds import mix
from agentrl.system.prepare import with_prepared
from agentrl.types import Trajectory

WORLD = 0  # seed of the warm start and of the world, the same for all runs
EVALUATIONS = 6  # of a run, after the one before it begins
COLOURS = ("#5d6778", "#2563eb", "#06b6d4", "#d9480f", "#e0a100", "#9333ea", "#0d9468")
PANELS_A_ROW = 3

FOUR = ("learner.mini_batches=4", "learner.learning_rate=1e-3")
METHODS: Mapping[str, tuple[str, ...]] = {
    "none": ("algorithm.loss={name: 'offpolicy:uncorrected', clip_low: null, clip_high: null}",),
    "two_policy": (),
    "two_policy_4": FOUR,
    "decoupled_tis": ("algorithm.proximal=recompute", "algorithm.importance.truncate=2", *FOUR),
    "icepop": ("algorithm.proximal=recompute", "algorithm.importance={truncate: null, bounds: [0.5, 5.0]}", *FOUR),
    "geometric": ("algorithm.rejection=[{statistic: seq_mean_k1, low: 0.8, high: 1.25}]",),
}
REUSED = ("none", "two_policy", "decoupled_tis")  # the methods that also run with reuse
KEPT_METRICS = ("kl_k3", "ess", "entropy", "rejected_share", "clip_low_share", "clip_high_share", "importance_truncated_share")


def uncorrected(inputs: LossInputs) -> Tensor:
    """REINFORCE that takes its samples for its own."""
    return -inputs.advantages_BT * inputs.logp_BT


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Setting:
    """One run."""

    method: str
    age: int  # steps
    reuse: int
    mask: bool
    seed: int

    @property
    def name(self) -> str:
        """E.g. `two_policy age=4 reuse=1 mask=on seed=0`."""
        return f"{self.method} age={self.age} reuse={self.reuse} mask={'on' if self.mask else 'off'} seed={self.seed}"

    def recipe(self, prepared_dir: Path) -> Recipe:
        """The quick start with this run's overrides."""
        unmasked = () if self.mask else ("algorithm.train_on_observations=true",)
        overrides = (f"seed={self.seed}", "learner.tokens_per_micro_batch=4096", *METHODS[self.method], *unmasked)
        return with_prepared(load_recipe([RECIPE], overrides), prepared_dir)


def grid(*, full: bool) -> list[Setting]:
    """All runs: corrections by age, reuse, and the loss mask."""
    ages, reuses, unmasked, seeds = ((0, 1, 2, 4, 8, 16, 32), (2, 4, 8), (0, 4, 16), range(5)) if full else ((0, 4, 16), (4,), (0, 4), range(2))
    core = {Setting(method=method, age=age, reuse=1, mask=True, seed=seed) for method, age, seed in product(METHODS, ages, seeds)}
    core |= {Setting(method=method, age=0, reuse=reuse, mask=True, seed=seed) for method, reuse, seed in product(REUSED, reuses, seeds)}
    core |= {Setting(method="two_policy", age=age, reuse=1, mask=False, seed=seed) for age, seed in product(unmasked, seeds)}
    order = list(METHODS)
    return sorted(core, key=lambda one: (one.seed, one.reuse, not one.mask, one.age, order.index(one.method)))


def main() -> int:
    """Run what is missing, then print the tables and draw the plot."""
    options = parse()
    wanted = [one for one in grid(full=options.full) if chosen(one, options.only)]
    finished = read(options.out, options.seconds)
    missing = [one for one in wanted if one not in finished]
    print(f"{len(wanted)} runs of {options.seconds:g} s, {len(wanted) - len(missing)} of them found in {options.out}", flush=True)
    if missing:
        recipe, model_dir = prepared(WORLD, [f"run.dir={options.out.resolve().parent}"])
        assert recipe.retriever is not None
        prepared_dir = Path(recipe.retriever.corpus or "").parent
        for number, (setting, found) in enumerate(run_all(missing, options, prepared_dir, model_dir), start=1):
            finished[setting] = found
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(setting) | found) + "\n")
            ems = " ".join(f"{point['em']:.3f}" for point in found["curve"])
            print(f"{number:3}/{len(missing)}  {setting.name:52} {found['steps']:4} steps, {found['wall_s']:4.0f} s   EM {ems}", flush=True)
    print_tables({one: finished[one] for one in wanted}, options)
    if options.plot is not None:
        plot({one: finished[one] for one in wanted}, options.plot)
    return 0


def run_all(
    settings: Sequence[Setting], options: argparse.Namespace, prepared_dir: Path, model_dir: Path
) -> Iterator[tuple[Setting, dict[str, Any]]]:
    """Runs as they finish, so many at a time, each worker on a core of its own."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    cores = context.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[-options.workers :]:
        cores.put(core)
    with ProcessPoolExecutor(options.workers, mp_context=context, initializer=settle, initargs=(cores,)) as pool:
        running = {pool.submit(learn, one, options.seconds, prepared_dir, model_dir): one for one in settings}
        for future in as_completed(running):
            yield running[future], future.result()


def settle(cores: Any) -> None:
    """Take a core, if there is one for every worker."""
    torch.set_num_threads(1)
    if not cores.empty():
        os.sched_setaffinity(0, {cores.get()})


def learn(setting: Setting, seconds: float, prepared_dir: Path, model_dir: Path) -> dict[str, Any]:
    """One run: its learning curve and what it did with its time."""
    began_s, recipe = time.monotonic(), setting.recipe(prepared_dir)
    train, heldout = (load_tasks(source, seed=WORLD) for source in (recipe.tasks.train, recipe.eval.sets["heldout"].tasks))
    player, state, groups = Player(model_dir, recipe), fresh_state(recipe, model_dir), Groups(train, recipe, setting)
    weights = deque([whole_weights(state.policy)], maxlen=setting.age + 1)  # of the last versions, the newest last
    curve: list[dict[str, float]] = []
    used_s = generated_s = 0.0
    step = updates = 0
    with Recorder() as recorder:
        while True:
            if used_s >= len(curve) * seconds / EVALUATIONS:
                player.load(weights[-1], version=step)
                curve.append({"seconds": used_s, "steps": step, "em": exact_match(player, heldout)})
            if used_s >= seconds:
                break
            started_s = time.process_time()
            player.load(weights[0], version=max(0, step - setting.age))
            trajectories = groups.next(player, step)
            generated_s += time.process_time() - started_s
            batch = TrainingBatch.of(trajectories, {version: step - version for version in range(step + 1)})
            updates += sum(train_step(state, batch, recipe, step=step, progress=min(1.0, used_s / seconds)))
            step += 1
            weights.append(whole_weights(state.policy))
            used_s += time.process_time() - started_s
    means = {name: value for name, value in recorder.means().items() if name.removeprefix("learner/") in KEPT_METRICS}
    told = {"seconds": seconds, "steps": step, "updates": updates, "generating_s": generated_s, "wall_s": time.monotonic() - began_s}
    return told | {"metrics": means, "curve": curve}


class Groups:
    """The groups of each batch: new ones, and those of the batches before that may be used again.

    Questions come in one shuffled order, and the first batch is all new: with one seed it is the same in every run.
    """

    def __init__(self, tasks: TaskList, recipe: Recipe, setting: Setting) -> None:
        self._size, self._seed = recipe.rollout.group_size, setting.seed
        self._new = recipe.learner.groups_per_batch // setting.reuse
        self._questions = cycle(random.Random(setting.seed).sample(tasks, len(tasks)))
        self._cohorts: deque[list[list[Trajectory]]] = deque(maxlen=setting.reuse)

    def next(self, player: Player, step: int) -> list[list[Trajectory]]:
        """A whole batch."""
        cohorts = 1 if self._cohorts else self._cohorts.maxlen or 1
        asked = [task for task in islice(self._questions, cohorts * self._new) for _ in range(self._size)]
        played = player.play(asked, temperature=1.0, seed=mix(self._seed, step))
        groups = [played[start : start + self._size] for start in range(0, len(played), self._size)]
        self._cohorts.extend(groups[start : start + self._new] for start in range(0, len(groups), self._new))
        return [group for cohort in self._cohorts for group in cohort]


def fresh_state(recipe: Recipe, model_dir: Path) -> LearnerState:
    """A learner of one rank, before its first step."""
    ranks, learner = Ranks.single(), recipe.learner
    policy = PolicyModel.load(model_dir, attention=recipe.model.attention)
    policy.shard(ranks, recipe.model.dtype)
    optimizer = make_optimizer(policy, learning_rate=learner.learning_rate, betas=learner.betas, weight_decay=learner.weight_decay)
    return LearnerState(policy=policy, optimizer=optimizer, ranks=ranks)


def whole_weights(policy: PolicyModel) -> dict[str, Tensor]:
    """A copy of the weights."""
    whole = ((name, value.full_tensor() if isinstance(value, DTensor) else value) for name, value in policy.named_weights())
    return {name: value.detach().clone() for name, value in whole}


def read(path: Path, seconds: float) -> dict[Setting, dict[str, Any]]:
    """The finished runs of this budget."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # a line that was cut off is no finished run
    names = Setting.__dataclass_fields__
    return {
        Setting(**{name: row[name] for name in names}): {name: value for name, value in row.items() if name not in names}
        for row in rows
        if row["seconds"] == seconds
    }


def chosen(setting: Setting, only: Sequence[str]) -> bool:
    """Whether one of the texts has all its words in the run's name."""
    return not only or any(set(text.split()) <= set(setting.name.split()) for text in only)


def print_tables(finished: Mapping[Setting, dict[str, Any]], options: argparse.Namespace) -> None:
    """Markdown: corrections by age, then reuse and mask."""
    conditions = dict.fromkeys((one.age, one.reuse, one.mask) for one in sorted(finished, key=lambda one: (one.reuse, not one.mask, one.age)))
    titles = [f"{age} steps old" + (f", reuse {reuse}" if reuse > 1 else "") + ("" if mask else ", no mask") for age, reuse, mask in conditions]
    print("\n| correction | " + " | ".join(titles) + " |\n|---|" + "---|" * len(titles))
    for method in METHODS:
        cells = [cell([found for one, found in finished.items() if (one.method, one.age, one.reuse, one.mask) == (method, *at)]) for at in conditions]
        if any(cells):
            print(f"| {method} | " + " | ".join(each or "-" for each in cells) + " |")
    print(f"\nheld-out EM after {options.seconds:g} s: mean over seeds (each seed; mean over the budget; steps)")
    print("hardware: " + ", ".join(f"{name} {value}" for name, value in hardware().items()))


def cell(runs: Sequence[dict[str, Any]]) -> str:
    """A cell of the table."""
    if not runs:
        return ""
    final = [run["curve"][-1]["em"] for run in runs]
    whole = sum(area(run["curve"]) for run in runs) / len(runs)
    steps = sum(run["steps"] for run in runs) / len(runs)
    return f"**{short(sum(final) / len(final))}** ({' '.join(map(short, final))}; {short(whole)}; {steps:.0f})"


def area(curve: Sequence[Mapping[str, float]]) -> float:
    """Mean EM over the budget, by trapezoids."""
    pairs = list(pairwise(curve))
    return sum((b["seconds"] - a["seconds"]) * (a["em"] + b["em"]) / 2 for a, b in pairs) / (curve[-1]["seconds"] - curve[0]["seconds"])


def short(share: float) -> str:
    """.957"""
    return f"{share:.3f}".removeprefix("0")


def plot(finished: Mapping[Setting, dict[str, Any]], path: Path) -> None:
    """EM over the budget: a panel an age, then reuse, then the mask. Thick lines are means over seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[tuple[str, dict[str, list[Setting]]]] = []
    for age in sorted({one.age for one in finished}):
        aged = [one for one in finished if (one.age, one.reuse, one.mask) == (age, 1, True)]
        panels.append((f"weights {age} steps old", by(aged, lambda one: one.method)))
    fresh = [one for one in finished if one.age == 0 and one.mask and one.method in REUSED]
    panels.append(("fresh weights, with reuse", by(fresh, lambda one: f"{one.method}, reuse {one.reuse}")))
    loss_mask = [
        one for one in finished if one.method == "two_policy" and one.reuse == 1 and {one.age} & {other.age for other in finished if not other.mask}
    ]
    panels.append(("two_policy, loss mask", by(loss_mask, lambda one: f"{one.age} steps old, {'masked' if one.mask else 'no mask'}")))
    panels = [panel for panel in panels if panel[1]]
    rows = -(-len(panels) // PANELS_A_ROW)
    figure = Figure(figsize=(4.6 * PANELS_A_ROW, 3.8 * rows), dpi=110, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    for place, (title, lines) in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, PANELS_A_ROW, place)
        for number, (label, settings) in enumerate(lines.items()):
            colour = COLOURS[list(METHODS).index(label) if label in METHODS else number % len(COLOURS)]
            draw(axis, [finished[one]["curve"] for one in settings], label, colour)
        axis.set_title(title, fontsize=11, loc="left")
        axis.set_ylim(0, 1.02)
        axis.set_xlabel("held-out EM over seconds of generating and learning", fontsize=9, color="#5d6778")
        axis.grid(axis="y", color="#e3e7ee", linewidth=0.8)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(length=0, labelsize=9, colors="#5d6778")
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        canvas.print_png(file, metadata={"Software": "agentrl"})


def by(settings: Iterable[Setting], label: Any) -> dict[str, list[Setting]]:
    """The runs of each line, in order."""
    lines: dict[str, list[Setting]] = {}
    for one in settings:
        lines.setdefault(label(one), []).append(one)
    return lines


def draw(axis: Any, curves: Sequence[Sequence[Mapping[str, float]]], label: str, colour: str) -> None:
    """Each seed's curve, and the mean of them at the mean of their times."""
    for curve in curves:
        axis.plot([point["seconds"] for point in curve], [point["em"] for point in curve], color=colour, linewidth=0.7, alpha=0.4)
    points = list(zip(*curves, strict=False))
    x, y = ([sum(point[name] for point in at) / len(at) for at in points] for name in ("seconds", "em"))
    axis.plot(x, y, color=colour, linewidth=1.9, marker="o", markersize=3, label=label)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="finished runs, one JSON line each; the warm start is cached beside it")
    parser.add_argument("--plot", type=Path, help="the learning curves as PNG")
    parser.add_argument("--seconds", type=float, default=75.0, help="budget of a run, in CPU seconds of its one thread")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, each on a core of its own")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORDS", help='runs whose name has all words of one of these, e.g. "none age=4"')
    parser.add_argument("--full", action="store_true", help="more ages, reuses and seeds: 270 runs, three and a half hours on two cores")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
