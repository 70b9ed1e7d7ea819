"""`retriever import --faiss FILE --corpus FILE --out DIR --encoder MODEL`: adopt an index that others made, without embedding anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from retriever.commands.build import shown_making
from retriever.commands.options import add_model, add_runtime, devices_of, encoder_of, runtime_of

__all__ = ["add", "run"]


def add(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("import", help="adopt a FAISS index and its corpus, such as e5_Flat.index and wiki-18.jsonl", description=__doc__)
    parser.add_argument("--faiss", type=Path, required=True, metavar="FILE", help="an index whose row i is line i of the corpus")
    parser.add_argument("--corpus", type=Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="appears when it is complete")
    parser.add_argument("--encoder", required=True, metavar="MODEL", help="what made the vectors: a directory or an id of the Hugging Face hub")
    add_model(parser)
    parser.add_argument("--index", metavar="FACTORY|blocks", help="convert the vectors; without, the file is kept as it is")
    parser.add_argument("--link", action="store_true", help="use corpus and kept vectors as they lie, without copies: leave them alone, then")
    parser.add_argument("--rescore", action="store_true", help="with --index: keep the vectors, too, and score the best of a search by them")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="with --index: of blocks, and of vectors to rescore by (float16)")
    parser.add_argument("--bm25", action="store_true", help="find by words, too")
    parser.add_argument("--device", default="cpu", help="that some documents are embedded on, to compare (cpu)")
    add_runtime(parser)


def run(arguments: argparse.Namespace) -> int:
    """Adopt."""
    from retriever.building.adopt import Adoption, adopt
    from retriever.building.spec import BuildSpec

    devices = devices_of(arguments.device)
    spec = BuildSpec(
        encoder=encoder_of(arguments),
        index=arguments.index or "Flat",
        dtype=arguments.dtype,
        rescore=arguments.rescore,
        bm25=arguments.bm25,
        devices=devices,
        runtime=runtime_of(arguments, *devices[:1]),
        threads=arguments.threads,
    )
    adoption = Adoption(spec=spec, keep=arguments.index is None, link=arguments.link)
    return shown_making(
        arguments.out,
        lambda progress, told: adopt(arguments.faiss, arguments.corpus, arguments.out, adoption, progress, told=told),
    )
