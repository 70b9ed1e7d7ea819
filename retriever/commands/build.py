"""`retriever build CORPUS --out DIR`: index a corpus into a directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retriever.commands.options import add_encoder, add_runtime, devices_of, encoder_of, runtime_of
from retriever.commands.progress import shown

if TYPE_CHECKING:
    from retriever.building.plan import Plan
    from retriever.building.spec import BuildSpec
    from retriever.query import Progress

__all__ = ["STOPPED", "add", "run", "shown_making", "spec_of"]

DEFAULT_ENCODER = "intfloat/e5-base-v2"  # what Search-R1's wiki-18 index was made with
STOPPED = 130  # as a shell reports SIGINT


def add(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("build", help="index a corpus into a directory", description=__doc__)
    parser.add_argument("corpus", type=Path, metavar="CORPUS", help=".jsonl, .jsonl.gz or .parquet")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="appears when it is complete; a stopped build goes on")
    add_encoder(parser, default=DEFAULT_ENCODER)
    parser.add_argument("--index", metavar="FACTORY|blocks", help="FAISS's factory string (Flat), or blocks: exact search of --dtype numbers")
    parser.add_argument("--rescore", action="store_true", help="keep the vectors, too, and score the best of a search by them")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="of blocks, and of vectors to rescore by")
    parser.add_argument("--bm25", action="store_true", help="find by words, too")
    parser.add_argument("--shard-rows", type=int, metavar="N", help="documents between two marks that a stopped build goes on from")
    parser.add_argument("--device", default="cpu", metavar="LIST", help="embed on these, a process each: cpu, or cuda:0,cuda:1")
    add_runtime(parser)
    parser.add_argument("--plan", action="store_true", help="print what it will take, and stop")


def run(arguments: argparse.Namespace) -> int:
    """Build; the directory that is there already is checked to be of the same."""
    from retriever.building.build import build, planned

    spec = spec_of(arguments)
    if arguments.plan:
        plan = planned(arguments.corpus, arguments.out, spec)
        print(plan.render())
        plan.check()
        return 0
    return shown_making(arguments.out, lambda progress, told: build(arguments.corpus, arguments.out, spec, progress, told=told))


def shown_making(out: Path, make: Callable[[Progress, Callable[[Plan], None]], object]) -> int:
    """Make the directory `out`, with the plan and the progress told on the way, and at the end what it takes. Returns the exit code."""
    from retriever.footprint import footprint_of
    from retriever.manifest import Manifest

    try:
        with shown() as progress:
            make(progress, lambda plan: print(plan.render(), file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print("retriever: stopped; what is finished is kept, and the same command goes on from there", file=sys.stderr)
        return STOPPED
    print(f"{out}: built; to be served it {footprint_of(Manifest.read(out)).render()}")
    return 0


def spec_of(arguments: argparse.Namespace) -> BuildSpec:
    """What the flags ask for.

    Raises:
        ValueError: they do not fit together.
    """
    from retriever.building.spec import BuildSpec

    encoder = encoder_of(arguments)
    if encoder is None and arguments.index is not None:
        raise ValueError("--index is of vectors, and with --encoder none there are none: leave it out")
    devices = devices_of(arguments.device)
    return BuildSpec(
        encoder=encoder,
        index=arguments.index or "Flat",
        dtype=arguments.dtype,
        rescore=arguments.rescore,
        bm25=arguments.bm25,
        shard_rows=arguments.shard_rows,
        devices=devices,
        runtime=runtime_of(arguments, *devices[:1]),
        threads=arguments.threads,
    )
