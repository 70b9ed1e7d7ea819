"""Everything of the project that needs a GPU, checked and measured in one command: `make gpu-check`, or

    python benchmarks/gpu_check.py [--device cuda|cpu] [--toy] [--shapes qwen2.5-0.5b,...] [--out DIR]

It needs torch, transformers, numpy, httpx and this checkout, nothing else of what the project depends on. Each check is a process of its own, so
that one that runs out of memory or hangs leaves the others alone; each prints a line, and all together are a JSON file named after the hardware in
`benchmarks/results/`. With `--toy` (and without a GPU, where that is the default) models are tiny and nothing is written unless `--out` says where:
then it shows that the checks run, not how fast anything is.

learner    FSDP2 on one GPU: a step's loss against the plain model's; packed trajectories against padded ones; the log-prob function against the naive
engine     the embedded engine against transformers: log-probs of what it generated, prefixes reused, with CUDA graphs and without
transfer   weights from a learner into an engine, bucket by bucket: equal checksums, equal log-probs
group      the same over a process group (NCCL between two GPUs, gloo on a CPU): a receiver is killed in mid-broadcast, the group forms anew
speed      of the learner: tokens/s, MFU, peak memory; of decoding: tokens/s against what the memory's bandwidth allows. Random weights

Exit code 1 where a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch  # noqa: E402  after the path: the checkout need not be installed
import transformers  # noqa: E402
from gpu.shapes import SHAPES, TOY  # noqa: E402

CHECKS = ("learner", "engine", "transfer", "group")
DEADLINE_S = 900.0  # of one check: a 3B model is made, trained for some steps and decoded


def main() -> int:
    """Run the checks, print, write."""
    transformers.utils.logging.disable_progress_bar()
    options = _options()
    if options.only is not None:
        print(json.dumps(_one(options.only, options)))
        return 0
    shapes = ["toy"] if options.toy else options.shapes.split(",")
    results: dict[str, Any] = {"hardware": _hardware(options.device), "toy": options.toy}
    failed = 0
    for name in (*CHECKS, *(f"speed:{shape}" for shape in shapes)):
        results[name] = told = _here(name, options) if options.toy else _apart(name, options)
        failed += told["verdict"] == "failed"
        print(f"{name:24} {told['verdict']:8} {told['seconds']:6.1f} s   {_line(told)}", flush=True)
    out = options.out or (None if options.toy else ROOT / "benchmarks" / "results")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"gpu_check_{_slug(results['hardware']['device'])}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(f"wrote {path}")
    print(f"{failed} checks failed" if failed else "every check passed")
    if options.device == "cpu":
        print("no GPU: tiny models; flash attention, NCCL and CUDA graphs were not checked" + (", and no file was written" if out is None else ""))
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--toy", action="store_true", help="tiny models; always so on a CPU")
    parser.add_argument("--shapes", default=",".join(name for name in SHAPES if name != "toy"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one check, in this process
    options = parser.parse_args()
    options.toy |= options.device == "cpu"
    if unknown := [name for name in options.shapes.split(",") if name not in SHAPES]:
        parser.error(f"--shapes: {unknown[0]} is none of {', '.join(SHAPES)}")
    return options


def _apart(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One check in a process of its own: {"verdict": passed | failed | has not run, "seconds", ...}."""
    command = [sys.executable, str(Path(__file__)), "--only", name, "--device", options.device, *(["--toy"] if options.toy else [])]
    started = time.monotonic()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        last = (ran.stdout.strip().splitlines() or [""])[-1]
        told = json.loads(last) if ran.returncode == 0 else {"verdict": "failed", "error": ran.stderr.strip()[-2000:]}
    except subprocess.TimeoutExpired:
        told = {"verdict": "failed", "error": f"it did not end within {DEADLINE_S:.0f} s"}
    return told | {"seconds": round(time.monotonic() - started, 1)}


def _here(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same in this process: toys are over sooner than a process has imported torch."""
    torch.set_num_threads(1)
    started = time.monotonic()
    told = _one(name, options)
    return told | {"seconds": round(time.monotonic() - started, 1)}


def _one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The check `name`: its numbers, and whether each is within its bound."""
    from gpu import engine, group, learner, speed, transfer

    torch.manual_seed(0)
    shape = TOY if options.toy else SHAPES["qwen2.5-0.5b"]
    if name == "learner":
        return learner.check(shape, options.device)
    if name == "engine":
        return engine.check(shape, options.device)
    if name == "transfer":
        return transfer.check(shape, options.device)
    if name == "group":
        return group.check(shape, options.device)
    return speed.measure(SHAPES[name.removeprefix("speed:")], options.device)


def _hardware(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if device == "cuda" else f"CPU {platform.processor() or platform.machine()}",
        "gpus": torch.cuda.device_count() if device == "cuda" else 0,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device == "cuda":
        found |= {"memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return found


def _line(told: dict[str, Any]) -> str:
    if "error" in told:
        return str(told["error"]).strip().splitlines()[-1][:160]
    return ", ".join(
        f"{name} {_short(value)}" for name, value in told.items() if name not in ("verdict", "seconds") and not isinstance(value, dict | list)
    )


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower()).strip("_")


if __name__ == "__main__":
    sys.exit(main())
