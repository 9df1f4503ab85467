"""The policy of nanochat: the longest waiting document that fits, else the shortest, cropped.

    >>> supply = iter([[5, 2, 3], [4, 4, 9]])
    >>> buffer = CropBuffer(6, 3, lambda: next(supply, None))
    >>> [buffer.row(), buffer.row(), buffer.row()]     # (document, tokens of it)
    [[(0, 5), (1, 1)], [(3, 4), (2, 2)], [(4, 4), (5, 2)]]

Known trouble, kept because it is the policy: documents longer than a row never fit and are never
the shortest, so they pile up until the buffer holds nothing else. With log-normal lengths around
400 tokens and rows of 2,048 they were 54% of the buffer after 1,000 rows and all of it after 2,000,
and what is cropped rose from 16% of the tokens to 26-35%. The ledger shows it. Closed chunks of
`best_fit_decreasing` do not have it.

Waiting lengths are a Python integer used as a set of bits: the longest that fits is its highest bit
below the room that is left, the shortest its lowest. nanochat scans the whole buffer for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush

import numpy as np

from penstock.pack.policy import Packing
from penstock.pack.rows import BLOCK, Ints, Ledger, Rows, capped, histogram, small

Supply = Callable[[], Sequence[int] | None]  # the next documents' lengths; None at the end


class CropBuffer:
    """Documents waiting for rows of `capacity` tokens, refilled from `supply` below `least`.

    Documents are numbered as they come. `supply` gives whole batches, so that more than `least`
    may wait; a document without tokens is let go of.
    """

    def __init__(self, capacity: int, least: int, supply: Supply) -> None:
        self.capacity, self.least = capacity, least
        self._supply: Supply | None = supply
        self._queues: dict[int, deque[int]] = {}  # by length, of those that ever waited
        self._present = 0  # bit k: documents of k tokens wait
        self._long: list[tuple[int, int]] = []  # (length, document) that no row can hold whole
        self._waiting = 0
        self._next = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def next_document(self) -> int:
        """The number that the next document to come will have."""
        return self._next

    def waiting(self) -> list[int]:
        """The documents that wait, in order of arrival: with `next_document`, an address."""
        short = (document for queue in self._queues.values() for document in queue)
        return sorted([*short, *(document for _, document in self._long)])

    def restore(self, next_document: int, waiting: Iterable[tuple[int, int]]) -> None:
        """Go on from an address: the documents that waited, each with its length."""
        assert not self._next, "an address is restored into a new buffer"
        for document, length in sorted(waiting):
            self._next = document
            self._add((length,))
        self._next = next_document

    def row(self) -> list[tuple[int, int]]:
        """The next row as (document, tokens of its start); it is full unless nothing is left."""
        pieces = []
        room = self.capacity
        while room:
            if self._waiting < self.least:
                self._refill()
            fitting = self._present & ((2 << room) - 1)
            if fitting:
                length = fitting.bit_length() - 1
                document = self._take(length)
                pieces.append((document, length))
                room -= length
                continue
            if not self._waiting:
                break
            pieces.append((self._shortest(), room))
            room = 0
        return pieces

    def _refill(self) -> None:
        while self._supply is not None and self._waiting < self.least:
            lengths = self._supply()
            if lengths is None:
                self._supply = None
            else:
                self._add(lengths)

    def _add(self, lengths: Sequence[int]) -> None:
        queues, capacity, document, came = self._queues, self.capacity, self._next, 0
        for length in lengths:
            if length > capacity:
                heappush(self._long, (length, document))
                self._waiting += 1
            elif length:
                if length not in queues:
                    queues[length] = deque()
                queues[length].append(document)
                came |= 1 << length
                self._waiting += 1
            document += 1
        self._next = document
        self._present |= came

    def _take(self, length: int) -> int:
        queue = self._queues[length]
        document = queue.popleft()
        if not queue:
            self._present ^= 1 << length
        self._waiting -= 1
        return document

    def _shortest(self) -> int:
        if self._present:
            return self._take((self._present & -self._present).bit_length() - 1)
        self._waiting -= 1
        return heappop(self._long)[1]


# --- documents to rows


def crop(blocks: Iterable[Ints], packing: Packing) -> Iterator[Rows]:
    """Rows by that policy, some thousand documents at a time."""
    arrived = _Arrivals(blocks, packing)
    added = int(packing.bos == "every")
    buffer = CropBuffer(packing.capacity, packing.buffer_size, arrived.next)
    counts: list[int] = []
    document: list[int] = []
    size: list[int] = []
    while row := buffer.row():
        if packing.last == "drop" and sum(cells for _, cells in row) < packing.capacity:
            arrived.lose(row)
            break
        counts.append(len(row))
        for each, cells in row:
            document.append(each)
            size.append(cells)
        if len(document) >= BLOCK:
            yield arrived.rows(counts, document, size, added)
            counts, document, size = [], [], []
    yield arrived.rows(counts, document, size, added)


class _Arrivals:
    """Documents in tokenizer batches that end where groups do, and the lengths of those waiting."""

    def __init__(self, blocks: Iterable[Ints], packing: Packing) -> None:
        self._blocks, self._packing = iter(capped(blocks)), packing
        self._groups = iter(np.cumsum(packing.groups or (), dtype=np.int64).tolist())
        self._group_end = next(self._groups, None)
        self._ahead: list[int] = []
        self._at = 0  # in `_ahead`
        self._count = 0  # documents given
        self._lengths: dict[int, int] = {}  # of documents given and not yet in a row
        self._came = Ledger(capacity=packing.capacity)

    def next(self) -> list[int] | None:
        """One batch, BOS counted."""
        most = self._packing.refill
        while self._group_end is not None and self._group_end <= self._count:
            self._group_end = next(self._groups, None)
        if self._group_end is not None:
            most = min(most, self._group_end - self._count)
        while len(self._ahead) - self._at < most:
            block = next(self._blocks, None)
            if block is None:
                break
            self._ahead = self._ahead[self._at :] + block.tolist()
            self._at = 0
            self._came += Ledger(
                capacity=self._packing.capacity,
                documents=len(block),
                tokens=int(block.sum(dtype=np.int64)),
                documents_empty=int((block == 0).sum()),
                length_histogram=histogram(block),
            )
        batch = self._ahead[self._at : self._at + most]
        if not batch:
            return None
        self._at += len(batch)
        self._lengths.update(enumerate(batch, self._count))
        self._count += len(batch)
        if self._packing.bos == "every":
            return [length + 1 if length else 0 for length in batch]
        return batch

    def lose(self, row: list[tuple[int, int]]) -> None:
        """The last row is dropped, as it is not full."""
        lost = sum(self._lengths.pop(document) for document, _ in row)
        self._came += Ledger(capacity=self._packing.capacity, dropped=lost)

    def rows(self, counts: list[int], document: list[int], size: list[int], added: int) -> Rows:
        """Rows from the pieces' documents and cells."""
        whole = np.array([self._lengths.pop(each) for each in document], np.int64)
        length = np.array(size, np.int64) - added
        placed, cells = int(length.sum()), len(counts) * self._packing.capacity
        ledger = self._came + Ledger(
            capacity=self._packing.capacity,
            rows=len(counts),
            placed=placed,
            cropped=int((whole - length).sum()),
            bos=added * len(length),
            padding=cells - placed - added * len(length),
            pieces=len(length),
            documents_cropped=int((length < whole).sum()),
            piece_histogram=histogram(length),
        )
        self._came = Ledger(capacity=self._packing.capacity)
        narrow = small(int(whole.max(initial=0)))
        return Rows(
            np.cumsum([0, *counts]),
            np.array(document, small(self._count)),
            np.zeros(len(length), narrow),
            length.astype(narrow),
            np.full(len(length), bool(added)),
            ledger,
        )
