"""The quick start measured: what it learns on several seeds, and the controls that say from where the answers come.

    python benchmarks/quickstart.py --runs runs/benchmark [--seeds 0 1 2] [--controls-once] [--out quickstart.json] [--plot docs/quickstart.png]

Every number is of the real command. For each seed: `agentrl run recipes/quickstart.yaml`, evaluated before and after training, greedily, on
questions about entities that neither the warm start nor the training stated a fact of. Then, of the final policy:

    shuffled passages    the corpus has its objects exchanged within each relation: whoever reads it answers wrongly
    no search            a search is not answered: an answer, where the policy writes one after it, can only come from the weights
    learning rate 0      the same run, shorter, with nothing learned: what the machinery alone does to EM

Printed is one table with bounds; the exit code is 1 where one is missed. Finished runs and evaluations in --runs are reused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from real_command import ROOT, Run, evaluate, hardware, run

from agentrl.metrics.history import read_history

RECIPE = ROOT / "recipes" / "quickstart.yaml"
SET = "heldout"
HOPS = ("one_hop", "two_hop")
CONTROLS = {
    "shuffled passages": ("shuffled", "retriever.corpus=prepared:corpus_shuffled.jsonl"),
    "no search": ("no-search", "env.options.search=false"),
}
BEFORE, AFTER, AFTER_TWO_HOP, CONTROL, TASKS, WALL_S = 0.45, 0.85, 0.75, 0.10, 500, 480.0
COLOURS = ("#2563eb", "#d9480f", "#0d9468", "#9333ea", "#b7791f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One bound. `value` is None where it could not be measured."""

    seed: int
    what: str
    value: float | None
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """pass, MISSED, or that there is nothing to judge."""
        if self.value is None:
            return "not measured"
        return "pass" if self.low <= self.value <= self.high else "MISSED"


def main() -> int:
    """Run everything, print the tables."""
    options = parse()
    runs: Path = options.runs.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    machine = hardware()
    finished: dict[int, Run] = {}
    lines: list[Line] = []
    for seed in options.seeds:
        finished[seed] = run(RECIPE, f"seed{seed}", runs, [f"seed={seed}", *options.overrides])
        lines += learned(seed, finished[seed])
        if seed == options.seeds[0] or not options.controls_once:
            lines += controls(seed, finished[seed], runs, options)
    rows = [row(seed, one) for seed, one in finished.items()]
    print_tables(rows, lines, machine, options.overrides)
    if options.out is not None:
        told = {"hardware": machine, "overrides": options.overrides, "seeds": rows, "bounds": [asdict(x) | {"verdict": x.verdict} for x in lines]}
        options.out.write_text(json.dumps(told, indent=2) + "\n")
    if options.plot is not None:
        plot(finished, options.plot)
    return int(any(line.verdict == "MISSED" for line in lines))


def learned(seed: int, one: Run) -> Iterator[Line]:
    """The bounds of a run itself."""
    initial, final = before_and_after(one)
    yield Line(seed=seed, what="held-out tasks", value=final["tasks"], low=TASKS, high=float("inf"))
    yield Line(seed=seed, what="of them two-hop", value=final["by_source"]["two_hop"]["tasks"], low=TASKS // 2, high=float("inf"))
    yield Line(seed=seed, what="EM after the warm start", value=initial["em"], low=0, high=BEFORE)
    yield Line(seed=seed, what="final EM", value=final["em"], low=AFTER, high=1)
    yield Line(seed=seed, what="final EM, two-hop", value=final["by_source"]["two_hop"]["em"], low=AFTER_TWO_HOP, high=1)
    whole = one.timing.wall_s is not None and one.timing.warm_start_s is not None  # with a cached warm start it is not the whole
    yield Line(seed=seed, what="seconds of the command", value=one.timing.wall_s if whole else None, low=0, high=WALL_S)


def controls(seed: int, one: Run, runs: Path, options: argparse.Namespace) -> Iterator[Line]:
    """The bounds of the controls, run here."""
    checkpoint = max((one.directory / "checkpoints").iterdir(), key=lambda path: path.name.rpartition("-s")[2])
    common = [f"seed={seed}", *options.overrides]
    for what, (name, override) in CONTROLS.items():
        numbers = evaluate(RECIPE, f"seed{seed}-{name}", runs, checkpoint, [*common, override])[SET]
        yield Line(seed=seed, what=what, value=numbers["em"], low=0, high=CONTROL)
    still = [*common, "learner.learning_rate=0", f"run.steps={options.steps_lr0}"]
    unmoved = before_and_after(run(RECIPE, f"seed{seed}-lr0", runs, still))[1]["em"]
    low, high = before_and_after(one)[0]["interval"]
    yield Line(seed=seed, what=f"learning rate 0, {options.steps_lr0} steps", value=unmoved, low=low, high=high)


def before_and_after(one: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Numbers of the evaluations before and after training."""
    evaluations = one.summary["eval"]["sets"][SET]
    return evaluations["initial"], evaluations["final"]


def row(seed: int, one: Run) -> dict[str, Any]:
    """A seed's line of the table, by column."""
    initial, final = before_and_after(one)
    return {
        "seed": seed,
        "warm start EM": initial["em"],
        "final EM": final["em"],
        "low": final["interval"][0],
        "high": final["interval"][1],
        **{f"{name} {when}": numbers["by_source"][name]["em"] for when, numbers in (("before", initial), ("after", final)) for name in HOPS},
        "wall s": one.timing.wall_s,
        "warm start s": one.timing.warm_start_s,
        "steps": one.summary["steps"],
    }


def print_tables(rows: list[dict[str, Any]], lines: Iterable[Line], machine: dict[str, Any], overrides: list[str]) -> None:
    """Seeds, then bounds, then what it ran on."""
    names = list(rows[0])
    print("\n" + "  ".join(f"{name:>{max(7, len(name))}}" for name in names))
    for one in rows:
        print("  ".join(f"{shown(one[name]):>{max(7, len(name))}}" for name in names))
    print("low, high: 95 % bootstrap interval of the final EM over questions; -: not measured, or the warm start was cached\n")
    print(f"{'seed':>4}  {'what':28} {'value':>8}  {'bound':>18}  verdict")
    for line in lines:
        bound = f"{shown(line.low)} to {shown(line.high)}" if line.high != float("inf") else f"at least {shown(line.low)}"
        print(f"{line.seed:>4}  {line.what:28} {shown(line.value):>8}  {bound:>18}  {line.verdict}")
    print("\nhardware  " + ", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"overrides {' '.join(overrides) or 'none'}")


def shown(value: float | None) -> str:
    """Three digits of shares, one of larger numbers, none of counts."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.3f}" if abs(value) <= 1 else f"{value:.1f}"


def plot(finished: dict[int, Run], path: Path) -> None:
    """Held-out EM over steps, a line and a band a seed; two-hop questions beside it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained", facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, title, part in zip(axes, ("held-out EM, all questions", "of them: questions that take two searches"), (None, "two_hop"), strict=True):
        axis.set_title(title, fontsize=11, loc="left")
        for colour, (seed, one) in zip(COLOURS, finished.items(), strict=False):
            found = read_history(one.directory).evaluations[SET]
            at = [numbers["step"] for numbers in found]
            curve = [numbers if part is None else numbers["by_source"][part] for numbers in found]
            axis.fill_between(at, [x["interval"][0] for x in curve], [x["interval"][1] for x in curve], color=colour, alpha=0.15, linewidth=0)
            axis.plot(at, [x["em"] for x in curve], color=colour, linewidth=1.8, marker="o", markersize=4, label=f"seed {seed}")
        axis.set_ylim(0, 1.02)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(axis="y", color="#e3e7ee", linewidth=0.8)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(length=0, labelsize=9, colors="#5d6778")
        axis.set_xlabel("training step (band: 95 % interval over questions)", fontsize=9, color="#5d6778")
    axes[0].legend(frameon=False, fontsize=9, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        canvas.print_png(file, metadata={"Software": "agentrl"})


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--controls-once", action="store_true", help="controls of the first seed only")
    parser.add_argument("--steps-lr0", type=int, default=10, help="steps of the run with learning rate 0")
    parser.add_argument("--out", type=Path, help="the tables as JSON")
    parser.add_argument("--plot", type=Path, help="the learning curves as PNG")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="a.b=c", help="of the recipe, for all runs; stated in the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
