"""The loop in one file learns, and the benchmark built on it asks for recipes that there are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from running import ROOT, SHORT_WARM_START, share_cache

pytestmark = pytest.mark.slow

DEADLINE_S = 300.0


def told(*command: str) -> list[str]:
    ran = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_the_loop_in_one_file_learns(tmp_path):
    share_cache(tmp_path)
    lines = told("examples/one_file_loop.py", "--seconds", "20", f"run.dir={tmp_path}", *SHORT_WARM_START)
    header = next(number for number, line in enumerate(lines) if line.split()[:1] == ["seconds"])
    rows = [line.split() for line in lines[header + 1 :]]
    first, last = float(rows[0][-1]), float(rows[-1][-1])
    assert first < 0.35
    assert last > first + 0.1


def test_every_run_of_the_off_policy_benchmark_has_a_recipe_that_loads(tmp_path):
    code = "import sys; sys.path.insert(0, 'benchmarks'); import offpolicy, pathlib\n"
    code += f"for one in offpolicy.grid(full=False): print(one.name, one.recipe(pathlib.Path({str(tmp_path)!r})).learner.mini_batches)"
    lines = told("-c", code)
    assert len(lines) == len(set(lines)) == 46
    assert sum(line.endswith(" 4") for line in lines) == 20  # three methods of four mini-batches, at three ages, and one of them with reuse
