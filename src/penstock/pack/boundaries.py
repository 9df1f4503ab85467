"""Where documents begin in a batch, and everything that follows from it, without loops.

A *cut* is a place in rows of `width` tokens where a document begins, other than a row's start,
as one number: row * width + column. From the rows [a a b b b] and [c c c c d] come

    >>> found = Documents.of(np.array([2, 9]), rows=2, width=5).batch(0, 2)
    >>> found.doc_ids.tolist()                      # of the 4 inputs of each row
    [[0, 0, 1, 1], [0, 0, 0, 0]]
    >>> found.position_ids.tolist()
    [[0, 1, 0, 1], [0, 1, 2, 3]]
    >>> found.ignored.tolist()                      # labels, flat, that would predict across a cut
    [1, 7]
    >>> found.cu_seqlens.tolist(), found.max_seqlen
    ([0, 2, 4, 8], 4)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

_KEPT = 1 << 20  # inputs of the largest batch whose ramp is kept


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Masks of (B, T) inputs, and what varlen attention needs; a row's first document is 0."""

    doc_ids: I32  # (B, T)
    position_ids: I32  # (B, T), counted from each document's start in its row
    ignored: I64  # flat places of the (B, T) labels that belong to another document
    cu_seqlens: I32  # (documents + 1,) over the B * T inputs, flat
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of many rows, found once; batches of rows are cut from them.

    A batch then costs three passes over its tokens and a few calls on its handful of documents.
    """

    inputs: int  # T: inputs a row, one less than its tokens
    starts: I32  # of each document, over the inputs of all rows, flat
    lengths: I64
    numbers: I32  # of each document in its row
    first: list[int]  # of each row its first document, and the number of documents
    ignored: I64  # labels across a cut, over the labels of all rows, flat
    first_ignored: list[int]  # of each row the first of those, and their number

    @classmethod
    def of(cls, cuts: I64, rows: int, width: int, used: I64 | None = None) -> Documents:
        """The documents of `rows` rows of `width` tokens, from their sorted cuts.

        Where rows are `used` up to a place only, the rest is padding: a document without labels.
        """
        assert width > 1, "a row of one token has no input"
        assert rows * width < 2**31, "cu_seqlens are int32"
        inputs = width - 1
        padding = np.empty(0, np.int64)
        if used is not None:
            short = np.flatnonzero(used < width)
            cuts = np.sort(np.concatenate([cuts, short * width + used[short]]))
            left = inputs - used[short]  # labels that are padding, after the one across the cut
            padding = np.repeat(short * inputs + used[short], left)
            padding += np.arange(len(padding)) - np.repeat(np.cumsum(left) - left, left)
        row, column = np.divmod(cuts, width)
        ignored = row * inputs + column - 1
        inside = column < inputs  # a document that begins with the last label is no input
        row_starts = np.arange(rows) * inputs
        starts = np.concatenate([row_starts, ignored[inside] + 1])
        starts.sort()
        if len(padding):
            ignored = np.sort(np.concatenate([ignored, padding]))
        first = starts.searchsorted(row_starts)
        return cls(
            inputs=inputs,
            starts=starts.astype(np.int32),
            lengths=np.diff(starts, append=rows * inputs),
            numbers=(np.arange(len(starts)) - first[starts // inputs]).astype(np.int32),
            first=[*first.tolist(), len(starts)],
            ignored=ignored,
            first_ignored=[*ignored.searchsorted(row_starts).tolist(), len(ignored)],
        )

    def batch(self, lo: int, hi: int) -> Boundaries:
        """The masks of rows lo to hi."""
        a, b = self.first[lo], self.first[hi]
        offset, size = lo * self.inputs, (hi - lo) * self.inputs
        starts, lengths = self.starts[a:b] - np.int32(offset), self.lengths[a:b]
        cu_seqlens = np.empty(b - a + 1, np.int32)
        cu_seqlens[:-1], cu_seqlens[-1] = starts, size
        position_ids = starts.repeat(lengths)
        ramp = _ramp(size) if size <= _KEPT else np.arange(size, dtype=np.int32)
        np.subtract(ramp, position_ids, out=position_ids)
        left, right = self.first_ignored[lo], self.first_ignored[hi]
        return Boundaries(
            doc_ids=self.numbers[a:b].repeat(lengths).reshape(-1, self.inputs),
            position_ids=position_ids.reshape(-1, self.inputs),
            ignored=self.ignored[left:right] - offset,
            cu_seqlens=cu_seqlens,
            max_seqlen=int(lengths.max(initial=0)),
        )


@lru_cache(maxsize=4)
def _ramp(size: int) -> I32:
    """0, 1, 2, ...: kept, since the batches of a run have one size (75 µs a batch to 60)."""
    ramp = np.arange(size, dtype=np.int32)
    ramp.flags.writeable = False
    return ramp


def eos_cuts(tokens: npt.NDArray[Any], eos: int) -> I64:
    """The cuts of rows in which a document ends with `eos`.

    >>> eos_cuts(np.array([[5, 0, 6, 7], [8, 8, 8, 0]], np.uint16), 0).tolist()
    [2]
    """
    ends: I64 = (tokens == tokens.dtype.type(eos)).reshape(-1).nonzero()[0]
    cuts: I64 = ends + 1
    inner: I64 = cuts[cuts % tokens.shape[1] != 0]
    return inner


def position_ids(lengths: npt.ArrayLike, mode: str) -> I32:
    """Positions over documents of these lengths, end to end, as AstrAI's modes count them.

    >>> position_ids([2, 3], "doc_reset").tolist(), position_ids([2, 3], "continuous").tolist()
    ([0, 1, 0, 1, 2], [0, 1, 2, 3, 4])
    >>> len(position_ids([2, 3], "none"))
    0
    """
    sizes = np.asarray(lengths, np.int64)
    total = int(sizes.sum())
    match mode:
        case "none":
            return np.empty(0, np.int32)
        case "continuous":
            return np.arange(total, dtype=np.int32)
        case "doc_reset":
            return np.arange(total, dtype=np.int32) - np.repeat(
                (np.cumsum(sizes) - sizes).astype(np.int32), sizes
            )
    raise ConfigError(f"position ids are none, doc_reset or continuous, not {mode!r}")
