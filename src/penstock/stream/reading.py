"""Units as documents: in closed chunks, or in batches of so many.

    reader = Reader(corpus, "text", policy="error")
    for docs in reader.chunks(unit): ...           # up to 8 MiB of text each; most units are one
    for docs in reader.batches(unit, 128): ...

What is refused is an error, or counted and left out; documents are numbered in their unit without
those. Memory is bounded by a chunk, not by a row group.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DataError, MissingData
from penstock.stream.corpus import KEPT, Corpus, footers_of
from penstock.text.batches import Texts, Unit
from penstock.text.documents import Policy, Reject, find_files, read_texts, refuse

CHUNK = 8 << 20  # bytes of text after which a chunk is closed
# Bytes of row groups that are held, since slices of one are read at different times: with 64 MiB
# and 240 lanes a group of 24 MB was decoded for most of its 115 slices, at ten times the cost of
# tokenizing them.
HELD = 512 << 20


@dataclass(slots=True)
class Docs:
    """Consecutive documents of a unit."""

    first: int  # number of the first of them in its unit
    texts: pa.LargeStringArray
    addresses: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.addresses)

    def part(self, begin: int, end: int) -> Docs:
        """Some of them."""
        return Docs(self.first + begin, self.texts[begin:end], self.addresses[begin:end])

    def some(self, which: Sequence[int] | npt.NDArray[np.int64]) -> Docs:
        """Those that are named, in that order."""
        return Docs(self.first, self.texts.take(pa.array(which)), self.addresses[np.asarray(which)])


class Rejected:
    """Documents left out: each counts once, however often its unit is read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[Unit, int] = {}  # of each unit, the address up to which they are counted
        self._files: Counter[str] = Counter()
        self._units: Counter[Unit] = Counter()

    def add(self, unit: Unit, reject: Reject) -> None:
        """Count a reject; those of a unit come in order."""
        with self._lock:
            if reject.address > self._last.get(unit, -1):
                self._last[unit] = reject.address
                self._files[reject.path] += 1
                self._units[unit] += 1

    def of(self, unit: Unit) -> int:
        """How many of a unit."""
        return self._units[unit]

    def by_file(self) -> dict[str, int]:
        """How many of each file."""
        return dict(sorted(self._files.copy().items()))


class Reader:
    """Reads units of a corpus, from any thread."""

    def __init__(
        self, corpus: Corpus, field: str, policy: Policy, rejected: Rejected | None = None
    ) -> None:
        self._corpus, self._field, self._policy = corpus, field, policy
        self._kept = _Kept()
        self._stamps = [file.stamp for file in corpus.files]
        self.rejected = rejected or Rejected()

    def chunks(self, unit: Unit) -> Iterator[Docs]:
        """The unit's documents in closed chunks: those that begin in the same CHUNK of its text."""
        held: list[Docs] = []
        size = 0
        for docs in self._parts(unit):
            begin = 0
            ends = size + _ends(docs.texts)
            while begin < len(docs):
                end = min(int(np.searchsorted(ends, CHUNK)) + 1, len(docs))
                held.append(docs.part(begin, end))
                size = int(ends[end - 1])
                if size >= CHUNK:
                    yield _joined(held)
                    held, ends, size = [], ends - size, 0
                begin = end
        if held:
            yield _joined(held)

    def batches(self, unit: Unit, count: int) -> Iterator[Docs]:
        """The unit's documents `count` at a time."""
        held: list[Docs] = []
        missing = count
        for docs in self._parts(unit):
            begin = 0
            while begin < len(docs):
                end = min(begin + missing, len(docs))
                held.append(docs.part(begin, end))
                missing -= end - begin
                begin = end
                if not missing:
                    yield _joined(held)
                    held, missing = [], count
        if held:
            yield _joined(held)

    def _parts(self, unit: Unit) -> Iterator[Docs]:
        """Documents as they are read, numbered from the unit's first on."""
        first = 0
        for texts in self._read(unit):
            if len(texts.addresses):
                yield Docs(first, texts.texts, texts.addresses)
                first += len(texts.addresses)

    def _read(self, unit: Unit) -> Iterator[Texts]:
        file = self._corpus.files[unit.file]
        footer = self._corpus.footers[unit.file]
        self._check(unit.file)
        sliced = unit.row_begin or unit.row_end >= 0
        if sliced and footer.sizes[unit.begin] <= KEPT:
            whole = self._kept.get((unit.file, unit.begin), lambda: self._group(unit))
            if whole is not None:
                yield self._slice(unit, whole)
                return
        for texts in read_texts(file, unit, self._field, policy="reject"):
            self._refuse(unit, texts)
            yield texts

    def _check(self, number: int) -> None:
        """Refuse a file that is another one than was listed: addresses would mean other rows."""
        file = self._corpus.files[number]
        if "://" in file.path:
            return  # would cost a request a unit
        try:
            (now,) = find_files([file.path])
        except MissingData:
            raise MissingData(
                f"{file.path} was there when the stream began, and is gone: put it back"
            ) from None
        if now.stamp == self._stamps[number]:
            return
        if footers_of([now], self._field) != self._corpus.footers[number : number + 1]:
            raise DataError(
                f"{file.path} has changed since the stream began: put back the file that was "
                "there, or begin anew with this one"
            )
        self._stamps[number] = now.stamp  # touched, and the same

    def _group(self, unit: Unit) -> Iterator[Texts]:
        """The whole row group of a slice."""
        group = Unit(file=unit.file, begin=unit.begin, end=unit.end)
        return read_texts(self._corpus.files[unit.file], group, self._field, policy="reject")

    def _slice(self, unit: Unit, whole: list[Texts]) -> Texts:
        """A slice of a row group that is held whole, so that it is decoded once for all of them."""
        before = sum(self._corpus.footers[unit.file].rows[: unit.begin])
        begin = before + unit.row_begin
        end = before + (unit.row_end if unit.row_end >= 0 else 1 << 62)
        parts = []
        for texts in whole:
            lo, hi = np.searchsorted(texts.addresses, [begin, end]).tolist()
            rejects = [each for each in texts.rejects if begin <= each.address < end]
            parts.append(Texts(texts.addresses[lo:hi], texts.texts[lo:hi], rejects, None))
        found = Texts(
            np.concatenate([part.addresses for part in parts]),
            pa.concat_arrays([part.texts for part in parts]),
            [reject for part in parts for reject in part.rejects],
            None,
        )
        self._refuse(unit, found)
        return found

    def _refuse(self, unit: Unit, texts: Texts) -> None:
        file = self._corpus.files[unit.file]
        for reject in texts.rejects:
            if self._policy == "error":
                refuse(file, reject)
            self.rejected.add(unit, reject)


def _ends(texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
    """Bytes of text up to each document's end."""
    offsets = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset :][: len(texts) + 1]
    ends: npt.NDArray[np.int64] = offsets[1:] - offsets[0]
    return ends


def _joined(held: list[Docs]) -> Docs:
    if len(held) == 1:
        return held[0]
    texts = pa.concat_arrays([docs.texts for docs in held])
    return Docs(held[0].first, texts, np.concatenate([docs.addresses for docs in held]))


class _Kept:
    """Row groups as texts, the latest ones up to HELD bytes; each is decoded by one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[int, int], tuple[int, list[Texts]]] = OrderedDict()
        self._busy: dict[tuple[int, int], threading.Lock] = {}
        self._large: set[tuple[int, int]] = set()  # more than their footers told: repeated texts

    def get(self, key: tuple[int, int], read: Callable[[], Iterator[Texts]]) -> list[Texts] | None:
        """What `read` gives, from memory where it is there; None where it is more than KEPT."""
        with self._lock:
            alone = self._busy.setdefault(key, threading.Lock())
        with alone:
            with self._lock:
                if key in self._large:
                    return None
                if key in self._found:
                    self._found.move_to_end(key)
                    return self._found[key][1]
            texts, size = [], 0
            for each in read():
                texts.append(each)
                size += each.texts.nbytes
                if size > 2 * KEPT:  # offsets and ids' worth above what a footer counts
                    self._large.add(key)
                    return None
            with self._lock:
                self._found[key] = size, texts
                while len(self._found) > 1 and sum(s for s, _ in self._found.values()) > HELD:
                    gone, _ = self._found.popitem(last=False)
                    self._busy.pop(gone, None)
            return texts
