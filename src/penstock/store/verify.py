"""Is a store what it says it is? `verify` reads every byte and names each file that is not.

>>> verify("/nowhere").problems[0][:43]
'No supported data files found at /nowhere: '
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.errors import PenstockError
from penstock.store.base import Store
from penstock.store.binary import OFFSETS
from penstock.store.formats import open_store
from penstock.store.manifest import (
    MANIFEST,
    META,
    Shard,
    Table,
    offsets_layout,
    parse_meta,
)
from penstock.store.paths import HDF5, inside, read_bytes, scan
from penstock.store.segments import Column
from penstock.store.spool import file_digest

_BLOCK = 1 << 22

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What `verify` found: whether all is well, and one sentence for each thing that is not."""

    ok: bool
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shards: int = 0
    tokens: int = 0
    documents: int = 0


def verify(path: str | Path, *, progress: Progress | None = None) -> Report:
    """Read a whole store and report each problem in one sentence that names the file.

    `progress(done, shards)` is called after each shard. A note says what could not be looked at:
    what a missing manifest would tell, the checksums that a store of another tool does not have.
    """
    root = Path(path)
    try:
        store = open_store(root)
    except (PenstockError, OSError) as err:
        return Report(ok=False, problems=[str(err)])
    with store:
        table = store.contents.table
        if table is None:
            return _report_foreign(root, store, progress)
        problems: dict[str, None] = {}  # in order, each once
        for index in range(len(table.paths)):
            problems.update(dict.fromkeys(_shard_problems(table, store, index)))
            if progress is not None:
                progress(index + 1, len(table.paths))
        if table.digest:
            problems.update(dict.fromkeys(_strays(table)))
    return Report(
        ok=not problems,
        problems=list(problems),
        notes=list(_notes(root, table)),
        shards=len(table.paths),
        tokens=table.tokens,
        documents=int(table.documents.sum()),
    )


def _notes(root: Path, table: Table) -> Iterator[str]:
    """What could not be looked at, since the manifest is missing or of the first kind."""
    if not table.digest:
        what = " nor checksums of its files" if table.storage == "h5" else ""
        yield (
            f"{root} has no {MANIFEST}, so there is no tokenizer, no end-of-text id, no ledger"
            f"{what}, and a missing shard would not be seen: restore it, or commit() the shards."
        )
    elif not table.sealed:
        yield (
            f"{root / MANIFEST} has no digest of itself, as it is from an early release: a change "
            "of its metadata or ledger would not be seen."
        )


def _report_foreign(root: Path, store: Store, progress: Progress | None) -> Report:
    """Open every shard of every key, which compares sizes, and look at the offsets."""
    contents = store.contents
    problems: dict[str, None] = {}
    shards = sum(column.shards for column in contents.columns.values())
    done = 0
    for name, column in contents.columns.items():
        for index in range(column.shards):
            problems.update(dict.fromkeys(_value_problems(column, index, f"{root}: {name}", None)))
            done += 1
            if progress is not None:
                progress(done, shards)
        for level in contents.levels.get(name, ()):
            for index in range(level.offsets.shards):
                found = _offset_problems(level.offsets, index)
                problems.update(dict.fromkeys(found))
    return Report(
        ok=not problems,
        problems=list(problems),
        notes=[f"{root} has no {MANIFEST}, so there are no checksums to compare with."],
        shards=max((column.shards for column in contents.columns.values()), default=0),
        tokens=len(store),
        documents=store.documents,
    )


# ---------------------------------------------------------------------------- one shard


def _shard_problems(table: Table, store: Store, index: int) -> Iterator[str]:
    """Everything that is wrong with one shard of a Penstock store."""
    try:
        where = inside(table.root, table.paths[index])
        yield from (_hdf5_problems if table.storage == "h5" else _folder_problems)(
            table, index, where
        )
    except (PenstockError, OSError) as err:
        yield str(err)
        return
    contents, vocab_size = store.contents, table.metadata.get("vocab_size")
    whole = table.storage == "h5"
    for name, column in contents.columns.items():
        file = where if whole else where / f"{name}.bin"
        limit = vocab_size if table.schema.keys[name].role == "ids" else None
        yield from _value_problems(column, index, str(file), limit)
    for name, key in table.schema.keys.items():
        for level, _ in zip(contents.levels[name], key.offsets, strict=True):
            yield from _offset_problems(level.offsets, index)


def _folder_problems(table: Table, index: int, folder: Path) -> Iterator[str]:
    """Missing, unlisted and changed files of a .bin shard."""
    raw = read_bytes(folder / META)
    shard = parse_meta(raw, folder / META, table.paths[index])
    if shard.checksum != table.checksums[index]:
        yield (
            f"{folder / META} has the checksum {shard.checksum} where the manifest has "
            f"{table.checksums[index]}: it was changed; restore it."
        )
    yield from _count_problems(table, index, shard, folder / META)
    for name, key in table.schema.keys.items():
        size = int(table.totals[key.innermost][index]) * np.dtype(key.dtype).itemsize
        yield from _size_problems(folder / f"{name}.bin", size)
    counts = offsets_layout(shard.schema, shard.documents, shard.totals).values()
    yield from _size_problems(folder / OFFSETS, 8 * sum(count for _, count in counts))
    expected = {f"{name}.bin" for name in shard.schema.keys} | {OFFSETS}
    for name in sorted(expected - shard.checksums.keys()):
        yield f"{folder / META} has no checksum of {name}: write the store again."
    for name, digest in shard.checksums.items():
        yield from _digest_problems(inside(folder, name), digest)
    for path in sorted(folder.iterdir()):
        if path.name != META and path.name not in shard.checksums:
            yield f"{path} is not a file of this shard: remove it."


def _hdf5_problems(table: Table, index: int, path: Path) -> Iterator[str]:
    """A missing or changed HDF5 shard, and its table of sources."""
    from penstock.store.hdf5 import read_shard  # noqa: PLC0415 - h5py is for HDF5 stores only

    yield from _size_problems(path, int(table.sizes[index]))
    if path.exists():
        if table.digest:
            yield from _digest_problems(path, table.checksums[index])
        shard = read_shard(table.root, path)
        if shard is None:
            yield f"{path} is not one of Penstock's HDF5 files: restore it."
        else:
            yield from _count_problems(table, index, shard, path)
            for name, digest in shard.checksums.items():
                yield from _digest_problems(inside(path.parent, name), digest)


def _count_problems(table: Table, index: int, shard: Shard, where: Path) -> Iterator[str]:
    stated = {array: int(column[index]) for array, column in table.totals.items()}
    if shard.schema != table.schema or shard.storage != table.storage:
        yield f"{where} describes other keys than the manifest: restore it."
    elif (shard.documents, shard.totals) != (int(table.documents[index]), stated):
        yield (
            f"{where} counts {shard.documents} documents and {shard.totals}, the manifest "
            f"{int(table.documents[index])} and {stated}: restore it."
        )


def _size_problems(path: Path, size: int) -> Iterator[str]:
    if not path.exists():
        yield f"{path} is missing: restore it or write the store again."
    elif path.stat().st_size != size:
        found = path.stat().st_size
        yield (
            f"{path} holds {found:,} bytes where {size:,} were expected: it is "
            f"{'cut short' if found < size else 'too long'}; restore it."
        )


def _digest_problems(path: Path, digest: str) -> Iterator[str]:
    if path.exists():
        found = file_digest(path)
        if found != digest:
            yield f"{path} has the checksum {found} where {digest} was expected: restore it."
    else:
        yield f"{path} is missing: restore it or write the store again."


def _value_problems(column: Column, index: int, where: str, limit: object) -> Iterator[str]:
    """Ids past the vocabulary, and bytes that are neither true nor false."""
    begin, end = int(column.bounds[index]), int(column.bounds[index + 1])
    try:
        segment = column.segment(index)
        for first in range(0, end - begin, _BLOCK):
            block = segment[first : min(first + _BLOCK, end - begin)]
            if block.dtype == np.bool_ and int(block.view(np.uint8).max()) > 1:
                yield f"{where} holds bytes that are neither 0 nor 1, as {block.dtype}: restore it."
                return
            if isinstance(limit, int) and int(block.max()) >= limit:
                yield (
                    f"{where} holds the id {int(block.max())}, which is not below the vocabulary's "
                    f"size of {limit}: restore it, or prepare it with the right tokenizer."
                )
                return
    except (PenstockError, OSError) as err:
        yield str(err)


def _offset_problems(offsets: Column, index: int) -> Iterator[str]:
    """What is said when a shard's offsets are opened."""
    try:
        offsets.segment(index)
    except (PenstockError, OSError) as err:
        yield str(err)


def _strays(table: Table) -> Iterator[str]:
    """Shards that lie below the store and are not in its manifest."""
    listed = set(table.paths)
    wanted = (META, ".bin", *HDF5)
    found: dict[Path, None] = {}
    for path in scan(table.root, lambda name: name == META or name.lower().endswith(wanted)):
        name = path if path.name.lower().endswith(HDF5) else path.parent
        if name.relative_to(table.root).as_posix() not in listed:
            found[name] = None
    for name in found:
        yield f"{name} is not in {table.root / MANIFEST}: commit it, or remove it."
