"""The same recipe asynchronous and synchronous: how much sooner it reaches an EM, and how much sooner it could at most.

    python benchmarks/async_vs_sync.py --runs runs/async_vs_sync [--target-em 0.85] [--eval-every 5] [--delay-mean 0.05] [--out FILE.json]

Arms are runs of the real command with one seed and one warm start (made once, cached in --runs), which differ in rollout.max_staleness alone:
2, or 0, the synchronous trainer. With --delay-mean both are run again with a tool that takes a log-normal time more per answered search
(sigma 1; the same times in both, `delayed_search.py`).

to target   seconds from the start of training to the end of the first evaluation at or above --target-em. Evaluations are part of the time;
            those beside asynchronous training may be played by more than one version.
s/step      seconds of the training window per step; the window is from the start of training to the end of the last step.
overlap     share of the generated tokens that were made while the learner was in a step
G, T        seconds of the window in which a turn was being generated (evaluations included), and in which the learner was in a step
E           seconds of the window in which an episode was being played: G and the waiting for tools
bound       (G+T)/max(G,T) of the synchronous arm: what overlapping the two can gain, on a machine divided as it is
with tools  (E+T)/max(E,T) of it: where episodes wait for tools, that waiting is overlapped as well

Overlap also fills the tail of a batch, when few episodes are left and the engine is nearly idle; neither bound counts that, so that
achieved/bound can exceed 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from real_command import ROOT, Run, hardware, run

from agentrl.buffer import journal
from agentrl.buffer.records import BatchTrained, EvaluationEnded, IncarnationBegun, TrajectoryAdded, VersionPublished
from agentrl.metrics.overlap import TurnTime, measure_overlap, speedup_bound, turn_times
from agentrl.types import Trajectory
from agentrl.wire import decode_trajectory

STALENESS = {"async": 2, "sync": 0}
SIGMA = 1.0  # of the delays: a tail that makes the longest of a batch about ten times the mean
COLUMNS = {
    "arm": "arm", "staleness": "K", "delay_mean_s": "delay s", "steps": "steps", "em": "final EM", "to_target_s": "to target s",
    "target_step": "at step", "per_step_s": "s/step", "overlap_share": "overlap", "multi_version_share": ">=2 vers.", "age": "age",
    "generating_s": "G s", "episodes_s": "E s", "training_s": "T s", "window_s": "window s",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """What was measured of one run. Times in seconds, shares of 1."""

    arm: str
    staleness: int  # K
    delay_mean_s: float
    steps: int
    em: float  # after the last step
    to_target_s: float | None  # None: never
    target_step: int | None
    per_step_s: float
    window_s: float
    overlap_share: float
    multi_version_share: float
    age: float  # mean staleness of trained tokens, in steps
    generating_s: float
    episodes_s: float
    training_s: float


def main() -> int:
    """Run all arms, print the tables."""
    options = parse()
    machine = hardware()
    runs: Path = options.runs.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    delays = [0.0] if options.delay_mean == 0 else [0.0, options.delay_mean]
    comparisons = []
    for delay_mean_s in delays:
        fast, slow = (play(arm, delay_mean_s, runs, options) for arm in STALENESS)
        comparisons.append((fast, slow, compared(fast, slow)))
    print_tables(comparisons, machine, options)
    if options.out is not None:
        told = [{"async": asdict(fast), "sync": asdict(slow), "compared": ratios} for fast, slow, ratios in comparisons]
        asked = {"target_em": options.target_em, "eval_every": options.eval_every, "seed": options.seed, "overrides": options.overrides}
        options.out.write_text(json.dumps({"hardware": machine, **asked, "comparisons": told}, indent=2) + "\n")
    return 0


def play(arm: str, delay_mean_s: float, runs: Path, options: argparse.Namespace) -> Arm:
    """One run, measured."""
    overrides = [f"seed={options.seed}", f"eval.every={options.eval_every}", f"rollout.max_staleness={STALENESS[arm]}", *options.overrides]
    name = arm
    if delay_mean_s:
        overrides += ["env.factory=benchmarks.delayed_search:DelayedSearchEnv", f"env.options.delay_mean_s={delay_mean_s}"]
        overrides += [f"env.options.delay_sigma={SIGMA}"]
        name = f"{arm}-delay{delay_mean_s:g}"
    return measured(arm, delay_mean_s, run(options.recipe, name, runs, overrides), options.target_em)


def measured(arm: str, delay_mean_s: float, one: Run, target_em: float) -> Arm:
    """Read a run's journal: what happened when."""
    records = [record for _, record in journal.read(one.directory / "journal")]
    if sum(isinstance(record, IncarnationBegun) and record.role == "driver" for record in records) > 1:
        raise SystemExit(f"{one.directory} was interrupted and resumed: its times say nothing. Remove it and measure again")
    steps = [record for record in records if isinstance(record, BatchTrained)]
    evaluations = [record for record in records if isinstance(record, EvaluationEnded)]
    initial = [record.t for record in evaluations if record.payload["stage"] == "initial"]
    began = max(initial) if initial else next(record.t for record in records if isinstance(record, VersionPublished))
    ended = steps[-1].ended_s
    trajectories = [decode_trajectory(record.data) for record in records if isinstance(record, TrajectoryAdded)]
    training = [(record.started_s, record.ended_s) for record in steps]
    turns = within(turn_times(trajectories), began, ended)
    generated = measure_overlap(turns, training)
    reached = next((r for r in evaluations if r.payload["em"] is not None and r.payload["em"] >= target_em), None)
    return Arm(
        arm=arm,
        staleness=STALENESS[arm],
        delay_mean_s=delay_mean_s,
        steps=len(steps),
        em=one.summary["eval"]["final"]["em"],
        to_target_s=None if reached is None else max(0.0, reached.t - began),
        target_step=None if reached is None else reached.payload["step"],
        per_step_s=(ended - began) / len(steps),
        window_s=ended - began,
        overlap_share=one.summary["overlap"]["share"],
        multi_version_share=one.summary["multi_version_share"],
        age=one.summary["staleness"]["mean"],
        generating_s=generated.generating_s,
        episodes_s=measure_overlap(within(episode_times(trajectories), began, ended), []).generating_s,
        training_s=generated.training_s,
    )


def episode_times(trajectories: Iterable[Trajectory]) -> list[TurnTime]:
    """Episodes as if each were one turn: from the start of its first to the end of its last, tools between them included."""
    return [(t.turns[0].started_s, t.turns[-1].generated_s, t.generated) for t in trajectories if t.turns]


def within(turns: Iterable[TurnTime], began: float, ended: float) -> list[TurnTime]:
    """The parts of turns inside a window; their tokens are not divided."""
    return [(max(start, began), min(end, ended), tokens) for start, end, tokens in turns if start < ended and end > began]


def compared(fast: Arm, slow: Arm) -> dict[str, float | None]:
    """Ratios of synchronous to asynchronous times, and what they could be."""
    to_target = slow.to_target_s / fast.to_target_s if slow.to_target_s is not None and fast.to_target_s else None
    per_step = slow.per_step_s / fast.per_step_s
    bound, with_tools = speedup_bound(slow.generating_s, slow.training_s), speedup_bound(slow.episodes_s, slow.training_s)
    return {
        "time to target, sync/async": to_target,
        "time per step, sync/async": per_step,
        "bound (G+T)/max(G,T)": bound,
        "per step, achieved/bound": per_step / bound,
        "bound with tools (E+T)/max(E,T)": with_tools,
        "per step, achieved/bound with tools": per_step / with_tools,
    }


def print_tables(comparisons: list[tuple[Arm, Arm, dict[str, float | None]]], machine: dict[str, Any], options: argparse.Namespace) -> None:
    """Arms, then ratios, then what it ran on."""
    print("\n" + "  ".join(f"{title:>{max(6, len(title))}}" for title in COLUMNS.values()))
    for arm in (arm for comparison in comparisons for arm in comparison[:2]):
        values = asdict(arm)
        print("  ".join(f"{shown(values[name]):>{max(6, len(title))}}" for name, title in COLUMNS.items()))
    print(f"\ntarget EM {options.target_em:g}, evaluated every {options.eval_every} steps; seed {options.seed}; -: not reached")
    for fast, _, ratios in comparisons:
        tool = f"tool delay log-normal, mean {fast.delay_mean_s:g} s, sigma {SIGMA:g}" if fast.delay_mean_s else "no tool delay"
        print(f"\n{tool}")
        for what, value in ratios.items():
            print(f"  {what:38} {shown(value):>8}")
    print("\nhardware  " + ", ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"recipe    {options.recipe}, overrides {' '.join(options.overrides) or 'none'}")


def shown(value: float | str | None) -> str:
    """Three digits up to 10, one above."""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return "-" if value is None else str(value)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs and of the cached warm start")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target-em", type=float, default=0.85)
    parser.add_argument("--eval-every", type=int, default=5, help="steps between evaluations: the resolution of the time to the target")
    parser.add_argument("--delay-mean", type=float, default=0.0, help="seconds: adds two arms with a slow tool")
    parser.add_argument("--out", type=Path, help="the tables as JSON")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="a.b=c", help="of the recipe, for all arms; stated in the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
