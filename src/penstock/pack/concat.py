"""One stream of documents cut into rows: nothing is lost, and documents are cut where rows end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from penstock.pack.policy import Packing
from penstock.pack.rows import I64, Ints, Ledger, Rows, capped, histogram, small


def concat(blocks: Iterable[Ints], packing: Packing) -> Iterator[Rows]:
    """One stream cut into rows, each `stride` tokens on from the one before."""
    stream = _Stream(packing)
    for block in capped(blocks):
        stream.take(block)
        rows = (stream.ahead - packing.overlap) // stream.stride
        if rows > 0:
            yield stream.rows(rows)
    again = packing.overlap if stream.started else 0  # of what is ahead, in a row already
    if stream.ahead > again:
        if packing.last == "pad":
            yield stream.rows(1)
            return
        stream.came += Ledger(capacity=packing.capacity, dropped=stream.ahead - again)
    yield replace(Rows.of([], packing.capacity), ledger=stream.came)


class _Stream:
    """The documents that rows of a stream have not used up, from document `base` on."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self.stride = packing.capacity - packing.overlap
        self.lengths = self.kept = np.empty(0, np.int64)  # as they came; as they are truncated
        self.base = 0
        self.begin = 0  # where the next row begins, counted from the start of document `base`
        self.started = False
        self.came = Ledger(capacity=packing.capacity)  # what is known of documents not in rows yet

    @property
    def ahead(self) -> int:
        """Tokens from the next row's first one on."""
        return int(self.kept.sum()) - self.begin

    def take(self, block: Ints) -> None:
        """More documents."""
        lengths = block.astype(np.int64)
        kept = np.minimum(lengths, self.packing.capacity) if self.packing.overflow else lengths
        self.lengths = np.concatenate([self.lengths, lengths])
        self.kept = np.concatenate([self.kept, kept])
        self.came += Ledger(
            capacity=self.packing.capacity,
            documents=len(lengths),
            tokens=int(lengths.sum()),
            cropped=int((lengths - kept).sum()),
            documents_empty=int((lengths == 0).sum()),
            documents_cropped=int((kept < lengths).sum()),
            length_histogram=histogram(lengths),
        )

    def rows(self, count: int) -> Rows:
        """The next rows; all are full but the stream's last."""
        capacity, overlap = self.packing.capacity, self.packing.overlap
        ends = np.cumsum(self.kept)
        begins = ends - self.kept
        row_begin = self.begin + np.arange(count) * self.stride
        row_end = np.minimum(row_begin + capacity, ends[-1])
        first = np.searchsorted(ends, row_begin, "right")  # the document of a row's first token
        past = np.searchsorted(begins, row_end, "left")  # one past that of its last
        row = np.repeat(np.arange(count), past - first)
        document = np.arange(len(row)) - np.repeat(np.cumsum(past - first) - past, past - first)
        a = np.maximum(begins[document], row_begin[row])
        b = np.minimum(ends[document], row_end[row])
        there = b > a  # unlike empty documents between two others
        row, document, a, b = row[there], document[there], a[there], b[there]
        second = (begins[document] < a) & (begins[document] >= row_begin[row] - self.stride)
        start, length = a - begins[document], b - a
        if self.packing.overflow == "truncate_start":
            start += (self.lengths - self.kept)[document]
        used = int(length.sum())
        repeated = overlap * (count - 1 + self.started)
        ledger = self.came + Ledger(
            capacity=capacity,
            rows=count,
            placed=used - repeated,
            repeated=repeated,
            padding=count * capacity - used,
            pieces=len(length),
            documents_split=int(second.sum()),
            piece_histogram=histogram(length),
        )
        splits = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(row, minlength=count), out=splits[1:])
        narrow = small(int(self.lengths.max()))
        made = Rows(
            splits,
            (document + self.base).astype(small(self.base + len(self.kept))),
            start.astype(narrow),
            length.astype(narrow),
            np.zeros(len(length), np.bool_),
            ledger,
        )
        self._leave(self.begin + count * self.stride, ends)
        return made

    def _leave(self, begin: int, ends: I64) -> None:
        """Let go of the documents that end at `begin` or before."""
        gone = int(np.searchsorted(ends, begin, "right"))
        self.begin = begin - (int(ends[gone - 1]) if gone else 0)
        self.lengths, self.kept = self.lengths[gone:], self.kept[gone:]
        self.base += gone
        self.started, self.came = True, Ledger(capacity=self.packing.capacity)
