"""`retriever info DIR`: what an index is, and what it takes to serve it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retriever.amounts import size

if TYPE_CHECKING:
    from retriever.footprint import Footprint
    from retriever.manifest import Manifest

__all__ = ["add", "run"]


def add(subparsers: Any) -> None:
    """The command's flags."""
    parser = subparsers.add_parser("info", help="what an index is, and what it takes to serve it", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="the manifest and the memory, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print what the manifest says. Files are not read: `verify` does that."""
    from dataclasses import asdict

    from retriever.footprint import footprint_of
    from retriever.manifest import Manifest

    manifest = Manifest.read(arguments.directory)
    footprint = footprint_of(manifest)
    if arguments.json:
        print(json.dumps({**asdict(manifest), "identity": manifest.identity, "memory": asdict(footprint.total)}, indent=2))
    else:
        print("\n".join(f"{name:<12}{value}" for name, value in _table(arguments.directory, manifest, footprint)))
    return 0


def _table(directory: Path, manifest: Manifest, footprint: Footprint) -> list[tuple[str, str]]:
    source, dense, encoder, bm25 = manifest.documents.source, manifest.dense, manifest.encoder, manifest.bm25
    rows = [("index", str(directory)), ("documents", f"{manifest.count:,} of {source.name}, {size(source.bytes)}, sha256 {source.sha256[:16]}...")]
    if encoder is not None:
        rows.append(("encoder", ", ".join(f"{key} {value!r}" if isinstance(value, str) else f"{key} {value}" for key, value in encoder.items())))
    if dense is not None:
        kind = f"FAISS {dense.factory}" if dense.backend == "faiss" else f"{dense.dtype} blocks"
        again = f", the best {dense.rescore.depth} scored again in {dense.rescore.dtype}" if dense.rescore else ""
        metric = dense.metric if dense.metric == "ip" else "l2: scores are minus squared distances (import with --index Flat: inner products)"
        rows.append(("vectors", f"{kind} of {dense.dim}, by {metric}{again}; least cosine to the encoder's own {dense.fidelity:.4f}"))
    if bm25 is not None:
        rows.append(("words", f"BM25, k1 {bm25['k1']}, b {bm25['b']}"))
    rows += [(f"  {name}", f"{size(part.disk_bytes)} on disk") for name, part in footprint.parts.items()]
    rows += [("serving", footprint.render()), ("made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))]
    return rows
