"""A corpus: files cut into units, numbered over all of them, from an index that is kept.

    corpus = open_corpus(["data/"], "text", lanes=240)
    len(corpus.units), corpus.documents, corpus.fingerprint

A *unit* is what one reader takes at a time: a row group, several small ones, or a slice of a large
one; of JSON Lines a range of bytes; of what cannot be entered in the middle (compressed, or a JSON
list) the file. There are at least 8 a lane where the documents suffice. Of a Parquet file its
footer alone is read, once: what it says is kept in the cache directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import PurePosixPath

import msgspec

from penstock.cache import cache_folder, write_whole
from penstock.errors import MissingData
from penstock.text.batches import Unit
from penstock.text.files import InputFile, find_files, open_raw
from penstock.text.parquet import footer_of

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

A_LANE = 8  # units, at least
JOINED = 4 << 20  # bytes of text: small row groups become one unit up to this
LARGEST = 32 << 20  # and a large one is cut into units of this
KEPT = 64 << 20  # a row group up to this is cut finer, since it can be held while it is read
PIECES = 8  # of a larger one: before each, those that precede it are read and let go
SAMPLED = 64 << 10  # bytes at both ends of a file that has no footer
CACHE_VERSION = 2


@dataclass(frozen=True, slots=True)
class Footer:
    """What is known of a file without reading it."""

    rows: tuple[int, ...]  # of each row group; of a file without any, none
    sizes: tuple[int, ...]  # bytes of their texts, decoded
    digest: str  # of what tells the content


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files, and the units that they are cut into."""

    files: tuple[InputFile, ...]
    footers: tuple[Footer, ...]
    units: tuple[Unit, ...]
    fingerprint: str

    @property
    def name(self) -> str:
        """As errors call it."""
        one = len(self.files) == 1
        return self.files[0].path if one else f"the corpus of {len(self.files)} files"

    @property
    def documents(self) -> int | None:
        """How many rows there are, where that is known without reading: of Parquet alone."""
        if any(file.kind != "parquet" for file in self.files):
            return None
        return sum(sum(footer.rows) for footer in self.footers)

    @property
    def bytes(self) -> int:
        """About how much text there is."""
        sizes = zip(self.files, self.footers, strict=True)
        return sum(sum(footer.sizes) if footer.rows else file.size for file, footer in sizes)


def open_corpus(paths: Paths, field: str, *, lanes: int) -> Corpus:
    """The files at `paths` as units for so many lanes."""
    inputs = [paths] if isinstance(paths, str | os.PathLike) else paths
    return cut_corpus(find_files(inputs), field, lanes=lanes)


def cut_corpus(files: Sequence[InputFile], field: str, *, lanes: int) -> Corpus:
    """Files as units for so many lanes."""
    footers = footers_of(files, field)
    return _corpus(files, footers, units_for(files, footers, lanes))


def units_for(
    files: Sequence[InputFile], footers: Sequence[Footer], lanes: int
) -> list[list[Unit]]:
    """Each file's units, for so many lanes."""
    both = list(zip(files, footers, strict=True))
    total = sum(sum(footer.sizes) if footer.rows else file.size for file, footer in both)
    target = max(1, min(LARGEST, total // (A_LANE * lanes)))
    return [
        list(units_of(file, footer, number, target)) for number, (file, footer) in enumerate(both)
    ]


def group_corpus(files: Sequence[InputFile], field: str) -> tuple[Corpus, list[int]]:
    """Files as their row groups, each a unit; and how many each file has."""
    footers = footers_of(files, field)
    units = []
    for number, (file, footer) in enumerate(zip(files, footers, strict=True)):
        groups = range(len(footer.rows))
        whole = [Unit(file=number, begin=g, end=g + 1) for g in groups]
        units.append(
            whole if file.kind == "parquet" else list(units_of(file, footer, number, JOINED))
        )
    return _corpus(files, footers, units), [len(each) for each in units]


def _corpus(
    files: Sequence[InputFile], footers: Sequence[Footer], units: Sequence[Sequence[Unit]]
) -> Corpus:
    fingerprint = fingerprint_of(files, footers)
    made = Corpus(tuple(files), tuple(footers), tuple(chain.from_iterable(units)), fingerprint)
    if not made.units:
        raise MissingData(f"{made.name} holds no document: its files are empty")
    return made


def fingerprint_of(files: Sequence[InputFile], footers: Sequence[Footer]) -> str:
    """Names, sizes and digests: the same wherever the files lie."""
    known = [
        [PurePosixPath(file.path).name, file.size, footer.digest]
        for file, footer in zip(files, footers, strict=True)
    ]
    return blake2b(json.dumps(known).encode(), digest_size=16).hexdigest()


# --- units


def units_of(file: InputFile, footer: Footer, number: int, target: int) -> Iterator[Unit]:
    """A file's units, of about `target` bytes where that can be had."""
    if file.kind == "parquet":
        for begin, end, row_begin, row_end in cut(footer.rows, footer.sizes, target):
            yield Unit(file=number, begin=begin, end=end, row_begin=row_begin, row_end=row_end)
    elif file.size:
        whole = file.kind == "json" or file.compression
        count = 1 if whole else max(1, round(file.size / target))
        ends = [file.size * i // count for i in range(count + 1)]
        for begin, end in pairwise(ends):
            if begin < end:
                yield Unit(file=number, begin=begin, end=end)


def cut(
    rows: Sequence[int], sizes: Sequence[int], target: int
) -> Iterator[tuple[int, int, int, int]]:
    """Row groups as units: (first group, last + 1, first row in it, last + 1 or -1 for its end).

    >>> list(cut([10, 10, 900, 10], [100, 100, 9000, 100], 3000))
    [(0, 2, 0, -1), (2, 3, 0, 300), (2, 3, 300, 600), (2, 3, 600, -1), (3, 4, 0, -1)]
    """
    begin, held = 0, 0
    for group, (count, size) in enumerate(zip(rows, sizes, strict=True)):
        if held and held + size > min(target, JOINED):
            yield begin, group, 0, -1
            begin, held = group, 0
        if not held:
            begin = group  # what is empty before is left out
        if not count:
            continue
        pieces = min(count, round(size / target))
        if size > KEPT:
            pieces = min(pieces, max(PIECES, -(-size // LARGEST)))
        if pieces > 1:
            if held:
                yield begin, group, 0, -1
            ends = [count * i // pieces for i in range(pieces)] + [-1]
            for first, last in pairwise(ends):
                yield group, group + 1, first, last
            held = 0
        else:
            held += max(size, 1)
    if held:
        yield begin, len(rows), 0, -1


# --- footers


def footers_of(files: Sequence[InputFile], field: str) -> tuple[Footer, ...]:
    """What is known of each file, from the cache or by reading footers, many at a time."""
    key = json.dumps([CACHE_VERSION, field, [[file.path, file.stamp] for file in files]])
    name = blake2b(key.encode(), digest_size=16).hexdigest()
    kept = cache_folder("streams") / f"{name}.json"
    # What cannot be read, or was cut short by a full disk, is made anew.
    with suppress(OSError, msgspec.MsgspecError):
        read = msgspec.json.decode(kept.read_bytes(), type=tuple[Footer, ...])
        if len(read) == len(files):
            return read
    with ThreadPoolExecutor(16) as threads:
        found = tuple(threads.map(lambda file: _footer(file, field), files))
    with suppress(OSError):  # a cache that cannot be written costs the next start some time
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, msgspec.json.encode(found))
    return found


def _footer(file: InputFile, field: str) -> Footer:
    if file.kind == "parquet":
        rows, sizes, raw = footer_of(file, field)
        return Footer(tuple(rows), tuple(sizes), blake2b(raw, digest_size=16).hexdigest())
    with open_raw(file) as opened:
        ends = opened.read(min(SAMPLED, file.size))
        if file.size > SAMPLED:
            opened.seek(max(SAMPLED, file.size - SAMPLED))
            ends += opened.read(SAMPLED)
    return Footer((), (), blake2b(ends, digest_size=16).hexdigest())
