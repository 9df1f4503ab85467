"""A closed chunk of documents as full rows: nothing is carried over to the next one.

    >>> ids, offsets = np.arange(9, dtype=np.uint32), np.array([0, 3, 7, 9])
    >>> chunk = pack_chunk(ids, offsets, width=5, key=0, dtype=np.uint16, pad=0)
    >>> sorted(row.tolist() for row in chunk.tokens)
    [[0, 1, 2, 7, 8], [3, 4, 5, 6, 0]]

Documents longer than a row are cut into rows first; best-fit decreasing places the rest; the rows
are permuted by key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.order import Permutation
from penstock.order.hashing import key_of
from penstock.pack import Rows as Packed
from penstock.pack import pack_rows

if TYPE_CHECKING:
    from penstock.stream.feed import Block

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as they are delivered, and where their documents begin."""

    tokens: npt.NDArray[Any]  # (n, width), padded at the end
    used: list[int]  # (n,) tokens of each row that are not padding
    cuts: list[I64]  # (n,) columns at which another document begins

    def __len__(self) -> int:
        return len(self.used)


def plan_chunk(lengths: I64, width: int) -> Packed:
    """Which document stands where: of lengths alone.

    >>> len(plan_chunk(np.array([3, 4, 2]), 5))
    2
    """
    return pack_rows(lengths, width, "best_fit_decreasing", overflow="split")


def pack_chunk(
    ids: npt.NDArray[np.uint32],
    offsets: I64,
    *,
    width: int,
    key: int | None,
    dtype: npt.DTypeLike,
    pad: int,
) -> Rows:
    """The documents of a chunk as rows of `width` tokens; without a key in packing order."""
    packed = plan_chunk(np.diff(offsets), width)
    count = len(packed)
    order = np.arange(count) if key is None else Permutation(count, key)(np.arange(count))
    tokens = np.full((count, width), pad, dtype)
    begins = (offsets[packed.document] + packed.start).tolist()
    lengths, splits = packed.length.tolist(), packed.row_splits.tolist()
    used, cuts = [], []
    for row, source in zip(tokens, order.tolist(), strict=True):
        at, inner = 0, []
        lo, hi = splits[source], splits[source + 1]
        for begin, length in zip(begins[lo:hi], lengths[lo:hi], strict=True):
            inner.append(at)
            row[at : at + length] = ids[begin : begin + length]
            at += length
        used.append(at)
        cuts.append(np.array(inner[1:], np.int64))
    return Rows(tokens, used, cuts)


def chunk_packer(
    seed: int | None, width: int, dtype: npt.DTypeLike, pad: int
) -> Callable[[Block], Rows]:
    """What packs a stream's blocks; without a seed, rows stay in packing order."""

    def pack(block: Block) -> Rows:
        key = None if seed is None else key_of("stream", seed, "rows", *block.at, block.part)
        return pack_chunk(block.ids, block.offsets, width=width, key=key, dtype=dtype, pad=pad)

    return pack
