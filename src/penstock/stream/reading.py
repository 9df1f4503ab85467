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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.stream.corpus import KEPT, Corpus
from penstock.text.batches import Texts, Unit
from penstock.text.documents import Policy, read_texts, refuse

CHUNK = 8 << 20  # bytes of text after which a chunk is closed


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


class Reader:
    """Reads units of a corpus, from any thread."""

    def __init__(self, corpus: Corpus, field: str, policy: Policy) -> None:
        self._corpus, self._field, self._policy = corpus, field, policy
        self._kept = _Kept()
        self._lock = threading.Lock()
        self.rejected: Counter[str] = Counter()  # documents left out, by file
        self.refused: Counter[Unit] = Counter()  # and by unit

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
        sliced = unit.row_begin or unit.row_end >= 0
        if sliced and footer.sizes[unit.begin] <= KEPT:
            yield self._slice(unit)
            return
        for texts in read_texts(file, unit, self._field, policy="reject"):
            self._refuse(unit, texts)
            yield texts

    def _slice(self, unit: Unit) -> Texts:
        """A slice of a row group that is held whole, so that it is decoded once for all of them."""
        file = self._corpus.files[unit.file]
        whole = self._kept.get(
            (unit.file, unit.begin),
            self._corpus.footers[unit.file].sizes[unit.begin],
            lambda: list(
                read_texts(
                    file,
                    Unit(file=unit.file, begin=unit.begin, end=unit.end),
                    self._field,
                    policy="reject",
                )
            ),
        )
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
            with self._lock:
                self.rejected[file.path] += 1
                self.refused[unit] += 1


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
    """Row groups as texts, the latest ones up to KEPT bytes; each is decoded by one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[int, int], tuple[int, list[Texts]]] = OrderedDict()
        self._busy: dict[tuple[int, int], threading.Lock] = {}

    def get(self, key: tuple[int, int], size: int, read: object) -> list[Texts]:
        """What `read` gives, from memory where it is there."""
        assert callable(read)
        with self._lock:
            alone = self._busy.setdefault(key, threading.Lock())
        with alone:
            with self._lock:
                if key in self._found:
                    self._found.move_to_end(key)
                    return self._found[key][1]
            texts: list[Texts] = read()
            with self._lock:
                self._found[key] = size, texts
                while len(self._found) > 1 and sum(s for s, _ in self._found.values()) > KEPT:
                    gone, _ = self._found.popitem(last=False)
                    self._busy.pop(gone, None)
            return texts
