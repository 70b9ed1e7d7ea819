"""One evaluation written down: every transcript as a row, and the numbers with their intervals.

    eval/step_20.jsonl   one row per trajectory, of all sets evaluated at step 20, each set in (task, k) order
    eval/step_20.json    the numbers by set

A failure of the infrastructure has no reward: it is listed by cause with its task and enters no mean.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.buffer_api import EvaluationResult
from agentrl.metrics.bootstrap import cluster_interval
from agentrl.metrics.files import replacing, to_json, write_whole
from agentrl.types import Task, Trajectory

__all__ = ["Decode", "compare", "evaluation_metrics", "write_evaluation"]

EXACT_MATCH = "exact_match"  # the reward part, or the measure beside the reward, that is EM where an environment has one
_SEED = 20  # of the bootstrap: fixed, so that the same rows always give the same interval

Decode = Callable[[Sequence[int]], str]
Numbers = dict[str, Any]


def write_evaluation(result: EvaluationResult, directory: Path, decode: Decode) -> Numbers:
    """Write the rows and numbers of `result` below `directory` and return the numbers.

    Rows of other sets of the same step stay; earlier rows of the same set and step (from before a rollback) are replaced.

    Args:
        decode: token ids to text, special tokens shown.
    """
    played = sorted(((t, task) for task, t in result.rows if isinstance(t, Trajectory)), key=lambda pair: pair[0].ticket.sample)
    rows_path, numbers_path = directory / f"step_{result.step}.jsonl", directory / f"step_{result.step}.json"
    kept = [line for line in _lines(rows_path) if json.loads(line)["set"] != result.set]
    with replacing(rows_path) as file:
        file.writelines(kept)
        for trajectory, task in played:
            file.write(to_json(_row(result, task, trajectory, decode)) + b"\n")
    numbers = _numbers(result, [trajectory for trajectory, _ in played])
    known = json.loads(numbers_path.read_bytes()) if numbers_path.exists() else {}
    write_whole(numbers_path, to_json(known | {result.set: numbers}, indent=1) + b"\n")
    return numbers


def evaluation_metrics(numbers: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of one evaluation under their metric names (`eval/<set>/...`)."""
    head = f"eval/{numbers['set']}"
    metrics = {f"{head}/{name}": numbers[name] for name in ("trajectories", "em", "reward", "tokens", "turns", "searches")}
    metrics[f"{head}/failures"] = sum(len(tasks) for tasks in numbers["failures"].values())
    metrics[f"{head}/version_low"], metrics[f"{head}/version_high"] = numbers["versions"]
    metrics[f"{head}/em_low"], metrics[f"{head}/em_high"] = numbers["interval"]
    for source, part in numbers["by_source"].items():
        metrics[f"{head}/em/{source}"] = part["em"]
    for reason, share in numbers["stop"].items():
        metrics[f"{head}/stop/{reason}"] = share
    return {name: float(value) for name, value in metrics.items() if value is not None}


def compare(rows_a: Iterable[Mapping[str, Any]], rows_b: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Episode by episode: do two evaluations of the same tasks say the same?

    Episodes are the same when set, task and k are; they agree when their token ids and masks do (or, in rows without the tokens' hash,
    their transcripts). An episode that only one side has counts as a disagreement.

    Returns:
        `agreement` (share), `episodes` (of either side), `only_a`, `only_b` (counts), `different` (task ids that disagree, in order of a).
    """
    a, b = _by_episode(rows_a), _by_episode(rows_b)
    shared = [key for key in a if key in b]
    different = [str(key[1]) for key in shared if not _agree(a[key], b[key])]
    episodes = len(a.keys() | b.keys())
    agreement = (len(shared) - len(different)) / episodes if episodes else 0.0
    return {
        "agreement": agreement,
        "episodes": episodes,
        "only_a": len(a) - len(shared),
        "only_b": len(b) - len(shared),
        "different": different,
    }


def _by_episode(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, int], Mapping[str, Any]]:
    return {(row["set"], row["task_id"], row["k"]): row for row in rows}


def _agree(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    name = "tokens_hash" if "tokens_hash" in a and "tokens_hash" in b else "transcript"
    return bool(a[name] == b[name])


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _row(result: EvaluationResult, task: Task, trajectory: Trajectory, decode: Decode) -> dict[str, Any]:
    ids = trajectory.token_ids.tolist()
    return {
        "evaluation": result.evaluation,
        "set": result.set,
        "step": result.step,
        "task_id": task.id,
        "source": task.source,
        "question": task.prompt or (task.messages[-1].get("content", "") if task.messages else ""),
        "answers": list(task.answers),
        "k": trajectory.ticket.k,
        "reward": trajectory.reward.total,
        "parts": dict(trajectory.reward.parts),
        "stop": str(trajectory.stop),
        "versions": list(_version_interval(trajectory)),
        "prompt": decode(ids[: trajectory.prompt_length]),
        "turns": [
            {
                "completion": decode(ids[slice(*turn.completion)]),
                "observation": decode(ids[slice(*turn.observation)]),
                "action": turn.action,
                "argument": turn.argument,
                "stop": turn.stop,
                "results": [identity for call in turn.tool_calls for identity in call.result_ids],
            }
            for turn in trajectory.turns
        ],
        "tokens": {"prompt": trajectory.prompt_length, "generated": trajectory.generated, "total": len(trajectory)},
        "tokens_hash": _tokens_hash(trajectory),
        "transcript": decode(ids),
    }


def _version_interval(trajectory: Trajectory) -> tuple[int, int]:
    written = trajectory.versions[trajectory.loss_mask == 1]
    return (int(written.min()), int(written.max())) if len(written) else (-1, -1)


def _tokens_hash(trajectory: Trajectory) -> str:
    content = np.ascontiguousarray(trajectory.token_ids, dtype="<i4").tobytes() + np.ascontiguousarray(trajectory.loss_mask, dtype="|u1").tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _numbers(result: EvaluationResult, played: Sequence[Trajectory]) -> Numbers:
    exact = any(EXACT_MATCH in t.reward.parts for t in played)
    sources: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in played:
        sources[trajectory.source].append(trajectory)
    failures: dict[str, list[str]] = defaultdict(list)
    for task, outcome in result.rows:
        if not isinstance(outcome, Trajectory):
            failures[str(outcome)].append(task.id)
    return {
        "evaluation": result.evaluation,
        "set": result.set,
        "step": result.step,
        "stage": result.stage,
        "versions": list(result.versions),
        "failures": dict(sorted(failures.items())),
        **_part(played, exact),
        "by_source": {source: _part(sources[source], exact) for source in sorted(sources)},
    }


def _part(played: Sequence[Trajectory], exact: bool) -> Numbers:
    """Numbers of some of the trajectories; every mean is None where there is none."""
    if not played:
        nothing = dict.fromkeys(("em", "reward", "tokens", "turns", "searches"))
        return {"trajectories": 0, "tasks": 0, **nothing, "interval": [None, None], "stop": {}}
    scores = [t.reward.parts.get(EXACT_MATCH, 0.0) if exact else t.reward.total for t in played]
    by_task: dict[str, list[float]] = defaultdict(list)
    for trajectory, score in zip(played, scores, strict=True):
        by_task[trajectory.task_id].append(score)
    interval = cluster_interval([sum(s) for s in by_task.values()], [len(s) for s in by_task.values()], seed=_SEED)
    count = len(played)
    return {
        "trajectories": count,
        "tasks": len(by_task),
        "em": sum(scores) / count,
        "interval": list(interval),
        "reward": sum(t.reward.total for t in played) / count,
        "tokens": sum(t.generated for t in played) / count,
        "turns": sum(len(t.turns) for t in played) / count,
        "searches": sum(turn.action == "search" for t in played for turn in t.turns) / count,
        "stop": {str(reason): number / count for reason, number in sorted(Counter(t.stop for t in played).items())},
    }
