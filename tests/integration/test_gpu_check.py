"""`make gpu-check` at toy size on the CPU, without the packages that a bare machine with a GPU does not have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
WITHOUT = ("pydantic", "trio", "ray", "starlette", "uvicorn", "faiss", "matplotlib", "sglang")

RUN = f"""
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {WITHOUT!r}:
            raise ImportError(f"{{name}} is not on this machine")
sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
sys.exit(runpy.run_path(sys.argv[0], run_name="gpu_check")["main"]())
"""


def test_every_check_passes_at_toy_size_and_is_written_down(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(SCRIPT), "--device", "cpu", "--out", str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("no GPU: tiny models; flash attention, NCCL and CUDA graphs were not checked\n")
    [file] = tmp_path.glob("gpu_check_*.json")
    told = json.loads(file.read_text())
    assert {name: told[name]["verdict"] for name in ("learner", "engine", "transfer", "group", "speed:toy")} == dict.fromkeys(
        ("learner", "engine", "transfer", "group", "speed:toy"), "passed"
    )
    assert (told["hardware"]["gpus"], told["toy"], told["group"]["backend"]) == (0, True, "gloo")
    assert told["engine"]["second_turn_computed_float32"] == 16  # the last token of each first turn, and the one that was added
    assert told["transfer"]["tensors_that_differ"] == 0
