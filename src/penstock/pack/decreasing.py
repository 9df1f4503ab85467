"""Best-fit decreasing: the longest first, each into the fullest row that still has room for it.

    >>> splits, order = place(np.array([3, 4, 1, 2]), 5)
    >>> splits.tolist(), order.tolist()             # doc 1 with doc 2, doc 0 with doc 3
    ([0, 2, 4], [1, 2, 0, 3])

Documents of one length are one class, and so are rows with one number of cells left. Placing a
class of documents into a class of rows is one step, whatever their numbers: each row takes as many
as fit, since a row that has just been used is the fullest with room. Rows move between classes as
stretches of consecutive numbers, and each move at least halves what is left, so the number of steps
depends on the capacity alone. Which classes of rows there are is a Python integer used as a set of
bits: the fullest row with room for a document is its lowest bit from the document's length on.

The rows are those of the textbook's loop, one document at a time: among documents of equal length
the first comes first, among rows equally full the one opened first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pack.policy import Packing
from penstock.pack.rows import I64, Bools, Ints, Ledger, Rows, histogram, small

BLOCK = 1 << 16  # documents written out at a time


def place(sizes: npt.NDArray[Any], capacity: int) -> tuple[I64, Ints]:
    """(row_splits, places in `sizes`, row by row) for sizes from 1 to `capacity`."""
    order, counts = _longest_first(sizes, capacity)
    steps = _Steps(capacity)
    for size in np.flatnonzero(counts)[::-1].tolist():
        steps.place(size, int(counts[size]))
    return _written(steps, order)


def _longest_first(sizes: npt.NDArray[Any], capacity: int) -> tuple[Ints, I64]:
    """Places by decreasing size, first come first, and how many there are of each size."""
    if not len(sizes):
        return np.empty(0, np.int32), np.zeros(capacity + 1, np.int64)
    dtype = np.uint16 if capacity < 1 << 16 else np.uint32  # numpy sorts 16 bits by radix
    keys = np.subtract(capacity, sizes, dtype=dtype, casting="unsafe")
    counts = np.bincount(keys, minlength=capacity + 1)[::-1]
    order = np.argsort(keys, kind="stable")
    return (order.astype(np.int32) if len(sizes) < 1 << 31 else order), counts


@dataclass(slots=True)
class _Steps:
    """The rows so far, by the cells they have left, and what was done to get there."""

    capacity: int
    rows: int = 0
    present: int = 0  # bit r: there are rows with r cells left
    classes: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    # (first row, number of rows, documents already in each), lowest row first
    log: list[tuple[int, int, int, int]] = field(default_factory=list)
    # (first row, documents for each, number of documents, documents already in each)

    def place(self, size: int, count: int) -> None:
        """Place `count` documents of `size`."""
        while count:
            fitting = self.present >> size
            if not fitting:
                self._open(size, count)
                return
            left = size + (fitting & -fitting).bit_length() - 1
            waiting = self.classes[left]
            first, rows, held = heappop(waiting)
            if not waiting:
                self.present &= ~(1 << left)
            count -= self._fill((first, rows, held), left, size, count)

    def _open(self, size: int, count: int) -> None:
        """Rows of their own, as many documents in each as fit."""
        rows = -(-count // (self.capacity // size))
        stretch = self.rows, rows, 0
        self.rows += rows
        self._fill(stretch, self.capacity, size, count)

    def _fill(self, stretch: tuple[int, int, int], left: int, size: int, count: int) -> int:
        """Fill a stretch of rows with documents; how many of `count` it took."""
        first, rows, held = stretch
        each = left // size
        full = min(rows, count // each)
        taken = full * each
        if full:
            self.log.append((first, each, taken, held))
            self._keep((first, full, held + each), left - each * size)
        if full < rows:
            rest = count - taken
            if rest:  # fewer than a row would take: they all go into one
                self.log.append((first + full, rest, rest, held))
                self._keep((first + full, 1, held + rest), left - rest * size)
                full, taken = full + 1, count
            if full < rows:
                self._keep((first + full, rows - full, held), left)
        return taken

    def _keep(self, stretch: tuple[int, int, int], left: int) -> None:
        if left:
            bit = 1 << left
            if self.present & bit:
                heappush(self.classes[left], stretch)
            else:
                self.present |= bit
                self.classes[left] = [stretch]


def _written(steps: _Steps, order: Ints) -> tuple[I64, Ints]:
    """The log as row_splits and places: it holds the documents in their order, longest first."""
    splits = np.zeros(steps.rows + 1, np.int64)
    if not steps.log:
        return splits, order
    first, each, count, held = (
        np.array(column, np.int64) for column in zip(*steps.log, strict=True)
    )
    last = first + count // each
    np.cumsum(_in_each_row(first, last, each, steps.rows), out=splits[1:])
    ends = np.cumsum(count)
    out = np.empty_like(order)
    for lo in range(0, len(order), BLOCK):
        hi = min(lo + BLOCK, len(order))
        a, b = np.searchsorted(ends, [lo, hi - 1], "right")
        step = slice(a, b + 1)
        inside = np.minimum(ends[step], hi) - np.maximum(ends[step] - count[step], lo)
        which = np.repeat(np.arange(a, b + 1), inside)
        number = np.arange(lo, hi) - (ends - count)[which]
        row, slot = np.divmod(number, each[which])
        out[splits[first[which] + row] + held[which] + slot] = order[lo:hi]
    return splits, out


def _in_each_row(first: I64, last: I64, each: I64, rows: int) -> I64:
    """How many documents each row has, from stretches [first, last) that got `each` more."""
    change = np.zeros(rows + 1, np.int64)
    np.add.at(change, first, each)
    np.subtract.at(change, last, each)
    return np.cumsum(change[:-1])


# --- documents to rows


def decreasing(lengths: Ints, base: int, packing: Packing) -> Rows:
    """Rows of documents that are numbered from `base` on, packed together."""
    room = packing.capacity - (packing.bos == "every")
    over = np.flatnonzero(lengths > room)
    empty = len(lengths) - int(np.count_nonzero(lengths))
    split = packing.overflow == "split"
    pieces = _split(lengths, over, packing) if split and len(over) else _whole(lengths, packing)
    cells = pieces.size if pieces.bos is None else pieces.size + pieces.bos
    splits, at = place(cells, packing.capacity)
    del cells
    document = at if pieces.document is None else _taken(pieces.document, at)
    narrow = small(int(lengths.max(initial=0)))
    length = _taken(pieces.size, at, narrow)
    start = np.zeros(len(at), narrow) if pieces.start is None else _taken(pieces.start, at)
    if packing.overflow == "truncate_start" and len(over):
        start = _taken(lengths, document, narrow) - length
    bos = np.zeros(len(at), np.bool_) if pieces.bos is None else pieces.bos[at]
    placed, tokens = (int(each.sum(dtype=np.int64)) for each in (length, lengths))
    rows, added = len(splits) - 1, int(bos.sum())
    ledger = Ledger(
        capacity=packing.capacity,
        rows=rows,
        documents=len(lengths),
        tokens=tokens,
        placed=placed,
        cropped=tokens - placed,
        bos=added,
        padding=rows * packing.capacity - placed - added,
        pieces=len(length),
        documents_empty=empty,
        documents_cropped=0 if split else len(over),
        documents_split=len(over) if split else 0,
        length_histogram=histogram(lengths),
        piece_histogram=histogram(length),
    )
    if base:
        document = document.astype(small(base + len(lengths)), copy=False) + base
    return Rows(splits, document, start, length, bos, ledger)


def _taken(values: Ints, at: Ints, dtype: npt.DTypeLike | None = None) -> Ints:
    """values[at], some at a time: numpy makes each index 8 bytes wide on the way."""
    out = np.empty(len(at), values.dtype if dtype is None else dtype)
    for lo in range(0, len(at), BLOCK):
        out[lo : lo + BLOCK] = values[at[lo : lo + BLOCK]]
    return out


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What is placed. None: documents as they are numbered, from their start, without BOS."""

    size: Ints  # without BOS
    document: Ints | None = None
    start: Ints | None = None
    bos: Bools | None = None


def _whole(lengths: Ints, packing: Packing) -> _Pieces:
    """One piece a document, cut to what a row holds; none for a document without tokens."""
    document = None
    if len(lengths) and not lengths.min():
        document = np.flatnonzero(lengths).astype(small(len(lengths)))
        lengths = lengths[document]
    every = packing.bos == "every"
    size = _at_most(lengths, packing.capacity - every, packing)
    return _Pieces(size, document, bos=np.ones(len(size), np.bool_) if every else None)


def _split(lengths: Ints, over: Ints, packing: Packing) -> _Pieces:
    """As many pieces as a document needs; those `over` need several."""
    first_room = packing.capacity - (packing.bos == "every")
    later_room = packing.capacity - (packing.bos != "never")
    long = lengths[over].astype(np.int64)
    several = 1 - (first_room - long) // later_room
    empty = np.flatnonzero(lengths == 0)
    before = np.cumsum(several - 1) - several + 1  # pieces more than documents, and empty ones less
    first_piece = over + before - empty.searchsorted(over)
    # of the long documents alone: which one each piece is of, and the how-manieth
    which = np.repeat(np.arange(len(over)), several)
    number = np.arange(len(which)) - np.repeat(np.cumsum(several) - several, several)
    piece = first_piece[which] + number
    narrow = small(len(lengths))
    document = np.ones(len(lengths) - len(empty) + int((several - 1).sum()), narrow)
    document[piece[number > 0]] = 0
    np.cumsum(document, dtype=narrow, out=document)
    document -= 1
    if len(empty):
        document = np.flatnonzero(lengths).astype(narrow)[document]
    size = _at_most(_taken(lengths, document), first_room, packing)
    begin = np.where(number > 0, first_room + (number - 1) * later_room, 0)
    size[piece] = np.minimum(long[which] - begin, np.where(number > 0, later_room, first_room))
    start = np.zeros(len(document), small(int(long.max())))
    start[piece] = begin
    if packing.bos == "never":
        return _Pieces(size, document, start)
    bos = np.full(len(document), packing.bos == "every")
    bos[piece] |= number > 0
    return _Pieces(size, document, start, bos)


def _at_most(lengths: Ints, room: int, packing: Packing) -> Ints:
    """Lengths cut to `room`, in the narrowest dtype that the capacity fits into."""
    if room <= np.iinfo(lengths.dtype).max:
        lengths = np.minimum(lengths, room)
    return lengths.astype(np.uint16 if packing.capacity < 1 << 16 else np.int64, copy=False)
