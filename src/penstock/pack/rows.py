"""What a packing is: `Rows` of pieces of documents, and the `Ledger` that accounts for them.

    >>> rows = Rows.of([[(0, 0, 3), (2, 0, 1)], [(1, 0, 4)]], capacity=4)
    >>> rows.row_splits.tolist(), rows.document.tolist(), rows.length.tolist()
    ([0, 2, 3], [0, 2, 1], [3, 1, 4])

A *piece* is tokens [start, start + length) of a document; the pieces of row r are those from
row_splits[r] to row_splits[r + 1], in the order in which they stand in the row. Nothing here knows
tokens: they are gathered afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[Any]  # whole numbers, of any width
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

BLOCK = 1 << 16  # documents looked at together, where they come one after the other
BUCKETS = 48  # powers of two in a histogram: lengths up to 2^48


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where every token went: what came in is what stands in rows, was cropped, or was dropped.

        tokens          = placed + cropped + dropped
        rows * capacity = placed + repeated + bos + padding

    Two ledgers add up to that of both packings together.
    """

    capacity: int
    rows: int = 0
    documents: int = 0
    tokens: int = 0  # came in
    placed: int = 0  # stand in a row, each counted once
    cropped: int = 0  # cut off documents, and lost
    dropped: int = 0  # of a last row that was not full, and lost with it
    repeated: int = 0  # stand in a second row, as its first token
    bos: int = 0  # put before pieces
    padding: int = 0
    pieces: int = 0
    documents_empty: int = 0  # without a token, and so in no row
    documents_cropped: int = 0
    documents_split: int = 0  # in several pieces, whether or not they were cropped as well
    length_histogram: tuple[int, ...] = field(default=(0,) * BUCKETS)  # of documents, see below
    piece_histogram: tuple[int, ...] = field(default=(0,) * BUCKETS)

    @property
    def utilisation(self) -> float:
        """The share of rows that is not padding."""
        cells = self.rows * self.capacity
        return 1 - self.padding / cells if cells else 1.0

    @property
    def balanced(self) -> bool:
        """Whether it adds up, as it always should."""
        cells = self.placed + self.repeated + self.bos + self.padding
        return (
            self.tokens == self.placed + self.cropped + self.dropped
            and self.rows * self.capacity == cells
        )

    def __add__(self, other: Ledger) -> Ledger:
        assert self.capacity == other.capacity, "rows of one size only"
        summed: dict[str, Any] = {"capacity": self.capacity}
        for each in fields(self)[1:]:
            a, b = getattr(self, each.name), getattr(other, each.name)
            both = (
                tuple(x + y for x, y in zip(a, b, strict=True)) if a.__class__ is tuple else a + b
            )
            summed[each.name] = both
        return Ledger(**summed)

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Bucket k of a histogram counts lengths in [2^k, 2^(k + 1))."""
        plain = asdict(self) | {"utilisation": self.utilisation}
        for name in ("length_histogram", "piece_histogram"):
            counts = list(plain[name])
            while counts and not counts[-1]:
                counts.pop()
            plain[name] = counts
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Ledger:
        """What `to_dict` gave."""
        known = {each.name: plain[each.name] for each in fields(cls) if each.name in plain}
        for name in ("length_histogram", "piece_histogram"):
            known[name] = tuple(known[name]) + (0,) * (BUCKETS - len(known[name]))
        return cls(**known)


def histogram(lengths: Ints) -> tuple[int, ...]:
    """How many lengths lie in [2^k, 2^(k + 1)), for k from 0 on; lengths of 0 are left out.

    >>> histogram(np.array([1, 2, 3, 0, 4]))[:3]
    (1, 2, 1)
    """
    found = np.zeros(BUCKETS, np.int64)
    for part in capped([lengths]):  # frexp makes floats of them
        found += np.bincount(np.frexp(part)[1], minlength=BUCKETS + 1)[1 : BUCKETS + 1]
    return tuple(found.tolist())


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of pieces. Numbers are int32 where they fit, else int64."""

    row_splits: I64  # (rows + 1,)
    document: Ints  # (pieces,)
    start: Ints
    length: Ints
    bos: Bools  # whether a BOS was put before the piece
    ledger: Ledger

    def __len__(self) -> int:
        return len(self.row_splits) - 1

    @classmethod
    def of(cls, rows: Sequence[Sequence[tuple[int, int, int]]], capacity: int) -> Rows:
        """Rows from lists of (document, start, length): for examples and tests."""
        pieces = np.array([piece for row in rows for piece in row], np.int32).reshape(-1, 3)
        splits = np.cumsum([0, *map(len, rows)])
        placed = int(pieces[:, 2].sum())
        document, start, length = pieces.T.copy()
        ledger = Ledger(
            capacity=capacity,
            rows=len(rows),
            documents=len(set(document.tolist())),
            tokens=placed,
            placed=placed,
            padding=len(rows) * capacity - placed,
            pieces=len(pieces),
        )
        return cls(splits, document, start, length, np.zeros(len(pieces), np.bool_), ledger)

    def used(self) -> I64:
        """Tokens in each row, BOS included, padding not."""
        return sums(self.length.astype(np.int64) + self.bos, self.row_splits)

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """(document, start, length) of each piece of a row."""
        span = slice(self.row_splits[row], self.row_splits[row + 1])
        columns = (self.document[span], self.start[span], self.length[span])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def sums(values: Ints, splits: I64) -> I64:
    """Sums of the stretches between `splits`, which may be empty.

    >>> sums(np.array([1, 2, 3]), np.array([0, 2, 2, 3])).tolist()
    [3, 0, 3]
    """
    total = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=total[1:])
    return np.diff(total[splits])


def join(parts: Sequence[Rows], capacity: int) -> Rows:
    """Packings one after the other; their documents are numbered over all of them already."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Rows.of([], capacity)
    ends = np.cumsum([0, *(part.row_splits[-1] for part in parts)])
    splits = [part.row_splits[1:] + end for part, end in zip(parts, ends[:-1], strict=True)]
    return Rows(
        np.concatenate([[0], *splits]),
        np.concatenate([part.document for part in parts]),
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.length for part in parts]),
        np.concatenate([part.bos for part in parts]),
        reduce(Ledger.__add__, (part.ledger for part in parts)),
    )


def capped(blocks: Iterable[Ints]) -> Iterator[Ints]:
    """Blocks of at most BLOCK documents."""
    for block in blocks:
        for at in range(0, len(block), BLOCK):
            yield block[at : at + BLOCK]


def small(largest: int) -> npt.DTypeLike:
    """The dtype of numbers up to `largest`."""
    return np.int32 if largest < 1 << 31 else np.int64


def bounds_of(counts: npt.ArrayLike) -> I64:
    """Starts of consecutive stretches, and their end.

    >>> bounds_of([3, 0, 4]).tolist()
    [0, 3, 3, 7]
    """
    found = np.zeros(np.size(counts) + 1, np.int64)
    np.cumsum(counts, out=found[1:])
    return found
