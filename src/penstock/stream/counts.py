r"""What a corpus holds, counted unit by unit, and the file in which that is kept.

    {"format": "penstock counts", "version": 1, "identity": {"data": "…", "seq_len": 2048, …}}
    {"unit": 0, "documents": 812, "tokens": 655021, "rows": 320, …, "check": 1845107344}

Lines are appended as units are counted, in any order. Each says that it is whole (`check` is the
CRC of what stands before it), so a counter that is killed at any moment loses at most the units it
was at: a half-written last line is dropped, a damaged one is counted again.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from penstock.cache import cache_folder, locked, sync_directory
from penstock.errors import ConfigError, StateMismatch
from penstock.order.identity import differing
from penstock.stream.chunks import plan_chunk

FORMAT = "penstock counts"
VERSION = 1
DRAWN = 200_000  # documents, to tell what padding would be
SYNC = 5.0  # seconds of counting that a power cut may cost


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCount:
    """What one unit holds."""

    unit: int
    documents: int
    empty: int  # of the documents, those without a token
    tokens: int  # BOS and EOS included
    longest: int  # tokens of the longest document
    bytes: int  # of text
    rejected: int  # documents left out
    rows: int | None = None  # where a unit is packed by itself
    sample: tuple[int, ...] = ()  # lengths of some of its documents, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a corpus holds: of each unit, and summed up."""

    path: Path  # of the index
    units: tuple[UnitCount, ...]
    files: tuple[str, ...]  # each unit's
    packing: str
    width: int  # tokens of a row

    def _sum(self, name: str) -> int:
        return sum(getattr(each, name) for each in self.units)

    @property
    def documents(self) -> int:
        """All that a stream delivers in an epoch, and those without a token."""
        return self._sum("documents")

    @property
    def empty(self) -> int:
        """Documents without a token."""
        return self._sum("empty")

    @property
    def tokens(self) -> int:
        """Those of an epoch, BOS and EOS included."""
        return self._sum("tokens")

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(each.longest for each in self.units)

    @property
    def rows(self) -> int | None:
        """Those of an epoch; None where that depends on what is cropped."""
        match self.packing:
            case "chunked":
                return self._sum("rows")
            case "concat":
                return self.tokens // self.width
        return None

    @property
    def padding(self) -> int:
        """Tokens of padding in an epoch; concat and best_fit_crop have none."""
        return self._sum("rows") * self.width - self.tokens if self.packing == "chunked" else 0

    @property
    def padding_share(self) -> float:
        """The share of what rows hold that is padding."""
        return self.padding / max(self.padding + self.tokens, 1)

    @property
    def rejected(self) -> dict[str, int]:
        """Documents left out, by file."""
        found: Counter[str] = Counter()
        for file, each in zip(self.files, self.units, strict=True):
            found[file] += each.rejected
        return {file: count for file, count in found.items() if count}

    def steps(self, global_batch: int) -> int:
        """Global batches in an epoch: at least one, or an error."""
        check_countable(self.packing)
        assert self.rows is not None
        if self.rows < global_batch:
            raise ConfigError(
                f"an epoch has {self.rows:,} rows, and one global batch takes {global_batch:,}: "
                "give steps a number, or take smaller batches"
            )
        return self.rows // global_batch

    def padding_at(self, chunks: int) -> float:
        """About the share of padding if the corpus were packed in so many chunks.

        A few such chunks are drawn from the lengths that each unit has kept, and packed.
        """
        units = [each for each in self.units if each.sample]
        lengths = np.array([n for each in units for n in each.sample])
        weights = [(u.documents - u.empty) / len(u.sample) for u in units for _ in u.sample]
        if not len(lengths):
            return 0.0
        size = max(1, round((self.documents - self.empty) / chunks))
        draw, rows, drawn = np.random.default_rng(0), 0, 0
        for _ in range(max(4, min(100, DRAWN // size))):
            chunk = draw.choice(lengths, size, p=np.array(weights) / sum(weights))
            rows += len(plan_chunk(chunk, self.width))
            drawn += int(chunk.sum())
        return 1 - drawn / (rows * self.width)


def check_countable(packing: str) -> None:
    """Refuse a packing whose rows cannot be counted ahead."""
    if packing == "best_fit_crop":
        raise ConfigError(
            "how many rows an epoch of packing='best_fit_crop' has depends on what is cropped on "
            "the way: give steps a number, or pack 'chunked' or 'concat'"
        )


# --- the file


def header_of(identity: Mapping[str, Any], units: str) -> dict[str, Any]:
    """What counts depend on: a stream's identity without what only orders rows.

    >>> identity = {"data": "a1", "packing": "concat", "seq_len": 8, "seed": 1, "shuffle": True}
    >>> header_of(identity, "b2")["identity"]
    {'data': 'a1', 'packing': 'concat', 'units': 'b2'}
    """
    idle = {"seed", "shuffle", "order", "buffer_size", "tokenizer_batch_size"}
    if identity["packing"] != "chunked":
        idle |= {"seq_len", "chunk"}
    kept = {name: value for name, value in identity.items() if name not in idle}
    return {"format": FORMAT, "version": VERSION, "identity": kept | {"units": units}}


def default_path(header: Mapping[str, Any]) -> Path:
    """Where an index is kept when nobody says where."""
    raw = json.dumps(header, sort_keys=True).encode()
    return cache_folder("streams") / f"{blake2b(raw, digest_size=16).hexdigest()}.counts.jsonl"


def read_counts(path: Path, header: Mapping[str, Any]) -> dict[int, UnitCount]:
    """The units that an index has; none where there is no file."""
    with _saying(path):
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return {}
    first, *lines = raw.split(b"\n")
    if not lines:  # cut off in its first line
        if not _line(header).startswith(raw):
            raise _no_index(path)
        return {}
    _check_header(path, first, header)
    found = (_read(line) for line in lines[:-1])
    return {each.unit: each for each in found if each is not None}


def _check_header(path: Path, line: bytes, header: Mapping[str, Any]) -> None:
    try:
        found = json.loads(line)
        good = found["format"] == FORMAT and isinstance(found["identity"], dict)
        version = int(found["version"])
    except (ValueError, TypeError, KeyError):
        good, version = False, VERSION
    if not good:
        raise _no_index(path)
    if version > VERSION:
        raise StateMismatch(
            f"{path} has version {version} of this format, and this Penstock reads up to "
            f"{VERSION}: use the release that wrote it, or name another file"
        )
    if differs := differing(found["identity"], header["identity"]):
        raise StateMismatch(
            f"{path} counts another stream: {differs}. Use the settings it was counted with, name "
            "another file, or delete this one to count anew"
        )


def _read(line: bytes) -> UnitCount | None:
    """A line that is whole and as it was written; else None."""
    try:
        content = json.loads(line)
        if content.pop("check") != crc32(json.dumps(content).encode()):
            return None
        content["sample"] = tuple(content["sample"])
        return UnitCount(**{each.name: content[each.name] for each in fields(UnitCount)})
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"


class Book:
    """An index that this process, alone, adds to."""

    def __init__(self, path: Path, descriptor: int, found: dict[int, UnitCount]) -> None:
        self.found = found  # by unit
        self._path, self._descriptor = path, descriptor
        self._synced = time.monotonic()

    def add(self, count: UnitCount) -> None:
        """Keep what a unit holds."""
        content = asdict(count)
        self.write(content | {"check": crc32(json.dumps(content).encode())})
        self.found[count.unit] = count
        if time.monotonic() - self._synced > SYNC:
            self.sync()

    def write(self, content: Mapping[str, Any]) -> None:
        """Append a line."""
        raw = _line(content)
        with _saying(self._path):
            while raw:
                raw = raw[os.write(self._descriptor, raw) :]

    def sync(self) -> None:
        """Wait until the disk has it."""
        with _saying(self._path):
            os.fsync(self._descriptor)
        self._synced = time.monotonic()


@contextmanager
def open_book(path: Path, header: Mapping[str, Any]) -> Iterator[Book]:
    """The index at a path, to be added to: begun where there is none, its torn end cut off.

    The file is its own lock, which the kernel lets go of when its holder dies.
    """
    with ExitStack() as held:
        with _saying(path):
            try:
                held.enter_context(locked(path, wait=False))
            except BlockingIOError:
                raise ConfigError(
                    f"another counter is adding to {path}: wait until it has ended, or name "
                    "another file"
                ) from None
        found = read_counts(path, header)  # which refuses what is no index of this corpus
        with _saying(path):
            kept = path.read_bytes().rfind(b"\n") + 1
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            held.callback(os.close, descriptor)
            os.ftruncate(descriptor, kept)
        book = Book(path, descriptor, found)
        if not kept:
            book.write(header)
            sync_directory(path.parent)
        held.callback(book.sync)
        yield book


@contextmanager
def _saying(path: Path) -> Iterator[None]:
    """What the system refuses, in words."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the index {path} cannot be used: {error.strerror}. Name another place with path=… "
            "or -o …, or set PENSTOCK_CACHE_DIR"
        ) from error


def _no_index(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is no index of counts: name another file, or delete this one if nothing needs it"
    )
