"""How the tokens of a chunk are laid out for a model.

Padded: rows of one length, as transformers has it. Packed: all tokens in one row, without padding; only attention looks at rows, which it gathers and
puts back. With three texts of lengths 3, 2 and 1:

    padded  ids    a a a      packed  ids        a a a b b c
                   b b .              positions  0 1 2 0 1 0
                   c . .              slots      0 1 2 / 3 4 0 / 5 0 0      where in the packed row each slot's token is, 0 where there is none
            mask   1 1 1              mask       1 1 1 / 1 1 0 / 1 0 0
                   1 1 0              back       0 1 2 3 4 6                which slot, of all in order, each token has
                   1 0 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from retriever.encoders.files import ModelFiles
from retriever.encoders.tokens import Chunk, ChunkLimits

__all__ = ["AXES", "EXACT", "FEW_SHAPES", "Layout", "Steps"]

Ids = npt.NDArray[np.int64]

# Models that compute token by token but for attention, take positions, and attend to all of a text: the first position of each.
FIRST_POSITION = {"bert": "zero", "roberta": "after padding", "xlm-roberta": "after padding", "camembert": "after padding"}

# Of every array: what its dimensions count.
AXES: dict[str, dict[str, tuple[str, ...]]] = {
    "padded": {"ids": ("N", "S"), "mask": ("N", "S"), "types": ("N", "S")},
    "packed": {"ids": ("T",), "positions": ("T",), "slots": ("N", "S"), "mask": ("N", "S"), "back": ("T",)},
}


# What is computed at a time. More tokens leave a CPU's caches: passages take a seventh longer by 4,096 tokens. Packed questions cost the same by 16
# as by 64; padded ones are cut finer, because 16 differ in length by more than larger products gain. A GPU is to be filled.
PACKED_CHUNK = ChunkLimits(rows=32, tokens=1024)
PADDED_CHUNK = ChunkLimits(rows=8, tokens=1024)
GPU_CHUNK = ChunkLimits(rows=4096, tokens=16_384)


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """Sizes of arrays are rounded up to multiples of these, and below them to powers of two."""

    texts: int
    length: int  # of the longest text
    tokens: int  # of all texts, packed


EXACT = Steps(texts=1, length=1, tokens=1)

# For oneDNN, by which PyTorch computes bf16 on CPUs: it keeps code for every shape that it met. Measured with MiniLM and 600 batches of questions, of
# 1 to 64: from 475 MB to 1,083 and growing, and to 600 and flat with these steps; most of it by the tokens. Finer ones of tokens fill more memory.
FEW_SHAPES = Steps(texts=8, length=8, tokens=16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Chunks to the arrays that a module takes, in its order.

    Args:
        pad_id: the token of padding.
        first_position: the number of a text's first position.
        limits: of a chunk.
        steps: of the arrays' sizes. What is added is behind everything else: rows for no text, whose results are to be cut off, and tokens of none.
        positions: padded rows are not rounded up to more tokens than these, of which the model may know nothing.
    """

    kind: Literal["padded", "packed"]
    pad_id: int = 0
    first_position: int = 0
    limits: ChunkLimits = PADDED_CHUNK
    steps: Steps = EXACT
    positions: int | None = None

    @classmethod
    def padded(cls, files: ModelFiles, device: str) -> Layout:
        """That every model takes."""
        pad_id, positions = _pad_id(files), files.config().get("max_position_embeddings")
        known = positions - pad_id - 1 if isinstance(positions, int) else None  # some models' positions begin after that of padding
        return cls(kind="padded", pad_id=pad_id, limits=PADDED_CHUNK if device == "cpu" else GPU_CHUNK, positions=known)

    @classmethod
    def fastest(cls, files: ModelFiles, device: str) -> Layout:
        """Packed where the model is known to allow it, on CPUs: on a GPU, rows of similar length fill it as they are."""
        first = FIRST_POSITION.get(str(files.config().get("model_type")))
        if first is None or device != "cpu":
            return cls.padded(files, device)
        first_position = _pad_id(files) + 1 if first == "after padding" else 0
        return cls(kind="packed", first_position=first_position, limits=PACKED_CHUNK)

    def arrays(self, chunk: Chunk) -> Mapping[str, Ids]:
        """By name, in the order of `AXES`."""
        texts, tokens = len(chunk.lengths), len(chunk.ids)
        lengths = np.pad(chunk.lengths, (0, _rounded(texts, self.steps.texts) - texts))
        longest = int(lengths.max(initial=1))
        width = _rounded(longest, self.steps.length)
        columns = np.arange(width if self.positions is None else max(longest, min(width, self.positions)))
        inside = columns < lengths[:, None]
        mask = inside.astype(np.int64)
        mask[texts:, 0] = 1  # attention to nothing would be NaN
        if self.kind == "packed":
            behind = (0, _rounded(tokens, self.steps.tokens) - tokens)
            starts = np.cumsum(lengths) - lengths
            slots = np.where(inside, starts[:, None] + columns, 0)
            positions = np.broadcast_to(columns, inside.shape)[inside] + self.first_position
            ids, positions = np.pad(chunk.ids, behind), np.pad(positions, behind, constant_values=self.first_position)
            return {"ids": ids, "positions": positions, "slots": slots, "mask": mask, "back": np.pad(np.flatnonzero(inside), behind)}
        ids, types = np.full(inside.shape, self.pad_id, np.int64), np.zeros(inside.shape, np.int64)
        ids[inside], types[inside] = chunk.ids, chunk.types
        return {"ids": ids, "mask": mask, "types": types}


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step if size >= step else 1 << max(0, size - 1).bit_length()


def _pad_id(files: ModelFiles) -> int:
    """What the model knows as padding: some count positions by it. 0 where there is none: what is masked may be anything."""
    pad = files.config().get("pad_token_id")
    return pad if isinstance(pad, int) else 0
