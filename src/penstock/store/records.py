"""Where records begin and end: offsets, from any number of shards, without a Python object each.

A `Level` cuts the values below it into entries. Plain records are one level, record → tokens;
a prompt's group of responses is two, record → responses and response → tokens.

    >>> level = Level.of([np.array([0, 2, 5]), np.array([0, 0, 4])])     # two shards
    >>> [edge.tolist() for edge in level.spans(np.arange(4))]
    [[0, 2, 5, 5], [2, 5, 5, 9]]
    >>> level.owner(np.array([1, 5, 8])).tolist()                        # record 2 is empty
    [0, 3, 3]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pack import bounds_of
from penstock.store.segments import I64, Column, spread


class Level:
    """Entries of one level, numbered over all parts (a part is a shard's offsets array).

    `offsets` holds the parts end to end, each one longer than it has entries, rising from 0 in
    its own part, which was checked when it was opened; `base[p]` is where part p begins in the
    values below.
    """

    def __init__(self, entries: I64, base: I64, offsets: Column) -> None:
        assert len(entries) == len(base) == offsets.shards + 1
        self.entries = entries
        self.base = base
        self.offsets = offsets
        self.total = int(entries[-1])

    @classmethod
    def of(cls, parts: Sequence[npt.NDArray[Any]]) -> Level:
        """A level over offsets in memory."""
        arrays = [np.asarray(part, np.int64) for part in parts]
        return cls(
            bounds_of([len(part) - 1 for part in arrays]),
            bounds_of([part[-1] for part in arrays]),
            Column.of(arrays),
        )

    def edges(self, entries: I64) -> I64:
        """Where entries begin in the values below; entry `total` begins at the end."""
        part = np.minimum(self.entries.searchsorted(entries, "right") - 1, self.offsets.shards - 1)
        if self.offsets.shards <= 1:
            return self._part(0)[entries] if self.offsets.shards else np.zeros_like(entries)
        found = np.empty(len(entries), np.int64)
        for index, rows in _groups(part):
            local = self._part(index)[entries[rows] - self.entries[index]]
            found[rows] = local + self.base[index]
        return found

    def spans(self, entries: I64) -> tuple[I64, I64]:
        """Begin and end of each entry in the values below."""
        return self.edges(entries), self.edges(entries + 1)

    def owner(self, positions: I64) -> I64:
        """Which entry holds each position of the values below; empty entries hold none."""
        if self.offsets.shards == 1:
            return self._part(0).searchsorted(positions, "right") - 1
        part = self.base.searchsorted(positions, "right") - 1
        found = np.empty(len(positions), np.int64)
        for index, rows in _groups(part):
            local = self._part(index).searchsorted(positions[rows] - self.base[index], "right") - 1
            found[rows] = local + self.entries[index]
        return found

    def lengths(self, begin: int, end: int) -> I64:
        """Lengths of entries [begin, end), read in one stretch a part."""
        pieces = []
        while begin < end:
            index = int(self.entries.searchsorted(begin, "right")) - 1
            first, stop = int(self.entries[index]), min(end, int(self.entries[index + 1]))
            pieces.append(np.diff(self._part(index)[begin - first : stop - first + 1]))
            begin = stop
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def cuts(self, starts: I64, length: int) -> I64:
        """Sorted places row * length + column, 0 < column < length, at which an entry begins."""
        if length <= 1 or not len(starts) or not self.total:
            return np.empty(0, np.int64)
        if self.offsets.shards == 1:
            return self._cuts_of_one(starts, length)
        row, part, begin, end = spread(self.base, starts, length)
        order = np.argsort(part, kind="stable")
        row, part, begin, end = row[order], part[order], begin[order], end[order]
        shift = row * length - starts[row] + self.base[part]
        # A piece's first value is a cut too, unless it is its row's first.
        inner = np.stack([begin + (shift + begin == row * length), end], 1)
        pieces, counts = [], np.empty(len(row), np.int64)
        for index, rows in _runs(part):
            offsets = self._part(index)[:-1]
            found = offsets.searchsorted(inner[rows])
            counts[rows] = found[:, 1] - found[:, 0]
            pieces += [offsets[low:high] for low, high in found.tolist()]
        flat = np.concatenate(pieces) + np.repeat(shift, counts)
        flat.sort()
        return _without_repeats(flat)

    def _cuts_of_one(self, starts: I64, length: int) -> I64:
        offsets = self._part(0)[:-1]
        low = offsets.searchsorted(starts, "right")
        counts = offsets.searchsorted(starts + length) - low
        ends = np.add.accumulate(counts)
        shift = np.arange(0, len(starts) * length, length) - starts
        within = np.arange(ends[-1]) + (low - ends + counts).repeat(counts)
        return _without_repeats(offsets[within] + shift.repeat(counts))

    def _part(self, index: int) -> I64:
        found = self.offsets.segment(index)
        assert isinstance(found, np.ndarray)
        return found


def _groups(part: I64) -> Iterator[tuple[int, I64 | slice]]:
    """Each part that occurs, with the places at which it does."""
    if not len(part):
        return
    if part[0] == part[-1] and (part == part[0]).all():
        yield int(part[0]), slice(None)
        return
    order = np.argsort(part, kind="stable")
    for index, run in _runs(part[order]):
        yield index, order[run]


def _runs(part: I64) -> Iterator[tuple[int, slice]]:
    """Stretches of one value in a sorted array."""
    edges = [0, *(np.flatnonzero(part[1:] != part[:-1]) + 1).tolist(), len(part)]
    for begin, end in itertools.pairwise(edges):
        yield int(part[begin]), slice(begin, end)


def _without_repeats(flat: I64) -> I64:
    """Empty records begin where the next one does, which is one cut."""
    same = flat[1:] == flat[:-1]
    return flat[np.concatenate(([True], ~same))] if same.any() else flat
