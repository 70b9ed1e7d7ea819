"""`retriever verify DIR`: read all of an index, and compare."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from retriever.commands.options import add_place, add_runtime, runtime_of
from retriever.commands.progress import shown

__all__ = ["add", "run"]


def add(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("verify", help="read all of an index: hashes, offsets, ids, and vectors embedded again", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    add_place(parser)
    add_runtime(parser)


def run(arguments: argparse.Namespace) -> int:
    """Verify, and print what was checked."""
    from retriever.building.verify import verify
    from retriever.index import Serving

    with shown() as progress:
        told = verify(arguments.directory, Serving(runtime=runtime_of(arguments), model=arguments.model), progress)
    print("\n".join(told))
    return 0
