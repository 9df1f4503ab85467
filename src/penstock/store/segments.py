"""One key of a store: its shards end to end, each opened when it is first read.

Positions are counted over all shards: shard s holds [bounds[s], bounds[s + 1]).

    >>> column = Column.of([np.arange(3), np.arange(10, 14)])
    >>> column.total, column.bounds.tolist()
    (7, [0, 3, 7])
    >>> column.read(2, 5).tolist()
    [2, 10, 11]
    >>> column.gather(np.array([0, 2]), 3).tolist()
    [[0, 1, 2], [2, 10, 11]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError, OutOfBounds
from penstock.pack import bounds_of
from penstock.store.advice import expect_random
from penstock.store.mapping import POOL

Array = npt.NDArray[Any]
I64 = npt.NDArray[np.int64]


class Segment(Protocol):
    """What a shard has to be: an array, or something that reads slices as arrays."""

    def __getitem__(self, span: slice, /) -> Array: ...


def common_dtype(dtypes: Sequence[np.dtype[Any]], where: object) -> np.dtype[Any]:
    """The dtype that holds every shard's values exactly."""
    if not dtypes:
        return np.dtype(np.int64)
    found = np.result_type(*dict.fromkeys(dtypes)).newbyteorder("=")
    if found.kind == "f" and any(dtype.kind in "iu" for dtype in dtypes):
        names = ", ".join(sorted({str(dtype) for dtype in dtypes}))
        raise DataError(
            f"{where} mixes {names}, which no integer dtype holds: write it again with one dtype."
        )
    return found


def spread(bounds: I64, starts: I64, length: int | I64) -> tuple[I64, I64, I64, I64]:
    """Cut the spans [start, start + length), lengths > 0, at the shards' ends.

    Gives for each piece, in the order of the spans: span, shard, begin and end in that shard.

    >>> [piece.tolist() for piece in spread(bounds_of([3, 4]), np.array([2, 0]), 3)]
    [[0, 0, 1], [0, 1, 0], [2, 0, 0], [3, 2, 3]]
    """
    following = bounds.searchsorted(starts, "right")
    shard = following - 1
    rows = np.arange(len(starts))
    ends = starts + length
    over = ends > bounds[following]
    if not over.any():
        base = bounds[shard]
        return rows, shard, starts - base, ends - base
    last = shard.copy()
    last[over] = bounds.searchsorted(ends[over] - 1, "right") - 1
    counts = last - shard + 1
    rows = np.repeat(rows, counts)
    shard = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - shard, counts)
    begin = np.maximum(starts[rows], bounds[shard])
    end = np.minimum(ends[rows], bounds[shard + 1])
    some = end > begin  # an empty shard between two others
    base = bounds[shard]
    return rows[some], shard[some], (begin - base)[some], (end - base)[some]


def positions_of(values: npt.ArrayLike, length: int, what: str) -> I64:
    """Record numbers or positions as int64, all of them below `length`."""
    found = np.asarray(values)
    if found.dtype.kind not in "iu" and found.size:
        raise ConfigError(f"{what}s are {found.dtype}, where integers were expected.")
    found = np.atleast_1d(found.astype(np.int64, copy=False))
    if found.size and int(np.maximum.reduce(found.view(np.uint64))) >= length:
        wrong = found[(found < 0) | (found >= length)][0]
        raise OutOfBounds(f"{what} {wrong} is out of bounds: there are {length}.")
    return found


class Column:
    """The values of one key over all shards.

    `opener(s)` gives shard s, read-only. A column is safe to read from many threads: a mapped
    shard is found without a lock, one that two threads open at once is opened twice.
    """

    def __init__(
        self,
        dtype: np.dtype[Any],
        bounds: I64,
        opener: Callable[[int], Segment] | None,
        *,
        pooled: bool = True,
    ) -> None:
        self.dtype = dtype
        self.bounds = bounds
        self.shards = len(bounds) - 1
        self.total = int(bounds[-1])
        self._slots: list[Segment | None] = [None] * self.shards
        self._touched = np.zeros(self.shards, np.bool_)
        self._opener = opener
        self._pooled = pooled
        self._random = False
        self._flat: Array | None = None
        self._windows: tuple[Array, int, Array] | None = None

    @classmethod
    def of(cls, arrays: Sequence[Array], *, flat: Array | None = None) -> Column:
        """A column over arrays in memory; `flat`, if there is one, is an array of them all."""
        arrays = [np.ascontiguousarray(array) for array in arrays]
        for array in arrays:
            if array.ndim != 1:
                raise DataError(f"An array has shape {array.shape}; one dimension was expected.")
        dtype = common_dtype([array.dtype for array in arrays], "the data")
        column = cls(dtype, bounds_of([len(array) for array in arrays]), None, pooled=False)
        for index, array in enumerate(arrays):
            column._keep(index, _read_only(array))
        column._flat = None if flat is None else _read_only(flat)
        return column

    def segment(self, index: int) -> Segment:
        """Shard `index`, opened now if it was not."""
        found = self._slots[index]
        if found is None:
            return self._open(index)
        self._touched[index] = True
        return found

    def arrays(self) -> list[Array]:
        """Every shard, as a read-only array."""
        return [_read_only(self.read(begin, end)) for begin, end in pairwise(self.bounds.tolist())]

    def read(self, begin: int, end: int) -> Array:
        """Values [begin, end): a view where one shard holds them, else a copy. Unchecked."""
        if self.shards == 1:
            return self._cast(self.segment(0)[begin:end])
        if begin >= end:
            return np.empty(0, self.dtype)
        pieces = []
        shard = int(self.bounds.searchsorted(begin, "right")) - 1
        while begin < end:
            base, stop = int(self.bounds[shard]), min(end, int(self.bounds[shard + 1]))
            if stop > begin:
                pieces.append(self.segment(shard)[begin - base : stop - base])
                begin = stop
            shard += 1
        if len(pieces) == 1:
            return self._cast(pieces[0])
        return np.concatenate(pieces, dtype=self.dtype)

    def gather(self, starts: npt.ArrayLike, length: int, out: Array | None = None) -> Array:
        """Rows [start, start + length), one for each start, in the stored dtype, C-contiguous."""
        index = self.check(starts, length)
        if out is not None:
            self._check_out(out, (len(index), length))
        flat = self._contiguous()
        if flat is not None:
            rows: Array = self._view(flat, length)[index]
            if out is None:
                return rows
            np.copyto(out, rows)
            return out
        if out is None:
            out = np.empty((len(index), length), self.dtype)
        if out.size:
            np.concatenate(self._pieces(index, length), out=out.reshape(-1))
        return out

    def spans(self, starts: npt.ArrayLike, lengths: npt.ArrayLike) -> Array:
        """The spans [start, start + length), of any lengths, end to end in one array."""
        index, sizes = self.check_spans(starts, lengths)
        out = np.empty(int(sizes.sum()), self.dtype)
        if len(index):
            np.concatenate(self._pieces(index, sizes), out=out)
        return out

    def check_spans(self, starts: npt.ArrayLike, lengths: npt.ArrayLike) -> tuple[I64, I64]:
        """Starts and lengths as int64, those of no length left out; all spans lie inside."""
        index, sizes = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
        some = sizes != 0
        if not some.all():
            index, sizes = index[some], sizes[some]
        ends = index + sizes
        if len(index) and not (index.min() >= 0 and sizes.min() > 0 and ends.max() <= self.total):
            wrong = (index < 0) | (sizes < 0) | (ends > self.total)
            raise OutOfBounds(
                f"Span out of bounds: begin={index[wrong][0]}, end={ends[wrong][0]}, "
                f"length={self.total}."
            )
        return index, sizes

    def check(self, starts: npt.ArrayLike, length: int) -> I64:
        """The starts as int64, all of whose spans lie inside."""
        index = np.asarray(starts)
        if index.dtype.kind not in "iu" and index.size:
            raise ConfigError(f"starts are {index.dtype}, where integers were expected.")
        if index.ndim != 1:
            raise ConfigError(f"starts have shape {index.shape}, where one dimension was expected.")
        index = np.ascontiguousarray(index, np.int64)
        # Seen as unsigned, a negative start is a huge one: one reduction checks both ends.
        if len(index) and (
            not 0 <= length <= self.total
            or int(np.maximum.reduce(index.view(np.uint64))) > self.total - length
        ):
            wrong = index[(index < 0) | (index > self.total - length)] if length >= 0 else index
            begin = int(wrong[0]) if len(wrong) else int(index[0])
            raise OutOfBounds(
                f"Row out of bounds: begin={begin}, end={begin + length}, length={self.total}."
            )
        return index

    def ranges(self, index: I64, length: int | I64) -> tuple[I64, I64, list[Segment]]:
        """Addresses [begin, end) of the spans in mapped shards, and what keeps them mapped."""
        if not len(index) or (isinstance(length, int) and not length):
            return np.empty(0, np.int64), np.empty(0, np.int64), []
        _, shard, begin, end = spread(self.bounds, index, length)
        opened, which = np.unique(shard, return_inverse=True)
        kept = [self.segment(s) for s in opened.tolist()]
        address = np.array([self._address(segment) for segment in kept], np.int64)[which]
        mapped, size = address != 0, self.dtype.itemsize
        begin, end = address + begin * size, address + end * size
        return begin[mapped], end[mapped], kept

    def expect_random(self) -> None:
        """From now on rows are read in no order: the system should not read around them."""
        with POOL.lock:
            self._random = True
            for segment in self._slots:
                if segment is not None:
                    self._advise_random(segment)

    def close(self) -> None:
        """Let go of every shard; reading after this says that the store is closed."""
        with POOL.lock:
            POOL.forget(self)
            self._opener = _closed
            for index, segment in enumerate(self._slots):
                if segment is not None:
                    self.drop(index)

    def touched(self, index: int) -> bool:
        """Whether a shard was read since last asked."""
        was = bool(self._touched[index])
        self._touched[index] = False
        return was

    def drop(self, index: int) -> None:
        """Let go of one shard; it is opened again when it is read again."""
        self._flat = self._windows = None
        self._slots[index] = None

    def _open(self, index: int) -> Segment:
        assert self._opener is not None
        found = self._opener(index)
        with POOL.lock:
            kept = self._slots[index]
            if kept is not None:
                return kept
            if self._opener is _closed:  # by another thread, meanwhile
                return found
            self._keep(index, found)
            if self._pooled:
                POOL.admit(self, index)
        return found

    def _keep(self, index: int, segment: Segment) -> None:
        self._slots[index] = segment
        if self._random:
            self._advise_random(segment)

    def _address(self, segment: Segment) -> int:
        """Where a mapped shard lies in memory; 0 for what is not an array of this dtype."""
        if not isinstance(segment, np.ndarray) or segment.dtype != self.dtype or not segment.size:
            return 0
        address: int = segment.__array_interface__["data"][0]
        return address

    def _advise_random(self, segment: Segment) -> None:
        if self._pooled and self._address(segment) and isinstance(segment, np.ndarray):
            expect_random(self._address(segment), segment.nbytes)

    def _contiguous(self) -> Array | None:
        """All values as one array, where they lie so."""
        if self._flat is not None or self.shards != 1:
            return self._flat
        only = self.segment(0)
        if isinstance(only, np.ndarray) and only.dtype == self.dtype:
            self._flat = only
        return self._flat

    def _view(self, flat: Array, length: int) -> Array:
        """Row s of this (total - length + 1, length) view is flat[s : s + length]; no copy."""
        cached = self._windows
        if cached is not None and cached[0] is flat and cached[1] == length:
            return cached[2]
        shape = max(len(flat) - length + 1, 0), length
        strides = flat.itemsize, flat.itemsize
        view = np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)
        self._windows = (flat, length, view)
        return view

    def _pieces(self, starts: I64, length: int | I64) -> list[Array]:
        _, shard, begin, end = spread(self.bounds, starts, length)
        self._touched[shard] = True
        slots, found = self._slots, []
        for s, b, e in zip(shard.tolist(), begin.tolist(), end.tolist(), strict=True):
            segment = slots[s]
            if segment is None:
                segment = self._open(s)
            found.append(segment[b:e])
        return found

    def _cast(self, values: Array) -> Array:
        return values if values.dtype == self.dtype else values.astype(self.dtype)

    def _check_out(self, out: Array, shape: tuple[int, int]) -> None:
        if out.shape != shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ConfigError(
                f"out is {out.dtype} {out.shape}, where C-contiguous {self.dtype} {shape} was "
                "expected."
            )


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def _closed(_: int) -> Segment:
    raise RuntimeError("Store is closed: load it again to read from it.")
