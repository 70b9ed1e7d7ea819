"""The guardian: nothing of a command outlives whoever started it."""

import subprocess
import sys
import time

import psutil
import pytest

from agentrl.system.guardian import guarded, let_go

pytestmark = pytest.mark.slow

# A server as SGLang is one: its scheduler is in a session of its own and does not end with it.
TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
{then}
"""


def start(then):
    """A guardian over such a tree, and the tree's two processes."""
    command = guarded([sys.executable, "-c", TREE.format(then=then)])
    guardian = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    grandchild = psutil.Process(int(guardian.stdout.readline()))
    return guardian, [psutil.Process(grandchild.ppid()), grandchild]


def all_gone(processes):
    return not psutil.wait_procs(processes, timeout=5)[1]


def end(guardian):
    let_go(guardian)
    let_go(guardian)  # harmless
    guardian.stdout.close()
    return guardian.wait(10)


def test_a_guardian_that_is_let_go_ends_the_whole_tree_gently():
    guardian, tree = start("time.sleep(600)")
    assert end(guardian) == 128 + 15
    assert all_gone(tree)


def test_a_standard_input_that_closes_unasked_kills_the_tree_at_once():
    guardian, tree = start("time.sleep(600)")
    guardian.stdin.close()
    assert guardian.wait(5) == 128 + 9  # not by SIGTERM, which the command might take its time over
    assert all_gone(tree)
    guardian.stdout.close()


def test_a_command_that_ends_takes_what_it_left_behind_with_it_and_its_code_is_told():
    guardian, tree = start("sys.exit(7)")
    assert guardian.wait(10) == 7
    assert all_gone(tree)
    end(guardian)


def test_a_command_that_is_killed_is_told_as_a_shell_tells_it():
    guardian, tree = start("time.sleep(600)")
    tree[0].kill()
    assert guardian.wait(10) == 128 + 9
    assert all_gone(tree)
    end(guardian)


def test_a_starter_that_is_killed_takes_the_tree_with_it():
    starter = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, time; subprocess.Popen({guarded(['sleep', '600'])!r}, stdin=subprocess.PIPE); time.sleep(600)"]
    )
    while len(tree := psutil.Process(starter.pid).children(recursive=True)) < 2:
        time.sleep(0.02)
    starter.kill()
    starter.wait()
    assert all_gone(tree)


def test_a_guardian_that_is_killed_takes_the_tree_with_it_all_the_same():
    guardian, tree = start("time.sleep(600)")
    guardian.kill()
    assert end(guardian) == -9
    assert all_gone(tree)
