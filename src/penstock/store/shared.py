"""A store's values in memory that processes share: one anonymous file, gone with its last user.

On Linux it is a memfd: a forked worker has the mapping, a spawned one is sent the descriptor.
Elsewhere it is an anonymous mapping, which a fork shares, and a spawned worker opens the path.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import context, reduction
from typing import Any, Self

import numpy as np
import xxhash

from penstock.pack import bounds_of
from penstock.store.contents import Contents
from penstock.store.mapping import Bytes, map_descriptor
from penstock.store.records import Level
from penstock.store.segments import I64, Column

_ALIGN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where one column stands in the shared bytes."""

    first: int
    dtype: str
    bounds: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """Where everything stands; small, and sent to spawned workers."""

    size: int
    columns: dict[str, _Place]
    levels: list[tuple[I64, I64, _Place]]  # entries, base, offsets
    keys: dict[str, tuple[int, ...]]  # key → its levels


class SharedMemory:
    """One shared stretch of bytes with a store's columns and offsets in it."""

    def __init__(self, memory: Bytes, index: _Index, descriptor: int) -> None:
        self._memory = memory
        self._index = index
        self._descriptor = descriptor
        if descriptor >= 0:
            weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def of(cls, contents: Contents) -> Self:
        """Copy everything the store holds, a shard at a time."""
        levels = {id(level): level for found in contents.levels.values() for level in found}
        order = list(levels)
        todo: list[tuple[_Place, Column]] = []
        size = 0

        def place(column: Column) -> _Place:
            nonlocal size
            found = _Place(first=size, dtype=column.dtype.str, bounds=column.bounds)
            todo.append((found, column))
            size += -(-column.total * column.dtype.itemsize // _ALIGN) * _ALIGN
            return found

        columns = {name: place(column) for name, column in contents.columns.items()}
        placed = [(x.entries, x.base, place(x.offsets)) for x in levels.values()]
        keys = {
            name: tuple(order.index(id(level)) for level in found)
            for name, found in contents.levels.items()
        }
        index = _Index(size=max(size, 1), columns=columns, levels=placed, keys=keys)
        memory, descriptor = _allocate(index.size)
        for where, column in todo:
            target = _array(memory, where)
            for begin, end in pairwise(column.bounds.tolist()):
                target[begin:end] = column.read(begin, end)
        return cls(memory, index, descriptor)

    @classmethod
    def attach(cls, handle: tuple[Any, _Index]) -> Self:
        """The memory that another process made, in a spawned worker."""
        duplicate, index = handle
        descriptor = int(duplicate.detach())
        return cls(map_descriptor(descriptor, index.size), index, descriptor)

    def for_spawn(self) -> tuple[Any, _Index] | None:
        """What to pickle while a worker is being spawned; None at any other time."""
        if self._descriptor < 0 or context.get_spawning_popen() is None:
            return None
        return reduction.DupFd(self._descriptor), self._index

    def contents(
        self, metadata: dict[str, Any], values: frozenset[str], fingerprint: str
    ) -> Contents:
        """The store over this memory."""
        index = self._index
        levels = [
            Level(entries, base, _column(self._memory, where))
            for entries, base, where in index.levels
        ]
        return Contents(
            columns={name: _column(self._memory, where) for name, where in index.columns.items()},
            levels={name: tuple(levels[i] for i in found) for name, found in index.keys.items()},
            metadata=metadata,
            values=values,
            fingerprint=lambda: fingerprint,
        )


def content_fingerprint(
    columns: Mapping[str, Column], levels: Mapping[str, Sequence[Level]]
) -> str:
    """A digest of everything a store in memory holds, and of where its parts and records begin."""
    digest = xxhash.xxh3_128()
    for name in sorted(columns):
        column = columns[name]
        digest.update(f"{name}\0{column.dtype}\0{column.total}\0".encode())
        for begin, end in pairwise(column.bounds.tolist()):
            digest.update(np.ascontiguousarray(column.read(begin, end)).tobytes())
        edges = [column.bounds]
        edges += [level.edges(np.arange(level.total + 1)) for level in levels.get(name, ())]
        for each in edges:
            digest.update(f"{len(each)}\0".encode())
            digest.update(each.astype(np.int64).tobytes())
    return digest.hexdigest()


def _allocate(size: int) -> tuple[Bytes, int]:
    """Writable shared memory, and a descriptor of it (-1 where there is none)."""
    if not hasattr(os, "memfd_create"):
        return np.frombuffer(mmap.mmap(-1, size), np.uint8), -1
    descriptor = os.memfd_create("penstock")
    os.ftruncate(descriptor, size)
    return map_descriptor(descriptor, size, writable=True), descriptor


def _array(memory: Bytes, where: _Place) -> np.ndarray[Any, np.dtype[Any]]:
    dtype = np.dtype(where.dtype)
    count = int(where.bounds[-1])
    return memory[where.first : where.first + count * dtype.itemsize].view(dtype)


def _column(memory: Bytes, where: _Place) -> Column:
    flat = _array(memory, where)
    parts = [flat[a:b] for a, b in pairwise(where.bounds.tolist())]
    return Column.of(parts, flat=flat) if parts else Column(flat.dtype, bounds_of([]), None)
