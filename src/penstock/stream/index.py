"""Counting a corpus once, in parallel: for a finite epoch of a stream, or a plan of one.

    counts = count(TextStream("data/", "tokenizers/mine", seq_len=2048, batch_size=16))
    counts.documents, counts.tokens, counts.rows, counts.padding_share
    TextStream(..., steps="epoch")                   # ends after the steps of one epoch

Units are read, tokenized and packed by length as the stream itself does, so that its numbers are
these; nothing is gathered into rows. What is counted is kept unit by unit: see `counts`.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from penstock.errors import ConfigError
from penstock.stream.chunks import plan_chunk
from penstock.stream.corpus import Corpus, units_for
from penstock.stream.counts import (
    Counts,
    UnitCount,
    check_countable,
    default_path,
    header_of,
    open_book,
    read_counts,
)
from penstock.stream.reading import CHUNK, Reader
from penstock.text.batches import Unit

if TYPE_CHECKING:
    from penstock.stream.text_stream import TextStream

SHOWN = 0.25  # seconds from one report of progress to the next
PADDED = 0.05  # the share of padding from which fewer lanes are advised
SAMPLED = 32  # documents of each unit, of which lengths are kept
NAMED = 16  # inputs at most in the command that an error shows
I64 = npt.NDArray[np.int64]
Path_ = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a count is."""

    units: int
    of: int
    bytes: int  # of what `total` counts: decoded text of Parquet, bytes on disk of other files
    total: int
    documents: int
    tokens: int


def count(
    stream: TextStream,
    path: Path_ | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Counts:
    """Count what an epoch of a stream holds, or what of it is not counted yet.

    The index stands at `path`, else in the cache directory; one that is complete is read and no
    more. Killed at any moment, the next call counts what is missing. The stream is not moved.
    """
    header, where = _place(stream, path)
    found = _valid(stream, read_counts(where, header))
    if len(found) < len(stream.corpus.units):
        with open_book(where, header) as book:
            found = book.found = _valid(stream, book.found)
            missing = [n for n in range(len(stream.corpus.units)) if n not in found]
            work = _Work(stream, found, progress)
            work.run(missing, stream.threads, book.add)
    return _summed(stream, where, found)


def counts_of(stream: TextStream, path: Path_ | None = None) -> Counts:
    """The counts of a stream from an index that is complete, or an error with the command."""
    check_countable(stream.packing)
    header, where = _place(stream, path)
    found = read_counts(where, header)
    units = len(stream.corpus.units)
    if len(found) < units:
        has = f"has {len(found):,} of {units:,} units" if found else "does not exist"
        raise ConfigError(
            f"the rows of an epoch are not counted: the index {where} {has}. Run "
            f"`{command(stream, path)}`, or give steps a number"
        )
    return _summed(stream, where, found)


def advised_lanes(stream: TextStream, counts: Counts, world: int = 1) -> int | None:
    """About how many lanes, fewer than there are, bring padding within 5%: the most, or None.

    They are a multiple of `world`. Fewer lanes have larger units, which pad less.
    """
    corpus, text = stream.corpus, sum(each.bytes for each in counts.units)

    def within(lanes: int) -> bool:
        units = sum(map(len, units_for(corpus.files, corpus.footers, lanes)))
        return counts.padding_at(max(units, -(-text // CHUNK))) <= PADDED

    few, many = 0, -(-stream.share.lanes // world)  # multiples: `few` is within, `many` is not
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if within(middle * world) else (few, middle)
    return few * world or None


def kept(stream: TextStream, path: Path_ | None = None) -> tuple[Path, int]:
    """Where a stream's index stands, and how many units it has."""
    header, where = _place(stream, path)
    return where, len(read_counts(where, header))


def command(stream: TextStream, path: Path_ | None = None) -> str:
    """The command line that counts a stream."""
    tokenizer, framing = stream.tokenizer, stream.identity()["framing"]
    inputs = stream.inputs if len(stream.inputs) <= NAMED else [*stream.inputs[:2], "…"]
    bos, eos = (framing[name] is not None for name in ("bos", "eos"))
    given: dict[str, Any] = {
        "--tokenizer": tokenizer.name,
        "--seq-len": stream.seq_len,
        "--packing": None if stream.packing == "chunked" else stream.packing,
        "--lanes": stream.share.lanes,
        "--text-field": None if stream.text_field == "text" else stream.text_field,
        "--policy": None if stream.rejects == "error" else stream.rejects,
        "-o": path and os.fspath(path),
    }
    words = ["penstock", "index", *inputs]
    words += chain.from_iterable([k, str(v)] for k, v in given.items() if v is not None)
    if eos != (tokenizer.eos_id is not None):
        words.append("--eos" if eos else "--no-eos")
    if bos != (not eos and tokenizer.bos_id is not None):
        words.append("--bos" if bos else "--no-bos")
    return shlex.join(words)


def _place(stream: TextStream, path: Path_ | None) -> tuple[dict[str, Any], Path]:
    units = stream.corpus.units
    spans = [[u.file, u.begin, u.end, u.row_begin, u.row_end] for u in units]
    digest = blake2b(json.dumps(spans).encode(), digest_size=8).hexdigest()
    header = header_of(stream.identity(), f"{len(units)}, {digest}")
    return header, default_path(header) if path is None else Path(path)


def _valid(stream: TextStream, found: dict[int, UnitCount]) -> dict[int, UnitCount]:
    """Those that count: with policy "error", not the units that are one, to be met again."""
    if stream.rejects == "reject":
        return found
    return {unit: each for unit, each in found.items() if not each.rejected}


def _summed(stream: TextStream, path: Path, found: dict[int, UnitCount]) -> Counts:
    corpus = stream.corpus
    return Counts(
        path=path,
        units=tuple(found[number] for number in range(len(corpus.units))),
        files=tuple(corpus.files[unit.file].path for unit in corpus.units),
        packing=stream.packing,
        width=stream.seq_len + 1,
    )


class _Work:
    """Counts units in threads, each one unit at a time."""

    def __init__(
        self,
        stream: TextStream,
        found: dict[int, UnitCount],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._corpus, self._found, self._progress = stream.corpus, found, progress
        self._reader = Reader(stream.corpus, stream.text_field, stream.rejects)
        self._encode = stream.share.source.encode
        self._width = stream.seq_len + 1 if stream.packing == "chunked" else None
        self._sizes = [unit_size(stream.corpus, unit) for unit in stream.corpus.units]
        self._total = sum(self._sizes)
        self._done = [0, 0, 0]  # bytes, documents and tokens of units that are counted
        for each in found.values():
            self._add(each)
        self._shown = 0.0
        self._stop = Event()
        self._open: dict[int, _Sum] = {}  # units that are being counted

    def run(self, missing: Sequence[int], threads: int, keep: Callable[[UnitCount], None]) -> None:
        """Count these units; each is kept as soon as it is counted."""
        waiting = iter(missing)
        self._show()
        with ThreadPoolExecutor(threads, "penstock-count") as pool:
            try:
                running = {pool.submit(self._count, n) for n in islice(waiting, threads + 2)}
                while running:
                    done, running = wait(running, SHOWN, return_when=FIRST_COMPLETED)
                    running |= {pool.submit(self._count, n) for n in islice(waiting, len(done))}
                    self._keep(done, keep)
                    self._show()
                self._show(last=True)
            finally:
                self._stop.set()  # threads end at their next chunk, and what waits at once

    def _keep(self, done: set[Future[UnitCount | None]], keep: Callable[[UnitCount], None]) -> None:
        """Keep what is counted, then raise what went wrong."""
        for each in sorted(done, key=lambda each: each.exception() is not None):
            counted = each.result()
            if counted is not None:
                keep(counted)
                self._add(counted)
                del self._open[counted.unit]

    def _add(self, count: UnitCount) -> None:
        self._done[0] += self._sizes[count.unit]
        self._done[1] += count.documents
        self._done[2] += count.tokens

    def _count(self, number: int) -> UnitCount | None:
        """What a unit holds; None if counting has stopped meanwhile."""
        unit = self._corpus.units[number]
        found = self._open[number] = _Sum(self._width)
        for docs in self._reader.chunks(unit):
            if self._stop.is_set():
                return None
            _, offsets = self._encode(docs.texts)
            found.add(np.diff(offsets), pc.sum(pc.binary_length(docs.texts)).as_py() or 0)
        return None if self._stop.is_set() else found.count(number, self._reader.rejected.of(unit))

    def _show(self, *, last: bool = False) -> None:
        """Report progress, now and then: what is counted, and what of open units is."""
        if self._progress is None or (time.monotonic() - self._shown < SHOWN and not last):
            return
        begun = self._open.copy()
        size = sum(min(each.bytes, self._sizes[number]) for number, each in begun.items())
        self._progress(
            Progress(
                units=len(self._found),
                of=len(self._sizes),
                bytes=self._done[0] + size,
                total=self._total,
                documents=self._done[1] + sum(each.documents for each in begun.values()),
                tokens=self._done[2] + sum(each.tokens for each in begun.values()),
            )
        )
        self._shown = time.monotonic()


class _Sum:
    """What is counted of a unit so far."""

    def __init__(self, width: int | None) -> None:
        self._width = width  # of its rows, where it is packed by itself
        self.documents = self.empty = self.tokens = self.longest = self.bytes = 0
        self._rows = 0
        self._sample: list[int] = []

    def add(self, lengths: I64, size: int) -> None:
        """A closed chunk of documents with these lengths."""
        self.documents += len(lengths)
        self.empty += len(lengths) - int(np.count_nonzero(lengths))
        self.tokens += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.bytes += size
        if self._width is not None and lengths.any():
            self._rows += len(plan_chunk(lengths, self._width))
            self._sample += _spread(lengths[lengths > 0])

    def count(self, unit: int, rejected: int) -> UnitCount:
        """The sum."""
        return UnitCount(
            unit=unit,
            documents=self.documents,
            empty=self.empty,
            tokens=self.tokens,
            longest=self.longest,
            bytes=self.bytes,
            rejected=rejected,
            rows=None if self._width is None else self._rows,
            sample=tuple(_spread(np.array(self._sample, np.int64))),
        )


def _spread(lengths: I64) -> list[int]:
    """Up to SAMPLED of them, evenly.

    >>> _spread(np.arange(3)), len(_spread(np.arange(1000)))
    ([0, 1, 2], 32)
    """
    count = min(SAMPLED, len(lengths))
    found: list[int] = lengths[np.arange(count) * len(lengths) // max(count, 1)].tolist()
    return found


def unit_size(corpus: Corpus, unit: Unit) -> int:
    """About how much there is to read of a unit: as `Corpus.bytes`."""
    if corpus.files[unit.file].kind != "parquet":
        return unit.end - unit.begin
    footer = corpus.footers[unit.file]
    size, rows = sum(footer.sizes[unit.begin : unit.end]), footer.rows[unit.begin]
    if unit.row_begin or unit.row_end >= 0:
        last = unit.row_end if unit.row_end >= 0 else rows
        return size * (last - unit.row_begin) // rows
    return size
