"""What a store has once it is open: columns of values, levels of records, facts about itself.

Each format is a function from a path to `Contents`; `Store` is the same over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.pack import bounds_of
from penstock.store.manifest import Table
from penstock.store.paths import natural
from penstock.store.records import Level
from penstock.store.segments import Column, Segment

_SAMPLED_BLOCKS = 18
_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """An open store. `levels` has a key's offsets, outermost first; none where they are unknown."""

    columns: dict[str, Column]
    levels: dict[str, tuple[Level, ...]] = field(default_factory=dict)
    values: frozenset[str] = frozenset()  # keys that hold one number an item, not one a token
    metadata: dict[str, Any] = field(default_factory=dict)
    fingerprint: Callable[[], str] = str
    table: Table | None = None  # the shards of a Penstock store


def empty() -> Contents:
    """A store with nothing in it."""
    return Contents(columns={})


def value_keys(columns: Mapping[str, Column]) -> frozenset[str]:
    """Keys of numbers that are no tokens: rewards and fractions; none where there is nothing else.

    >>> columns = {"responses": Column.of([np.arange(9)]), "rewards": Column.of([np.ones(2)])}
    >>> sorted(value_keys(columns))
    ['rewards']
    """
    found = {name for name, column in columns.items() if column.dtype.kind == "f"}
    found |= {"rewards"} & columns.keys()
    return frozenset(found if len(found) < len(columns) else ())


def tabled(
    table: Table,
    open_values: Callable[[str], Callable[[int], Segment]],
    open_offsets: Callable[[str], Callable[[int], Segment]],
    fingerprint: Callable[[], str],
) -> Contents:
    """The contents of a Penstock store, of which no shard has been opened yet.

    `open_values(key)(s)` and `open_offsets(array)(s)` open what shard s holds.
    """
    schema = table.schema
    bounds = {array: bounds_of(column) for array, column in table.totals.items()}
    records = bounds_of(table.documents)
    levels = {}
    for array in schema.parents:
        entries = schema.entries(array, records, bounds)
        offsets = Column(np.dtype("<i8"), entries + np.arange(len(entries)), open_offsets(array))
        levels[array] = Level(entries, bounds[array], offsets)
    return Contents(
        columns={
            name: Column(
                np.dtype(key.dtype).newbyteorder("<"), bounds[key.innermost], open_values(name)
            )
            for name, key in schema.keys.items()
        },
        levels={
            name: tuple(levels[array] for array in key.offsets) for name, key in schema.keys.items()
        },
        values=frozenset(schema.keys) - frozenset(schema.token_keys),
        metadata=table.metadata,
        fingerprint=fingerprint,
        table=table,
    )


def in_memory(raw: Mapping[str, Sequence[Any]], *, each_is_a_record: bool) -> Contents:
    """Arrays (or tensors, or lists of them for nested keys) as a store, without copying."""
    columns: dict[str, Column] = {}
    levels: dict[str, tuple[Level, ...]] = {}
    for name, items in raw.items():
        nested = any(isinstance(item, (list, tuple)) for item in items)
        flat = [np.asarray(x) for item in items for x in (item if nested else (item,))]
        columns[name] = Column.of(flat)
        if nested:
            counts = bounds_of([len(item) for item in items])
            levels[name] = (Level.of([counts]), Level.of([columns[name].bounds]))
        elif each_is_a_record and items:
            levels[name] = (Level.of([columns[name].bounds]),)
    return Contents(columns=columns, levels=levels, values=value_keys(columns))


def sampled_fingerprint(root: Path, files: Iterable[Path], *facts: str) -> str:
    """A digest of names, sizes and 18 blocks of each file (first, last, between), and facts."""
    digest = xxhash.xxh3_128()
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    named = {
        path.relative_to(root).as_posix() if path != root else path.name: path for path in files
    }
    for name in sorted(named, key=natural):
        with named[name].open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            digest.update(f"{name}\0{size}\0".encode())
            places = np.linspace(0, max(size - _BLOCK, 0), _SAMPLED_BLOCKS).astype(np.int64)
            for place in dict.fromkeys(places.tolist()):
                file.seek(place)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
