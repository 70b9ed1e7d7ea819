"""`module:Name`."""

import subprocess
import sys

import pytest

from agentrl.errors import ConfigError
from agentrl.resolve import origin, resolve
from agentrl.rollout.worker import RolloutWorker


def test_a_name_is_found_with_the_file_it_comes_from():
    assert resolve("agentrl.rollout.worker:RolloutWorker") is RolloutWorker
    assert resolve("agentrl.rollout.worker:RolloutWorker.run") is RolloutWorker.run
    assert origin(RolloutWorker).endswith("agentrl/rollout/worker.py")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("envs.search", "expected module:Class, got 'envs.search'"),
        (":Class", "expected module:Class"),
        ("no_such_module_here:Class", "no_such_module_here cannot be imported.*PYTHONPATH"),
        ("agentrl.rollout.limits:Limit", "has no Limit; it has .*Limits"),
    ],
)
def test_a_name_that_cannot_be_found_says_why(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def test_an_import_that_fails_within_the_module_is_not_blamed_on_the_path(tmp_path, monkeypatch):
    (tmp_path / "needs_something.py").write_text("import no_such_library_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="its import of no_such_library_at_all failed"):
        resolve("needs_something:Class")


@pytest.mark.slow
def test_a_worker_imports_neither_torch_nor_transformers_nor_ray():
    code = "import sys, agentrl.rollout.worker, agentrl.resolve; print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
