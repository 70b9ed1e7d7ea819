"""A run over a Ray cluster of two machines: here two nodes on one, each at a loopback address of its own where the other's servers do not listen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from running import TINY, assert_books_balance, finish, output, records, start

from agentrl.buffer.records import IncarnationBegun, VersionPublished

pytestmark = pytest.mark.soak

MACHINES = ("127.0.1.1", "127.0.1.2")

# Ray's own cluster of several nodes on one machine, until its standard input closes; in a process of its own, for Ray can be had once in one.
CLUSTER = f"""
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 3, "node_ip_address": {MACHINES[0]!r}, "include_dashboard": False}})
cluster.add_node(num_cpus=3, node_ip_address={MACHINES[1]!r})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of such a cluster."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    with cluster.stdout, cluster.stdin:
        yield cluster.stdout.readline().strip()
    cluster.wait(60)


SPREAD = ("run.steps=3", "engine.replicas=2", "learner.ranks=2", "resources.placement=spread", "resources.engine_cpus=1", "resources.learner_cpus=1")


def test_engines_and_ranks_on_two_machines_train_and_publish(tmp_path, address):
    run_dir = tmp_path / "spread"
    process = start(run_dir, *SPREAD, "run.launcher=ray", "run.bind=node", recipe=TINY, flags=("--address", address))
    assert finish(process, run_dir) == 0, output(run_dir)
    assert_books_balance(run_dir, steps=3)
    engines = [record.url for record in records(run_dir) if isinstance(record, IncarnationBegun) and record.role == "engine" and record.url]
    assert sorted(url.split(":")[1] for url in engines) == [f"//{machine}" for machine in MACHINES]
    assert {record.engines for record in records(run_dir) if isinstance(record, VersionPublished)} == {(0, 1)}


def test_a_cluster_of_two_machines_and_servers_on_loopback_are_refused_with_the_key(tmp_path, address):
    run_dir = tmp_path / "loopback"
    process = start(run_dir, *SPREAD, "run.launcher=ray", recipe=TINY, flags=("--address", address))
    assert finish(process, run_dir) == 2, output(run_dir)
    assert "the Ray cluster has 2 machines" in output(run_dir)
    assert "set run.bind=node" in output(run_dir)
