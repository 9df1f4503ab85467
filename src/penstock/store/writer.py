"""`ShardWriter`: records in, committed shards out.

    with ShardWriter("tokens", {"sequence": "uint16", "loss_mask": "bool"}) as writer:
        writer.append({"sequence": [5, 6, 0], "loss_mask": [0, 1, 1]})

Everything is checked when it comes in: ranges, dtypes, and that aligned keys have equal lengths.
The same records give the same bytes, one at a time or many at once. Leaving the `with` by an
exception, or dying, leaves no store behind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError
from penstock.pack import bounds_of
from penstock.store.manifest import MANIFEST, STORAGES, Shard, tabulate
from penstock.store.paths import safe_name
from penstock.store.schema import Key, Schema
from penstock.store.segments import I64, Array
from penstock.store.spool import Spool
from penstock.store.values import checked_offsets, checked_values
from penstock.store.workspace import (
    ALONE,
    Workspace,
    check_unfinished,
    discard,
    finish,
    left_by,
    publish,
)

if TYPE_CHECKING:
    import pyarrow as pa

_WAITING_RECORDS = 512
_WAITING_TOKENS = 1 << 20


class ShardWriter:
    """Writes one domain of a store: `<out_dir>/<domain>/<prefix>_0000` and on.

    `keys`: names with a dtype, a `Key`, or None where the dtype follows from `vocab_size`.
    `groups`: lists of aligned keys, in place of the default ones. `commit=False`: leave the
    manifest to `commit(out_dir)`, for a store that several writers make. `overwrite`: replace the
    store that is there (with `commit=False`: shards of the same name).
    """

    def __init__(
        self,
        out_dir: str | Path,
        keys: Mapping[str, Key | npt.DTypeLike | None],
        *,
        domain: str = "__default__",
        prefix: str | None = None,
        storage: Literal["bin", "h5"] = "bin",
        max_tokens_per_shard: int = 100_000_000,
        vocab_size: int | None = None,
        groups: Iterable[Iterable[str]] | None = None,
        metadata: Mapping[str, Any] | None = None,
        ledger: Mapping[str, Any] | None = None,
        commit: bool = True,
        overwrite: bool = False,
    ) -> None:
        self._metadata = _jsonable(metadata, "metadata")
        self._ledger = _jsonable(ledger, "ledger")
        if vocab_size is None:
            vocab_size = self._metadata.get("vocab_size")
        elif self._metadata.setdefault("vocab_size", vocab_size) != vocab_size:
            raise ConfigError(
                f"vocab_size is {vocab_size}, but the metadata says "
                f"{self._metadata['vocab_size']}: which is it?"
            )
        if prefix is None:
            prefix = "shard" if storage == "bin" else "data"
        _check_settings(storage, domain, prefix, max_tokens_per_shard)
        self.out = Path(out_dir)
        if (self.out / MANIFEST).exists() and not overwrite:
            raise ConfigError(
                f"{self.out} holds a store already: write elsewhere, or pass overwrite=True."
            )
        if not overwrite:
            check_unfinished(self.out, alone=commit)
        self.schema = Schema.of(keys, vocab_size=vocab_size, groups=groups)
        self.records = 0
        self._vocab_size = vocab_size
        self._domain, self._prefix, self._storage = domain, prefix, storage
        self._most = max_tokens_per_shard
        self._commit, self._overwrite = commit, overwrite
        self._finished: list[tuple[list[Path], Shard]] = []
        self._waiting: list[tuple[dict[str, Array], dict[str, I64], pa.Table | None]] = []
        self._waiting_tokens = 0
        self._spool: Spool | None = None
        self._in_spool = 0
        self._closed = False
        self._workspace = Workspace(self.out)

    # ------------------------------------------------------------------ records in

    def append(self, record: Mapping[str, Any], source: Mapping[str, Any] | None = None) -> None:
        """Add one record: an array for each key, a list of arrays for a nested one.

        `source` is its row in source.parquet: the file it came from, its address there.
        """
        self._check_open()
        self._check_keys(record)
        values: dict[str, Array] = {}
        offsets: dict[str, I64] = {}
        where = f"Record {self.records}"
        for name, key in self.schema.keys.items():
            edges = {}
            found = record[name]
            if len(key.offsets) == 2:
                if not isinstance(found, (list, tuple)):
                    raise DataError(
                        f"{where}: {name!r} is nested, so a list of arrays is expected."
                    )
                parts = [_flat(part, name, where) for part in found]
                edges[key.offsets[0]] = np.array([0, len(parts)])
                edges[key.offsets[1]] = bounds_of([len(part) for part in parts])
                flat = np.concatenate(parts) if parts else np.empty(0, np.int64)
            else:
                flat = _flat(found, name, where)
                edges[key.offsets[0]] = np.array([0, len(flat)])
            values[name] = checked_values(name, key, flat, self._vocab_size, lambda _: where)
            for array, edge in edges.items():
                if not np.array_equal(offsets.setdefault(array, edge), edge):
                    raise DataError(
                        f"{where}: {name!r} has lengths {np.diff(edge).tolist()} and the keys it "
                        f"is aligned with {np.diff(offsets[array]).tolist()}; equal ones are "
                        "expected."
                    )
        self._wait(values, offsets, None if source is None else _table([source]))

    def extend(
        self,
        values: Mapping[str, npt.ArrayLike],
        offsets: npt.ArrayLike | Mapping[str, npt.ArrayLike],
        source: pa.Table | None = None,
    ) -> None:
        """Add many records at once: each key's values end to end, and where records begin.

        `offsets` has one more number than there are records, from 0 to the total; where keys are
        not all aligned, a mapping from the first key of each group ("responses.items" for the
        items of nested ones) to its offsets. `source` has a row a record.
        """
        self._check_open()
        self._check_keys(values)
        edges = checked_offsets(self.schema, offsets)
        flat = {}
        for name, key in self.schema.keys.items():
            inner = edges[key.innermost]
            array = _flat(values[name], name, "The values")
            if len(array) != int(inner[-1]):
                raise DataError(
                    f"{name!r} has {len(array):,} values where its offsets end at "
                    f"{int(inner[-1]):,}: aligned keys have equal lengths."
                )

            def where(place: int, chain: tuple[str, ...] = key.offsets) -> str:
                for level in reversed(chain):
                    place = int(edges[level].searchsorted(place, "right")) - 1
                return f"Record {self.records + place}"

            flat[name] = checked_values(name, key, array, self._vocab_size, where)
        records = len(next(iter(edges.values()))) - 1
        if source is not None and source.num_rows != records:
            raise DataError(f"source has {source.num_rows} rows for {records} records.")
        self._flush()
        self._add(flat, edges, source)
        self.records += records

    # ------------------------------------------------------------------ an end

    def close(self) -> None:
        """Finish the last shard and put all in place; with `commit`, write the manifest too."""
        if self._closed:
            return
        try:
            self._flush()
            if self._spool is not None or (self._commit and not self._finished):
                self._cut()
            self._publish()
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop everything that was not put in place yet."""
        self._closed = True
        if self._spool is not None:
            self._spool.abandon()
            self._spool = None
        self._workspace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    @property
    def shards(self) -> list[Shard]:
        """The shards that are finished so far."""
        return [shard for _, shard in self._finished]

    def _publish(self) -> None:
        if self._commit and (self._overwrite or left_by(self.out) == ALONE):
            discard(self.out)
        moves = [
            (made, f"{self._domain}/{made.name}") for paths, _ in self._finished for made in paths
        ]
        replace_existing = self._overwrite and not self._commit
        if moves:
            publish(self.out, moves, alone=self._commit, replace_existing=replace_existing)
        if self._commit:
            table = tabulate(self.out, self.shards)
            finish(self._workspace, table, self._metadata, self._ledger)

    # ------------------------------------------------------------------ shards

    def _wait(
        self, values: dict[str, Array], offsets: dict[str, I64], source: pa.Table | None
    ) -> None:
        self._waiting.append((values, offsets, source))
        self._waiting_tokens += sum(map(len, values.values()))
        self.records += 1
        if len(self._waiting) >= _WAITING_RECORDS or self._waiting_tokens >= _WAITING_TOKENS:
            self._flush()

    def _flush(self) -> None:
        """Hand the records that wait to their shard, all at once."""
        waiting, self._waiting, self._waiting_tokens = self._waiting, [], 0
        if not waiting:
            return
        values = {
            name: np.concatenate([found[name] for found, _, _ in waiting])
            for name in self.schema.keys
        }
        offsets = {}
        for array in self.schema.parents:
            lengths = [np.diff(found[array]) for _, found, _ in waiting]
            offsets[array] = bounds_of(np.concatenate(lengths))
        sources = [source for *_, source in waiting if source is not None]
        if sources and len(sources) < len(waiting):
            raise DataError("Some records have a source and some have none: give all or none.")
        self._add(values, offsets, _joined(sources) if sources else None)

    def _add(
        self, values: Mapping[str, Array], offsets: Mapping[str, I64], source: pa.Table | None
    ) -> None:
        """Deal records out to shards, which end where the next record would not fit."""
        ends = _edges(self.schema, offsets)
        count = len(ends) - 1
        begin = 0
        while begin < count:
            room = self._most - self._in_spool
            end = int(ends.searchsorted(ends[begin] + room, "right")) - 1
            if end <= begin:
                if self._spool is not None:
                    self._cut()
                    continue
                end = begin + 1  # longer than a shard: one of its own
            if self._spool is None:
                self._spool = Spool(
                    self._made(f"{self._prefix}_{len(self._finished):04d}"), self.schema
                )
            part, edges = _records(self.schema, values, offsets, begin, end)
            self._spool.add(
                part, edges, None if source is None else source.slice(begin, end - begin)
            )
            self._in_spool += int(ends[end] - ends[begin])
            begin = end

    def _cut(self) -> None:
        """Finish the shard that is being filled."""
        name = f"{self._prefix}_{len(self._finished):04d}"
        spool = self._spool or Spool(self._made(name), self.schema)
        self._spool, self._in_spool = spool, 0
        if self._storage == "bin":
            made = [spool.folder]
            shard = spool.finish(f"{self._domain}/{name}")
        else:
            from penstock.store.hdf5_shard import finish_hdf5  # noqa: PLC0415 - h5py, for HDF5 only

            made, shard = finish_hdf5(spool, self._domain, self.schema)
        self._spool = None
        self._finished.append((made, shard))

    def _made(self, name: str) -> Path:
        return self._workspace.path / name

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("The writer is closed: make another one.")

    def _check_keys(self, record: Mapping[str, Any]) -> None:
        if record.keys() != self.schema.keys.keys():
            raise DataError(
                f"Record {self.records} has the keys {', '.join(record)}, where "
                f"{', '.join(self.schema.keys)} were expected."
            )


def _check_settings(storage: str, domain: str, prefix: str, most: int) -> None:
    if most < 1:
        raise ConfigError(f"max_tokens_per_shard is {most}; 1 is the least.")
    if storage not in STORAGES:
        raise ConfigError(f'storage is {storage!r}, where "bin" or "h5" was expected.')
    for what, name in (("domain", domain), ("prefix", prefix)):
        if not safe_name(name) or "/" in name:
            raise ConfigError(f"{what} {name!r} cannot be a name: use letters, digits, _ and -.")


def _edges(schema: Schema, offsets: Mapping[str, I64]) -> I64:
    """Tokens before each record, over all groups of keys that are not aligned."""
    innermost = {
        schema.keys[name].innermost: schema.keys[name].offsets for name in schema.token_keys
    }
    total = None
    for chain in innermost.values():
        edges = offsets[chain[0]]
        for array in chain[1:]:
            edges = offsets[array][edges]
        total = edges if total is None else total + edges
    assert total is not None
    return total


def _records(
    schema: Schema, values: Mapping[str, Array], offsets: Mapping[str, I64], begin: int, end: int
) -> tuple[dict[str, Array], dict[str, I64]]:
    """Records [begin, end), their offsets counted from 0."""
    spans: dict[str | None, tuple[int, int]] = {None: (begin, end)}
    edges = {}
    for array, parent in schema.parents.items():
        first, last = spans[parent]
        found = offsets[array][first : last + 1]
        spans[array] = (int(found[0]), int(found[-1]))
        edges[array] = found - found[0]
    part = {}
    for name, key in schema.keys.items():
        first, last = spans[key.innermost]
        part[name] = values[name][first:last]
    return part, edges


def _flat(value: Any, name: str, where: str) -> Array:
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError):
        found = np.empty((0, 0))
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        raise DataError(f"{where}: {name!r} is not a flat array of numbers.")
    return found if found.size else np.empty(0, np.int64)  # numpy reads [] as float64


def _jsonable(value: Mapping[str, Any] | None, what: str) -> dict[str, Any]:
    try:
        found = json.loads(json.dumps(dict(value or {}), allow_nan=False))
    except (TypeError, ValueError) as err:
        raise ConfigError(f"{what} cannot be written as JSON: {err}.") from None
    assert isinstance(found, dict)
    return found


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    import pyarrow as pa  # noqa: PLC0415 - only stores with sources need Arrow

    return pa.Table.from_pylist(list(rows))


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    import pyarrow as pa  # noqa: PLC0415

    return pa.concat_tables(tables)
