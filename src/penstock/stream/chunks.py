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
from penstock.pack import bounds_of, pack_rows

if TYPE_CHECKING:
    from penstock.stream.feed import Block

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as they are delivered, and where their documents begin."""

    tokens: npt.NDArray[Any]  # (n, width), padded at the end
    used: list[int]  # (n,) tokens of each row that are not padding
    cuts: I64  # columns at which another document begins, row by row
    first_cut: list[int]  # (n + 1,) where each row's begin among them

    def cuts_of(self, row: int) -> I64:
        """The columns of a row at which another document begins."""
        return self.cuts[self.first_cut[row] : self.first_cut[row + 1]]

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
    # The pieces of the rows, in the order of the rows.
    pieces = np.diff(packed.row_splits)[order]
    splits = bounds_of(pieces)
    row = np.repeat(np.arange(count), pieces)
    which = (packed.row_splits[order] - splits[:-1])[row] + np.arange(len(row))
    bounds = bounds_of(packed.length[which])
    column = bounds[:-1] - bounds[splits[:-1]][row]
    begin = offsets[packed.document[which]] + packed.start[which]
    tokens = np.full(count * width, pad, dtype)
    _copy(tokens, ids.astype(dtype, copy=False), row * width + column, begin, np.diff(bounds))
    inner = np.flatnonzero(column)
    return Rows(
        tokens.reshape(count, width),
        np.diff(bounds[splits]).tolist(),
        column[inner],
        inner.searchsorted(splits).tolist(),
    )


def _copy(out: npt.NDArray[Any], source: npt.NDArray[Any], to: I64, begin: I64, count: I64) -> None:
    """out[to : to + count] = source[begin : begin + count], for each of many.

    As memoryviews: numpy lets go of the interpreter for each of them, and with several threads at
    work gets it back late.
    """
    a, b = out.data, np.ascontiguousarray(source).data
    for i, j, n in zip(to.tolist(), begin.tolist(), count.tolist(), strict=True):
        a[i : i + n] = b[j : j + n]


def chunk_packer(
    seed: int | None, width: int, dtype: npt.DTypeLike, pad: int
) -> Callable[[Block], Rows]:
    """What packs a stream's blocks; without a seed, rows stay in packing order."""

    def pack(block: Block) -> Rows:
        key = None if seed is None else key_of("stream", seed, "rows", *block.at, block.part)
        return pack_chunk(block.ids, block.offsets, width=width, key=key, dtype=dtype, pad=pad)

    return pack
