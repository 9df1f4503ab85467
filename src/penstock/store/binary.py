"""Penstock's own `.bin` shards: from the manifest, or from each shard's meta.json.

A shard is not looked at before something in it is read; its file's size is compared then.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.errors import DataError
from penstock.store.contents import Contents, sampled_fingerprint, tabled
from penstock.store.manifest import (
    INCOMPLETE,
    MANIFEST,
    META,
    Table,
    offsets_layout,
    read_manifest,
    read_shards,
    tabulate,
)
from penstock.store.mapping import map_file
from penstock.store.paths import inside, scan
from penstock.store.segments import Array, Segment

OFFSETS = "offsets.bin"


def refuse_unfinished(root: Path, *, partial: bool) -> None:
    """A store whose writer has not written the manifest is not a whole store."""
    if not partial and (root / INCOMPLETE).exists() and not (root / MANIFEST).exists():
        raise DataError(
            f"{root} is not finished: its writer left no {MANIFEST}; run the writer again, or open "
            "what there is with partial=True."
        )


def open_shards(root: Path, *, partial: bool = False) -> Contents:
    """A Penstock store of .bin shards."""
    if (root / MANIFEST).exists():
        table = read_manifest(root)
        if table.storage != "bin":
            raise DataError(f"{root} holds HDF5 shards: open it with H5Store or open_store.")
        return _contents(table, lambda: table.digest)
    refuse_unfinished(root, partial=partial)
    table = tabulate(root, list(read_shards(root)))

    def fingerprint() -> str:
        return sampled_fingerprint(root, scan(root, lambda n: n == META or n.endswith(".bin")))

    return _contents(table, fingerprint)


def _contents(table: Table, fingerprint: Callable[[], str]) -> Contents:
    # Mapped under its real name, so that a store outlives a link to it, or a chdir.
    root, schema = table.root.resolve(), table.schema
    layout = offsets_layout(schema, table.documents, table.totals)
    firsts = {array: first for array, (first, _) in layout.items()}
    whole = sum((count for _, count in layout.values()), np.zeros_like(table.documents))

    def values(name: str) -> Callable[[int], Segment]:
        key = schema.keys[name]
        dtype = np.dtype(key.dtype).newbyteorder("<")
        totals = table.totals[key.innermost]

        def open_shard(shard: int) -> Array:
            path = inside(root, f"{table.paths[shard]}/{name}.bin")
            count = int(totals[shard])
            why = f" ({count:,} of {key.dtype})"
            return map_file(path, count * dtype.itemsize, why).view(dtype)

        return open_shard

    def offsets(array: str) -> Callable[[int], Segment]:
        first = firsts[array] + np.zeros_like(table.documents)

        def open_shard(shard: int) -> Array:
            path = inside(root, f"{table.paths[shard]}/{OFFSETS}")
            count = int(whole[shard])
            numbers = map_file(path, count * 8, f" ({count:,} offsets)").view("<i8")
            begin = int(first[shard])
            parent = schema.parents[array]
            entries = table.documents if parent is None else table.totals[parent]
            return check_offsets(
                numbers[begin : begin + int(entries[shard]) + 1],
                int(table.totals[array][shard]),
                path,
            )

        return open_shard

    return tabled(table, values, offsets, fingerprint)


def check_offsets(offsets: Array, total: int, where: object) -> Array:
    """Offsets rise from 0 to the total, or they are damaged or belong to other data."""
    if int(offsets[0]) != 0 or int(offsets[-1]) != total:
        raise DataError(
            f"{where} has record offsets from {int(offsets[0]):,} to {int(offsets[-1]):,} where 0 "
            f"to {total:,} was expected: restore it or write the store again."
        )
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        raise DataError(
            f"{where} has offsets that fall after record {int(falls.argmax())}: restore it."
        )
    return offsets
