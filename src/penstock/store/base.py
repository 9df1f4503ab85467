"""Tokens at rest: `Store`, the same over every format on disk.

    >>> store = Store()
    >>> store._normalize({"sequence": [np.arange(3), np.arange(10, 14)]})
    >>> len(store), store.keys, store.read(2, 5, "sequence").tolist()
    (7, ['sequence'], [2, 10, 11])

Positions are counted over all shards of a key, and records over all shards of the store.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError, MissingData, OutOfBounds
from penstock.store import advice, shared
from penstock.store.contents import Contents, empty, in_memory, value_keys
from penstock.store.records import Level
from penstock.store.schema import is_mask
from penstock.store.segments import I64, Array, Column, positions_of
from penstock.store.values import check_int64

if TYPE_CHECKING:
    import torch

PathLike = str | Path
Names = list[str] | tuple[str, ...]
Record = Array | list[Array]


class Store:
    """A store of tokens and whatever is aligned with them. Safe to read from many threads.

    Subclasses say what a path holds; all the rest is here.
    """

    _segments_are_records = False  # whether each array of `_normalize` is a record of its own

    def __init__(self) -> None:
        self._contents: Contents | None = None
        self._path: Path | None = None
        self._fingerprint: str | None = None
        self._shared: shared.SharedMemory | None = None
        self._was_closed = False
        self._length = 0

    # ------------------------------------------------------------------ opening and closing

    def load(self, path: PathLike) -> Self:
        """Open what stands at `path`; shards are opened when they are first read."""
        place = Path(path).absolute()  # shards are opened later, perhaps after a chdir
        contents = self._open(place)
        self.close()
        self._path, self._was_closed = place, False
        self._take(contents)
        return self

    def _take(self, contents: Contents) -> None:
        self._contents = contents
        tokens = [c.total for name, c in contents.columns.items() if name not in contents.values]
        self._length = min(tokens, default=0)

    def _open(self, path: Path) -> Contents:
        raise ConfigError(f"Store reads no format of its own: use open_store({str(path)!r}).")

    def close(self) -> None:
        """Let go of every file; views already handed out stay valid. Closing twice is fine."""
        contents, self._contents = self._contents, None
        self._fingerprint = self._shared = None
        self._length = 0
        if contents is None:
            return
        self._was_closed = True
        for column in contents.columns.values():
            column.close()
        for level in {id(x): x for found in contents.levels.values() for x in found}.values():
            level.offsets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def share_memory_(self) -> Self:
        """Copy everything into memory that forked and spawned workers share."""
        contents = self._loaded()
        fingerprint = self.fingerprint
        self._shared = shared.SharedMemory.of(contents)
        self._take(self._shared.contents(contents.metadata, contents.values, fingerprint))
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A path to open again; or, for a spawned worker, the shared memory itself."""
        state = {**self.__dict__, "_contents": None, "_shared": None}
        contents = self._contents
        if contents is None:
            return state
        handle = None if self._shared is None else self._shared.for_spawn()
        if handle is not None:
            facts = (contents.metadata, contents.values, self.fingerprint)
            return {**state, "_contents": (handle, *facts)}
        if self._path is None:
            raw = {name: column.arrays() for name, column in contents.columns.items()}
            return {**state, "_contents": raw}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        carried = state.pop("_contents")
        self.__dict__.update(state)
        self._contents = None
        if isinstance(carried, tuple):
            handle, *facts = carried
            self._shared = shared.SharedMemory.attach(handle)
            self._take(self._shared.contents(*facts))
        elif carried is not None:
            self._normalize(carried)
        elif self._path is not None and not self._was_closed:
            self._take(self._open(self._path))

    # ------------------------------------------------------------------ facts

    @property
    def path(self) -> Path | None:
        """Where the store was loaded from, as an absolute path."""
        return self._path

    @property
    def keys(self) -> list[str]:
        """Names of the keys; none before load."""
        return [] if self._contents is None else list(self._contents.columns)

    def __len__(self) -> int:
        """Tokens: the least total of the per-token keys; 0 before load."""
        return self._length

    @property
    def documents(self) -> int:
        """Number of records; 0 where no offsets are known."""
        levels = [] if self._contents is None else self._contents.levels.values()
        return min((found[0].total for found in levels), default=0)

    def documents_of(self, key: str) -> int:
        """Number of records of one key; 0 where it has no offsets."""
        levels = self._loaded().levels.get(key, ())
        return levels[0].total if levels else 0

    @property
    def fingerprint(self) -> str:
        """A digest of what the store holds, as hex; cheap, and computed once."""
        contents = self._loaded()
        if self._fingerprint is None:
            self._fingerprint = contents.fingerprint()
        return self._fingerprint

    @property
    def metadata(self) -> dict[str, Any]:
        """What the writer was told: tokenizer, eos_token_id, vocab_size, recipe, ledger."""
        return {} if self._contents is None else dict(self._contents.metadata)

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a document, where the metadata says."""
        found = self.metadata.get("eos_token_id")
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def total(self, key: str) -> int:
        """How many values a key has."""
        return self._column(key).total

    def dtype(self, key: str) -> np.dtype[Any]:
        """The dtype in which `read` and `gather` give a key."""
        return self._column(key).dtype

    def bounds(self, key: str) -> I64:
        """Starts of the key's shards, and its total: shards + 1 positions."""
        bounds = self._column(key).bounds.view()
        bounds.flags.writeable = False
        return bounds

    def is_mask(self, key: str) -> bool:
        """Whether `fetch` gives this key as bool."""
        kind = self._column(key).dtype.kind
        return kind == "b" or (kind in "iu" and is_mask(key))

    # ------------------------------------------------------------------ positions

    @overload
    def read(self, begin: int, end: int, keys: str) -> Array: ...
    @overload
    def read(self, begin: int, end: int, keys: Names) -> dict[str, Array]: ...
    def read(self, begin: int, end: int, keys: str | Names) -> Array | dict[str, Array]:
        """Values [begin, end): a read-only view where one shard holds them, else a copy."""
        contents = self._loaded()
        begin, end = operator.index(begin), operator.index(end)
        names = [keys] if isinstance(keys, str) else keys
        length = self._length
        for name in names:
            if name in contents.values:
                length = min(length, self._column(name).total)
        if not (0 <= begin < length and begin <= end <= length):
            raise OutOfBounds(f"Index out of bounds: begin={begin}, end={end}, length={length}.")
        found = {name: self._column(name).read(begin, end) for name in names}
        return found[keys] if isinstance(keys, str) else found

    @overload
    def fetch(
        self, begin: int, end: int, keys: str, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor: ...
    @overload
    def fetch(
        self, begin: int, end: int, keys: Names, *, dtype: torch.dtype | None = None
    ) -> dict[str, torch.Tensor]: ...
    def fetch(
        self, begin: int, end: int, keys: str | Names, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Values [begin, end) as fresh tensors: int64 for integers, bool for masks, or `dtype`."""
        import torch  # noqa: PLC0415 - the store is numpy; only this function needs torch

        names = [keys] if isinstance(keys, str) else list(keys)
        tensors = {}
        for name, values in self.read(begin, end, names).items():
            wanted = values.dtype.newbyteorder("=")
            if self.is_mask(name):
                wanted = np.dtype(np.bool_)
            elif values.dtype.kind in "iu":
                wanted = np.dtype(np.int64)
                if dtype is None:
                    check_int64(values, f"{self._path or 'The store'}: {name!r}")
            tensor = torch.from_numpy(values.astype(wanted))
            tensors[name] = tensor if dtype is None else tensor.to(dtype)
        return tensors[keys] if isinstance(keys, str) else tensors

    def gather(
        self, starts: npt.ArrayLike, length: int, key: str, out: Array | None = None
    ) -> Array:
        """Rows of `length` values from each start, in the stored dtype; or into `out`.

        The hot path: one fancy index, whatever the number of shards.
        """
        return self._column(key).gather(starts, length, out)

    def spans(self, starts: npt.ArrayLike, lengths: npt.ArrayLike, key: str) -> Array:
        """Values [start, start + length), of any lengths, end to end, in the stored dtype."""
        return self._column(key).spans(starts, lengths)

    def advise(self, starts: npt.ArrayLike, length: int | I64, key: str) -> None:
        """Start reading these rows or spans from disk, in one system call, before they are needed.

        What is wrong with a file is left to `gather` or `spans` to say.
        """
        column = self._column(key)
        if isinstance(length, np.ndarray):
            index, length = column.check_spans(starts, length)
        else:
            index = column.check(starts, length)
        with suppress(DataError, MissingData):
            begin, end, kept = column.ranges(index, length)
            advice.will_need(begin, end)
            del kept  # the addresses were valid until here

    def expect_random(self, *keys: str) -> None:
        """Rows of these keys will be read in no order: read pages one by one, not in stretches."""
        for key in keys:
            self._column(key).expect_random()

    # ------------------------------------------------------------------ records

    @overload
    def record(self, index: int, keys: str) -> Record: ...
    @overload
    def record(self, index: int, keys: Names) -> dict[str, Record]: ...
    def record(self, index: int, keys: str | Names) -> Record | dict[str, Record]:
        """Record `index` of a key: an array, or where the key is nested a list of arrays."""
        names = [keys] if isinstance(keys, str) else keys
        found = {name: self._record(operator.index(index), name) for name in names}
        return found[keys] if isinstance(keys, str) else found

    def _record(self, index: int, key: str) -> Record:
        column, levels = self._column(key), self._levels(key)
        if not 0 <= index < levels[0].total:
            raise OutOfBounds(f"Record {index} is out of bounds: there are {levels[0].total}.")
        entry = np.array([index])
        begin, end = (int(edge[0]) for edge in levels[0].spans(entry))
        if len(levels) == 1:
            return column.read(begin, end)
        starts, ends = levels[1].spans(np.arange(begin, end))
        return [column.read(a, b) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def document_spans(self, indices: npt.ArrayLike, key: str | None = None) -> tuple[I64, I64]:
        """Where these records begin and end among the key's values."""
        levels = self._levels(key)
        entries = positions_of(indices, levels[0].total, "Record")
        starts, ends = levels[0].spans(entries)
        for level in levels[1:]:
            starts, ends = level.edges(starts), level.edges(ends)
        return starts, ends

    def document_of(self, positions: npt.ArrayLike, key: str | None = None) -> I64:
        """Which record holds each of the key's values."""
        levels = self._levels(key)
        found = positions_of(positions, int(levels[-1].base[-1]), "Position")
        for level in reversed(levels):
            found = level.owner(found)
        return found

    def record_lengths(self, key: str | None = None, begin: int = 0, end: int | None = None) -> I64:
        """How many values of the key each of the records [begin, end) has."""
        levels = self._levels(key)
        count = levels[0].total
        end = count if end is None else end
        if not 0 <= begin <= end <= count:
            raise OutOfBounds(f"Records out of bounds: begin={begin}, end={end}, length={count}.")
        if len(levels) == 1:
            return levels[0].lengths(begin, end)
        edges = np.arange(begin, end + 1)
        for level in levels:
            edges = level.edges(edges)
        found: I64 = np.diff(edges)
        return found

    def cuts(self, starts: npt.ArrayLike, length: int, key: str | None = None) -> I64:
        """Where records begin inside rows: sorted places row * length + column, column > 0."""
        levels, name = self._levels(key), self._main(key)
        index = self._column(name).check(starts, length)
        if len(levels) == 1:
            return levels[0].cuts(index, length)
        inner = levels[1].cuts(index, length)
        rows, columns = np.divmod(inner, length)
        positions = index[rows] + columns
        first = levels[1].edges(levels[0].edges(levels[0].owner(levels[1].owner(positions))))
        found: I64 = inner[first == positions]
        return found

    # ------------------------------------------------------------------ AstrAI's names

    def _normalize(self, raw: Mapping[str, Sequence[Any]]) -> None:
        """Register arrays or tensors in memory, a list of segments a key."""
        found = in_memory(raw, each_is_a_record=self._segments_are_records)
        kept = self._contents or empty()
        columns = {**kept.columns, **found.columns}
        levels = {**kept.levels, **found.levels}
        self._fingerprint = None
        self._take(
            replace(
                kept,
                columns=columns,
                levels=levels,
                values=value_keys(columns),
                fingerprint=lambda: shared.content_fingerprint(columns, levels),
            )
        )

    @property
    def _data(self) -> dict[str, list[Array]]:
        """Each key's shards, as read-only arrays."""
        return {name: column.arrays() for name, column in self._columns().items()}

    @property
    def _cum(self) -> dict[str, list[int]]:
        """Each key's cumulative lengths: where its shards end."""
        return {name: column.bounds[1:].tolist() for name, column in self._columns().items()}

    @property
    def contents(self) -> Contents:
        """The open columns and levels, which `verify` looks at."""
        return self._loaded()

    def _loaded(self) -> Contents:
        contents = self._contents
        if contents is None:
            if self._was_closed:
                raise RuntimeError(f"Store is closed: call load({str(self._path)!r}) again.")
            raise RuntimeError("Store not loaded: call load(path) first.")
        return contents

    def _columns(self) -> dict[str, Column]:
        return {} if self._contents is None else self._contents.columns

    def _column(self, key: str) -> Column:
        columns = self._loaded().columns
        try:
            return columns[key]
        except (KeyError, TypeError):
            names = ", ".join(columns) or "none"
            raise DataError(f"The store has no key {key!r}; its keys are: {names}.") from None

    def _main(self, key: str | None) -> str:
        """The key that is meant where none is named: the first one that has records."""
        contents = self._loaded()
        if key is not None:
            return key
        return "sequence" if "sequence" in contents.levels else next(iter(contents.levels), "")

    def _levels(self, key: str | None) -> tuple[Level, ...]:
        contents = self._loaded()
        name = self._main(key)
        found = contents.levels.get(name)
        if found is None:
            if key is not None:
                self._column(key)
            raise DataError(
                f"{self._path} has no record offsets{f' for {name!r}' if name else ''}, so where "
                "its records begin is unknown: prepare it again, or read it by position."
            )
        return found
