"""Passages to measure a retriever with: real English prose of about 100 words each, from what is installed, without a network.

    python benchmarks/passages.py OUT.jsonl [--count 50000]

They are pieces of the documentation strings of the standard library and of the installed packages, in the order of the files' names: classes and
functions are described in sentences, by many hands, about many things. The same packages give the same passages to the byte; the sha256 that is
printed says whether two machines measured the same. An environment with everything that `make install` brings has some 60,000 of them.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

WORDS = 100  # of a passage, as in Wikipedia corpora of open-domain question answering (Karpukhin et al. 2020)
FEWEST_WORDS = 40  # of the last piece of a documentation string
PROSE = 0.5  # share of words that are letters only: tables of numbers and listings stay out
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def write_passages(path: Path, count: int) -> str:
    """Write `count` rows of {"id", "title", "text"}, atomically. Returns the file's sha256.

    Raises:
        SystemExit: the installed packages have fewer.
    """
    rows = [json.dumps({"id": str(row), "title": title, "text": text}) for row, (title, text) in enumerate(islice(passages(), count))]
    if len(rows) < count:
        sys.exit(
            f"the installed packages have {len(rows)} passages, {count} were asked for: use --passages {len(rows) // 1000 * 1000}, or `make install`"
        )
    content = "".join(f"{row}\n" for row in rows).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(path)
    return hashlib.sha256(content).hexdigest()


def passages() -> Iterator[tuple[str, str]]:
    """Titles and texts, all there are, none twice."""
    seen: set[bytes] = set()
    for name, source in _sources():
        for title, text in _documented(name, source):
            words = text.split()
            for start in range(0, len(words), WORDS):
                piece = words[start : start + WORDS]
                passage = " ".join(piece)
                mark = hashlib.blake2b(passage.encode("utf-8", "replace"), digest_size=12).digest()
                if len(piece) >= FEWEST_WORDS and mark not in seen and _is_prose(piece):
                    seen.add(mark)
                    yield title, passage.encode("utf-8", "replace").decode()


def _sources() -> Iterator[tuple[str, bytes]]:
    """Modules by name, those of tests left out."""
    paths = sysconfig.get_paths()
    for root in (Path(paths["stdlib"]), Path(paths["purelib"])):
        for path in sorted(root.rglob("*.py"), key=lambda path: path.parts):
            parts = path.relative_to(root).parts
            if "site-packages" not in parts and not {"test", "tests", "idle_test"} & set(parts):
                yield ".".join(parts).removesuffix(".py").removesuffix(".__init__"), path.read_bytes()


def _documented(name: str, source: bytes) -> Iterator[tuple[str, str]]:
    """What is documented in a module, and how."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # a template, or of another version of Python
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield f"{name}.{node.name}" if not isinstance(node, ast.Module) else name, text


def _is_prose(words: list[str]) -> bool:
    return sum(word.strip(".,;:()'\"`").isalpha() for word in words) >= PROSE * len(words)


def main() -> None:
    """Write them, say which they are."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("--count", type=int, default=50_000)
    arguments = options.parse_args()
    print(f"{arguments.out}: {arguments.count} passages, sha256 {write_passages(arguments.out, arguments.count)}")


if __name__ == "__main__":
    main()
