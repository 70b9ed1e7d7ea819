"""`agentrl selftest` on the quick start made small: all of it agrees, and bounds that rounding breaks do not pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import ROOT, share_cache

pytestmark = pytest.mark.slow

CHECKS = ("log-probs", "tokenizer", "vocabulary", "template", "no change", "canary")
DEADLINE_S = 120.0


def selftest(runs: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    share_cache(runs)
    command = [sys.executable, "-c", "from agentrl.cli import main; main()", "selftest", str(ROOT / "recipes" / "quickstart.yaml"), "--smoke"]
    options = [f"run.dir={runs}", "name=checked", "run.launcher=local", "metrics.console=plain", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=DEADLINE_S, env=environment)


def test_the_quick_start_passes_every_check_with_a_line_each(tmp_path):
    process = selftest(tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    lines = process.stdout.splitlines()
    for name in CHECKS:
        assert sum(line.startswith(f"ok    {name} ") for line in lines) == 1, process.stdout
    assert lines[-1] == f"6 of 6 checks passed; the run they are about: {tmp_path / 'checked-selftest'}"


@pytest.mark.soak
def test_bounds_below_rounding_fail_with_the_reason_and_exit_code_1(tmp_path):
    process = selftest(tmp_path, "canary.max_gap=1e-9")
    assert process.returncode == 1, process.stdout + process.stderr
    failed = [line for line in process.stdout.splitlines() if line.startswith("FAIL")]
    assert any(line.startswith("FAIL  canary ") and "The KERNELS differ" in line and "raise canary.max_gap" in line for line in failed), (
        process.stdout
    )
    assert "Traceback" not in process.stderr
