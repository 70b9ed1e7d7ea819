#!/bin/sh
# Makes a virtual environment in which a real SGLang 0.5.23 runs on a plain CPU: for tests against the real server, not for speed (some 600
# tokens a second of a tiny model). About 3 minutes and 3.4 GB.   deploy/sglang_cpu.sh DIR   then engine.python=DIR/bin/python
#
# Three things a CPU without Intel's AMX needs, none of them compiled:
#   * packages as pinned, without SGLang's dependencies (CUDA builds of torch and kernels);
#   * torchvision of PyPI is a CUDA build: the one file of it that wants CUDA operators is emptied;
#   * sgl_kernel is imported by name, and for dense models nothing of it is called: a module that says so where something is.
set -eu
directory=${1:?usage: deploy/sglang_cpu.sh DIR [PYTHON]}
python=${2:-python3.11}
here=$(cd "$(dirname "$0")/.." && pwd)

if [ ! -x "$directory/bin/python" ]; then
    "$python" -m venv "$directory"
fi
"$directory/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || {
    echo "SGLang 0.5.23 needs Python 3.11 or 3.12: deploy/sglang_cpu.sh $directory /path/to/python3.11" >&2
    exit 2
}
echo "== installing PyTorch for CPUs into $directory"
"$directory/bin/python" -m pip install --quiet --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
echo "== installing SGLang 0.5.23 and what it needs on a CPU (some 2 GB)"
"$directory/bin/python" -m pip install --quiet --no-deps -c "$here/constraints/sglang-cpu.txt" -r "$here/constraints/sglang-cpu.txt"
packages=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
: > "$packages/torchvision/_meta_registrations.py"
mkdir -p "$packages/sgl_kernel"
cat > "$packages/sgl_kernel/__init__.py" <<'P'
"""Stands for SGLang's compiled kernels where there are none: importing names from it works, calling them does not."""

__version__ = "0.4.10"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} was called, and this environment has no compiled kernels")

    return absent
P
"$directory/bin/python" -c 'import importlib.metadata; print("== SGLang", importlib.metadata.version("sglang"), "is in", __import__("sys").prefix)'
