"""`retriever evaluate DIR --questions FILE`: how well an index finds what questions ask for, all modes over one pool."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retriever.commands.options import add_place
from retriever.commands.progress import shown

if TYPE_CHECKING:
    from retriever.evaluation import Arm, Judged
    from retriever.index import Index
    from retriever.query import Mode
    from retriever.questions import Question

__all__ = ["add", "run"]

TOPK = (1, 3, 5)


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's options."""
    command = subparsers.add_parser(
        "evaluate",
        help="recall, MRR and nDCG of an index, by mode, with intervals",
        description="Asks every question in every mode, and prints recall@k, MRR and nDCG with 95 % bootstrap intervals over questions, and the "
        "paired differences between modes. Relevant is what the questions' `positive_passage(s)` name, or what --qrels or --answers says.",
    )
    command.add_argument("directory", type=Path, metavar="DIR", help="an index")
    command.add_argument("--questions", type=Path, required=True, metavar="FILE.jsonl", help="rows with `question`, and what is relevant to it")
    judge = command.add_mutually_exclusive_group()
    judge.add_argument("--qrels", type=Path, metavar="FILE", help="graded judgements, TREC's or BEIR's lines, by the questions' `id`")
    judge.add_argument("--answers", action="store_true", help="relevant is what contains one of a question's `golden_answers`")
    command.add_argument("--modes", type=_modes, metavar="MODE,MODE", help="of dense, bm25, hybrid; by default all that the index has")
    command.add_argument("--topk", type=_cutoffs, default=TOPK, metavar="K,K", help="cut-offs of recall (1,3,5)")
    command.add_argument(
        "--gain", choices=("exponential", "linear"), help="of a grade in nDCG: 2^grade - 1 (exponential, the default), or the grade itself"
    )
    command.add_argument("--allow-missing", action="store_true", help="relevant ids that the index does not have count as never found")
    command.add_argument("--reranker", metavar="MODEL", help="a cross-encoder: every mode is measured with it as well")
    add_place(command)
    command.add_argument("--runtime", choices=("auto", "onnx", "torch"), default="auto", help="what runs the encoder (auto)")
    command.add_argument("--precision", choices=("fp32", "bf16", "fp16", "int8"), default="fp32", help="of the encoder (fp32)")
    command.add_argument("--device", default="cpu", help="of the encoder (cpu)")
    command.add_argument("--threads", type=int, default=1, help="of the encoder, on a CPU (1)")
    command.add_argument("--parameters", metavar="NAME=VALUE,...", help="of the search in a FAISS index, e.g. efSearch=128")
    command.add_argument("--limit", type=int, metavar="N", help="ask the first N questions only")
    command.add_argument("--seed", type=int, default=0, help="of the bootstrap (0)")
    command.add_argument("--json", action="store_true", help="print a record instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print.

    Raises:
        ValueError: questions, judgements or options cannot be used.
        retriever.manifest.IndexFault: the index cannot.
    """
    from retriever.evaluation import evaluate
    from retriever.questions import read_questions

    if arguments.gain and not arguments.qrels:
        raise ValueError("--gain is of graded judgements (--qrels): gold ids are all relevant to one degree, and answers have no nDCG")
    if arguments.allow_missing and arguments.answers:
        raise ValueError("--allow-missing is of ids, and --answers has none")
    if arguments.limit is not None and arguments.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {arguments.limit}")
    questions = read_questions(arguments.questions)[: arguments.limit]
    index = _open(arguments)
    try:
        judged, arms = _judged(arguments, questions, index), _arms(arguments, index.modes)
        with shown() as progress:
            evaluation = evaluate(
                index.search,
                judged,
                arms,
                documents=len(index),
                topk=arguments.topk,
                gain=arguments.gain or "exponential",
                seed=arguments.seed,
                progress=progress,
            )
        told = {"index": str(arguments.directory), "identity": index.identity, "questions_file": str(arguments.questions), **evaluation.record()}
        print(json.dumps(told, indent=2) if arguments.json else evaluation.render())
    finally:
        index.close()
    return 0


def _open(arguments: argparse.Namespace) -> Index:
    from retriever.encoders.settings import Runtime
    from retriever.index import Index, Serving

    runtime = Runtime(kind=arguments.runtime, precision=arguments.precision, device=arguments.device, threads=arguments.threads)
    options: dict[str, Any] = {"runtime": runtime, "model": arguments.model, "reranker": arguments.reranker, "parameters": arguments.parameters}
    return Index.open(arguments.directory, Serving(**options))


def _judged(arguments: argparse.Namespace, questions: Sequence[Question], index: Index) -> Judged:
    from retriever.evaluation import judged_by_answers, judged_by_ids, judged_by_qrels
    from retriever.questions import read_qrels

    if arguments.answers:
        return judged_by_answers(questions, index.documents)
    if arguments.qrels:
        return judged_by_qrels(questions, read_qrels(arguments.qrels), index.documents, allow_missing=arguments.allow_missing)
    if not any(question.gold for question in questions):
        raise ValueError(f"{arguments.questions}: no question has a `positive_passage`. What is relevant? Give --qrels FILE, or --answers")
    return judged_by_ids(questions, index.documents, allow_missing=arguments.allow_missing)


def _arms(arguments: argparse.Namespace, there: Sequence[Mode]) -> list[Arm]:
    from retriever.evaluation import Arm
    from retriever.query import Mode

    modes = [Mode(name) for name in arguments.modes] if arguments.modes else list(there)
    lacking = [mode.value for mode in modes if mode not in there]
    if lacking:
        raise ValueError(f"this index is not searched by {', '.join(lacking)}: it has {', '.join(mode.value for mode in there)}")
    return [Arm(mode=mode, rerank=rerank) for rerank in ((False, True) if arguments.reranker else (False,)) for mode in modes]


def _modes(text: str) -> list[str]:
    names, known = text.split(","), ("dense", "bm25", "hybrid")
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, got {text!r}")
    return names


def _cutoffs(text: str) -> tuple[int, ...]:
    try:
        cutoffs = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected whole numbers such as 1,3,5, got {text!r}") from error
    if cutoffs[0] < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of 1 and more, got {text!r}")
    return cutoffs
