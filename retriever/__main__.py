"""`python -m retriever COMMAND`, also `agentrl retriever COMMAND`: build an index, serve one, and what is between."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]

USAGE_ERROR = 2
STOPPED = 130  # as a shell reports SIGINT
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, 2 for a mistake in the command line, the corpus or the index, or 130 after Ctrl-C."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(STOPPED))  # a second one does not wait for threads
        print("retriever: stopped", file=sys.stderr)
        return STOPPED


def _run(argv: Sequence[str] | None) -> int:
    import argparse  # here, as all that takes a moment: Ctrl-C may come at once

    for variable in THREADS:
        os.environ.setdefault(variable, "1")  # read when NumPy and FAISS are imported; their idle threads spin, at 3 times the work's CPU time
    from retriever.commands import adopt, bench, build, evaluate, info, serve, verify

    commands = {"build": build, "serve": serve, "info": info, "verify": verify, "import": adopt, "evaluate": evaluate, "bench": bench}
    parser = argparse.ArgumentParser(
        prog="retriever", description="Passages by Search-R1's HTTP API. Corpora are JSON lines of id and contents, or id, title and text."
    )
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in commands.values():
        command.add(subparsers)
    arguments = parser.parse_args(argv)
    cores, threads = len(os.sched_getaffinity(0)), getattr(arguments, "threads", None) or 1
    if threads > cores:
        print(f"retriever: --threads {threads} are more than the {cores} cores that this process may use: they wait for one another", file=sys.stderr)
    from retriever.corpus import CorpusError
    from retriever.documents import DocumentsFault
    from retriever.manifest import IndexFault
    from retriever.searchers.searcher import SearcherError

    try:
        code: int = commands[arguments.command].run(arguments)
        return code
    except (CorpusError, DocumentsFault, IndexFault, SearcherError, OSError, ValueError) as error:
        print(f"retriever: {error}", file=sys.stderr)
        return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
