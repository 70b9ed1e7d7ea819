"""The public data that Search-R1 trains, evaluates and searches on: where each set is on the Hugging Face hub, and what its files hold.

    PUBLIC_SETS["nq"].files["train"]    nq/train.jsonl of RUC-NLPIR/FlashRAG_datasets, 79,168 questions

Sources: the questions, their counts and rows `{id, question, golden_answers, metadata}` are FlashRAG's (Jin et al. 2024, arXiv 2405.13576; its page
on data sets); which splits are used is Search-R1's (`scripts/data_process/qa_search_{train,test}_merge.py`); passages and index are those its
`scripts/download.py` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from agentrl.errors import DataError

__all__ = ["PUBLIC_SETS", "PublicFile", "PublicSet", "public_set"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicFile:
    """One file that is written.

    Args:
        parts: names in the repository; several are pieces of one file.
        count: rows (bytes of an index) that it held when this was written; None where that is not known.
    """

    parts: tuple[str, ...]
    written: str
    count: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicSet:
    """A set on the hub.

    Args:
        repository: of kind `dataset`.
        used: the splits that are written where none is asked for.
    """

    name: str
    folder: str  # below the directory that everything is written to
    repository: str
    kind: Literal["questions", "passages", "index"]
    files: Mapping[str, PublicFile]
    used: tuple[str, ...]
    licence: str
    cite: str


_FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
_FLASHRAG_LICENCE = "CC BY-SA 4.0 by FlashRAG's data set card; the questions keep their authors' terms"
_WIKIPEDIA_LICENCE = "Wikipedia's text (CC BY-SA 3.0, GFDL); the terms of the repository are on its page"
_DIMENSIONS_BYTES = 768 * 4  # of E5-base, in float32
_FLAT_HEADER_BYTES = 45  # of faiss.IndexFlatIP, before its vectors
_PASSAGES = 21_015_324  # of Wikipedia on 20 December 2018 in pieces of 100 words (Karpukhin et al. 2020)


def _questions(name: str, cite: str, used: tuple[str, ...], *, folder: str = "", **counts: int) -> PublicSet:
    """A set of questions; `counts` by split."""
    return PublicSet(
        name=name,
        folder=name,
        repository=_FLASHRAG,
        kind="questions",
        files={split: PublicFile(parts=(f"{folder or name}/{split}.jsonl",), written=f"{split}.jsonl", count=n) for split, n in counts.items()},
        used=used,
        licence=_FLASHRAG_LICENCE,
        cite=cite,
    )


_ALL = (
    _questions("nq", "Natural Questions: Kwiatkowski et al. 2019", ("train", "test"), train=79_168, dev=8_757, test=3_610),
    _questions("hotpotqa", "HotpotQA: Yang et al. 2018, arXiv 1809.09600", ("train", "dev"), train=90_447, dev=7_405),
    _questions("triviaqa", "TriviaQA: Joshi et al. 2017, arXiv 1705.03551", ("test",), train=78_785, dev=8_837, test=11_313),
    _questions("popqa", "PopQA: Mallen et al. 2023, arXiv 2212.10511", ("test",), test=14_267),
    _questions("2wiki", "2WikiMultiHopQA: Ho et al. 2020, arXiv 2011.01060", ("dev",), folder="2wikimultihopqa", train=15_000, dev=12_576),
    _questions("musique", "MuSiQue: Trivedi et al. 2022, arXiv 2108.00573", ("dev",), train=19_938, dev=2_417),
    _questions("bamboogle", "Bamboogle: Press et al. 2023, arXiv 2210.03350", ("test",), test=125),
    PublicSet(
        name="wiki18",
        folder="wiki18",
        repository="PeterJinGo/wiki-18-corpus",
        kind="passages",
        # Called .jsonl.gz, and a tar archive when unpacked, whose only file is the JSON lines: agentrl.data.readers looks inside.
        files={"corpus": PublicFile(parts=("wiki-18.jsonl.gz",), written="corpus.jsonl", count=_PASSAGES)},
        used=("corpus",),
        licence=_WIKIPEDIA_LICENCE,
        cite="Wikipedia of 2018 in passages: Karpukhin et al. 2020, arXiv 2004.04906",
    ),
    PublicSet(
        name="wiki18-e5",
        folder="wiki18",
        repository="PeterJinGo/wiki-18-e5-index",
        kind="index",
        files={"index": PublicFile(parts=("part_aa", "part_ab"), written="e5_Flat.index", count=_PASSAGES * _DIMENSIONS_BYTES + _FLAT_HEADER_BYTES)},
        used=("index",),
        licence=_WIKIPEDIA_LICENCE,
        cite="vectors of wiki18 by intfloat/e5-base-v2: Wang et al. 2022, arXiv 2212.03533",
    ),
)

PUBLIC_SETS: Mapping[str, PublicSet] = {known.name: known for known in _ALL}


def public_set(name: str) -> PublicSet:
    """The set of this name.

    Raises:
        DataError: there is none; names those there are.
    """
    if name in PUBLIC_SETS:
        return PUBLIC_SETS[name]
    near = get_close_matches(name, PUBLIC_SETS, n=1)
    raise DataError(f"there is no data set {name!r}{f' (did you mean {near[0]}?)' if near else ''}: there are {', '.join(PUBLIC_SETS)}")
