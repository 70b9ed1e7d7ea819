"""`python -m retriever build CORPUS.jsonl --out DIR` and `python -m retriever serve DIR`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retriever.encoders.hashed import HashedSettings

__all__ = ["main"]

USAGE_ERROR = 2
PROGRESS_EVERY = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 0, or 2 for a mistake in the command line, the corpus or the index."""
    arguments = _parser().parse_args(argv)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # read when NumPy and FAISS are imported; their idle threads spin, at 3 times the work's CPU time
    from retriever.corpus import CorpusError
    from retriever.index import IndexFault

    try:
        return _build(arguments) if arguments.command == "build" else _serve(arguments)
    except (CorpusError, IndexFault, OSError, ValueError) as error:
        print(f"retriever: {error}", file=sys.stderr)
        return USAGE_ERROR


def _build(arguments: argparse.Namespace) -> int:
    from retriever.build import build

    index = build(arguments.corpus, arguments.out, settings=_settings(arguments), progress=_report)
    print(f"{arguments.out}: {len(index)} documents, {index.encoder.settings.dim} dimensions")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from retriever.app import create_app
    from retriever.build import load
    from retriever.index import tune_faiss
    from retriever.serve import is_loopback, serve

    if not is_loopback(arguments.host) and not arguments.unsafe_allow_remote:
        raise ValueError(
            f"--host {arguments.host} lets other machines in, and nobody is asked who he is: if that is meant, add --unsafe-allow-remote"
        )
    index = load(arguments.path, settings=_settings(arguments), cache=arguments.cache, progress=_report)
    tune_faiss(index.encoder.settings.dim, one_at_a_time=arguments.deterministic)
    serve(create_app(index, topk=arguments.topk), host=arguments.host, port=arguments.port, end_with_stdin=arguments.end_with_stdin)
    return 0


def _settings(arguments: argparse.Namespace) -> HashedSettings:
    from retriever.encoders.hashed import HashedSettings

    return HashedSettings(dim=arguments.dim, word_weight=arguments.word_weight, trigram_weight=arguments.trigram_weight)


def _report(what: str, done: int, of: int) -> None:
    if done == of or done // PROGRESS_EVERY > (done - 256) // PROGRESS_EVERY:
        print(f"{what} {done} of {of} documents", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="retriever", description="Passages by Search-R1's HTTP API. Corpora are JSON lines of id and contents, or id, title and text."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="index a corpus into a directory")
    build.add_argument("corpus", type=Path, metavar="CORPUS.jsonl")
    build.add_argument("--out", type=Path, required=True, metavar="DIR", help="appears when it is complete")
    serve = commands.add_parser("serve", help="serve an index, or a corpus that is indexed at the start")
    serve.add_argument("path", type=Path, metavar="DIR|CORPUS.jsonl")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=0, help="by default a free one, told by the line `ready http://HOST:PORT`")
    serve.add_argument("--topk", type=int, default=3, help="passages where a request does not say (3)")
    serve.add_argument("--cache", type=Path, metavar="DIR", help="keep the index of a corpus here, named by content; without, it is kept in memory")
    serve.add_argument("--deterministic", action="store_true", help="search query by query, so that scores do not depend on what else is asked")
    serve.add_argument("--end-with-stdin", action="store_true", help="end when standard input ends: with the process that started this one")
    serve.add_argument("--unsafe-allow-remote", action="store_true", help="allow a --host that other machines can reach; there is no authentication")
    for command in (build, serve):
        command.add_argument(
            "--dim", type=int, default=1024, help="dimensions of a new index (1024); 2048 finds a little more in long passages, at twice the cost"
        )
        command.add_argument("--word-weight", type=float, default=1.0)
        command.add_argument("--trigram-weight", type=float, default=0.4)
    return parser


if __name__ == "__main__":
    sys.exit(main())
