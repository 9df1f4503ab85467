"""`H5Store`: tokens in HDF5 files.

AstrAI's layout is a group for each key with datasets `data_<i>`, read in numeric order, each one
a record; a dataset in place of the group is one stretch of values, a group in place of a dataset
one more level of records (`responses/data_<record>/data_<item>`).

Penstock's own is `<domain>/data_<shard>.h5`: each key's values in `<key>/data_0`, the offsets of
its records in `__offsets__/<array>`, and what a meta.json would say in the attribute `penstock`.

Stored contiguously, a dataset is mapped from the file like a `.bin`; h5py only says where it is.
Compressed or chunked ones are read a slice at a time. Links and data outside the file are refused.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import h5py
import numpy as np

from penstock.errors import DataError, MissingData, PenstockError
from penstock.pack import bounds_of
from penstock.store.aligned import Part, check_aligned
from penstock.store.base import PathLike, Store
from penstock.store.binary import check_offsets, refuse_unfinished
from penstock.store.contents import Contents, sampled_fingerprint, tabled, value_keys
from penstock.store.manifest import MANIFEST, Shard, Table, parse_meta, read_manifest, tabulate
from penstock.store.mapping import map_file
from penstock.store.paths import HDF5, inside, natural, scan
from penstock.store.records import Level
from penstock.store.schema import DTYPES
from penstock.store.segments import Array, Column, Segment, common_dtype

ATTRIBUTE = "penstock"
OFFSETS = "__offsets__"
_OPEN_FILES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One dataset: where its bytes are in the file, if they lie there as one stretch."""

    path: Path
    name: str
    dtype: np.dtype[Any]
    count: int
    offset: int | None


class H5Store(Store):
    """A store of HDF5 files: one file, or all `.h5` and `.hdf5` below a folder, sorted by path.

    `share_memory`: copy everything into shared memory when loaded. `partial`: open a Penstock
    store whose writer has not finished.
    """

    _segments_are_records = True

    def __init__(self, share_memory: bool = False, *, partial: bool = False) -> None:
        super().__init__()
        self._share_memory = share_memory
        self._partial = partial

    def load(self, path: PathLike) -> Self:
        """Open what stands at `path`, and copy it into shared memory if that was asked for."""
        super().load(path)
        return self.share_memory_() if self._share_memory else self

    def _open(self, path: Path) -> Contents:
        if path.is_file():
            return _open_files(path, [path])
        if (path / MANIFEST).is_file():
            table = read_manifest(path)
            if table.storage != "h5":
                raise DataError(f"{path} holds .bin shards: open it with MmapStore or open_store.")
            return _open_table(table, lambda: table.digest)
        refuse_unfinished(path, partial=self._partial)
        files = list(scan(path, lambda name: name.lower().endswith(HDF5)))
        if not files:
            raise MissingData(f"No supported data files found at {path}: no .h5 or .hdf5 file.")
        return _open_files(path, files)


# ---------------------------------------------------------------------------- reading files


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """An HDF5 file for a moment; what h5py finds wrong with it in one sentence."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except PenstockError:
        raise
    except FileNotFoundError:
        raise MissingData(f"{path} is missing: restore it or write the store again.") from None
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as err:
        why = " ".join(str(err).split())  # h5py's may have lines
        raise DataError(f"{path} is not an HDF5 file that can be read: {why}.") from err


def _members(group: h5py.Group, where: str) -> list[tuple[str, Any]]:
    """What a group holds, in natural order; only things that are in this very file."""
    found = []
    for name in sorted(group, key=natural):
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise DataError(
                f"{where}/{name} is a soft or external link, which a store must not have: copy the "
                "data into the file."
            )
        found.append((name, group[name]))
    return found


def _place(path: Path, dataset: Any) -> _Place:
    """Where a dataset of numbers is; refuses everything else."""
    where = f"{path}: {getattr(dataset, 'name', '?')}"
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(f"{where} is not a dataset.")
    if dataset.external or dataset.is_virtual:
        raise DataError(f"{where} keeps its data outside the file: copy the data into it.")
    dtype = dataset.dtype
    if dtype.newbyteorder("=").name not in DTYPES or dtype.subdtype is not None:
        raise DataError(f"{where} holds {dtype} values, where numbers were expected.")
    if dataset.ndim != 1:
        raise DataError(f"{where} has shape {dataset.shape}, where one dimension was expected.")
    count = int(dataset.shape[0])
    offset = dataset.id.get_offset() if count else 0
    if dataset.id.get_type() != h5py.h5t.py_create(dtype, logical=True):
        offset = None  # a type that numpy has not, and h5py converts
    return _Place(path=path, name=dataset.name, dtype=dtype, count=count, offset=offset)


class _Reader:
    """Segments of HDF5 files: views of the mapped file, or slices read through h5py."""

    def __init__(self) -> None:
        self._regions: weakref.WeakValueDictionary[Path, Array] = weakref.WeakValueDictionary()
        self._files: OrderedDict[Path, h5py.File] = OrderedDict()
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def segment(self, place: _Place, size: int | None = None) -> Segment:
        """The values of a dataset; its file is to hold `size` bytes."""
        if place.offset is None:
            return _Slices(self, place)
        if not place.count:
            return np.empty(0, place.dtype)
        region = self._regions.get(place.path)
        if region is None:
            region = map_file(place.path, size)
            self._regions[place.path] = region
        values = region[place.offset : place.offset + place.count * place.dtype.itemsize]
        if len(values) != place.count * place.dtype.itemsize:
            raise DataError(f"{place.path} is cut short: {place.name} goes on past its end.")
        return values.view(place.dtype)

    def read(self, place: _Place, span: slice) -> Array:
        """Some values of a dataset that cannot be mapped."""
        with self._lock:
            if self._owner != os.getpid():
                # HDF5 does not survive a fork: the parent's handles are left alone, never closed.
                _INHERITED.append(self._files)
                self._files, self._owner = OrderedDict(), os.getpid()
            file = self._files.pop(place.path, None) or h5py.File(place.path, "r", locking=False)
            self._files[place.path] = file
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            found: Array = file[place.name][span]
        return found


_INHERITED: list[Any] = []


class _Slices:
    """A dataset that is read a slice at a time."""

    def __init__(self, reader: _Reader, place: _Place) -> None:
        self._reader = reader
        self._place = place

    def __getitem__(self, span: slice) -> Array:
        return self._reader.read(self._place, span)


# ---------------------------------------------------------------------------- foreign files


def _open_files(root: Path, files: Sequence[Path]) -> Contents:
    """Files without a manifest: Penstock's by their attribute, others by their groups."""
    shards = [shard for shard in (read_shard(root, path) for path in files) if shard is not None]
    if shards and len(shards) < len(files):
        raise DataError(f"{root} mixes HDF5 files of Penstock with others: separate them.")
    base = root.parent if root.is_file() else root
    if shards:
        shards.sort(key=lambda shard: natural(shard.path))
        table = tabulate(base, shards)
        return _open_table(table, lambda: sampled_fingerprint(root, files))
    groups: dict[Path, dict[str, _Foreign]] = {}
    for path in files:
        with opened(path) as file:
            groups[path] = {
                key: _foreign_key(path, member) for key, member in _members(file, str(path))
            }
    check_aligned(
        {path: {key: found.part for key, found in keys.items()} for path, keys in groups.items()}
    )
    columns, levels = {}, {}
    reader = _Reader()
    for key in dict.fromkeys(key for keys in groups.values() for key in keys):
        found = [keys[key] for keys in groups.values() if key in keys]
        columns[key] = _column([place for one in found for place in one.places], reader, root)
        level = _foreign_levels(columns[key], [one.items for one in found])
        if level:
            levels[key] = level
    return Contents(
        columns=columns,
        levels=levels,
        values=value_keys(columns),
        fingerprint=lambda: sampled_fingerprint(root, files),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Foreign:
    """A key in one file: its datasets, and how many each record has; None without records."""

    places: list[_Place]
    items: list[int] | None

    @property
    def part(self) -> Part:
        """What has to be the same for keys that belong together."""
        return Part(lengths=[place.count for place in self.places], records=self.items)


def _foreign_key(path: Path, member: Any) -> _Foreign:
    if not isinstance(member, h5py.Group):
        return _Foreign(places=[_place(path, member)], items=None)
    places, items = [], []
    for _, record in _members(member, f"{path}:{member.name}"):
        inner = [("", record)]
        if isinstance(record, h5py.Group):
            inner = _members(record, f"{path}:{record.name}")
        places += [_place(path, dataset) for _, dataset in inner]
        items.append(len(inner))
    return _Foreign(places=places, items=items)


def _foreign_levels(column: Column, files: Sequence[list[int] | None]) -> tuple[Level, ...]:
    """A key's records: one dataset each, or a group of them; none where a file has none."""
    counts = [count for items in files for count in items or ()]
    if not counts or any(items is None for items in files):
        return ()
    if counts == [1] * column.shards:
        return (Level.of([column.bounds]),)
    return Level.of([bounds_of(counts)]), Level.of([column.bounds])


def _column(places: Sequence[_Place], reader: _Reader, root: Path) -> Column:
    dtype = common_dtype([place.dtype for place in places], root)
    bounds = bounds_of([place.count for place in places])
    # Not pooled: thousands of datasets are views of one mapped file.
    return Column(dtype, bounds, lambda i: reader.segment(places[i]), pooled=False)


# ---------------------------------------------------------------------------- Penstock's own


def read_shard(root: Path, path: Path) -> Shard | None:
    """What a file of Penstock's says of itself; None for a foreign one."""
    with opened(path) as file:
        stated = file.attrs.get(ATTRIBUTE)
    if not isinstance(stated, str):
        return None
    name = path.name if root == path else path.relative_to(root).as_posix()
    return parse_meta(stated.encode(), path, name, checksum="", size=path.stat().st_size)


def _open_table(table: Table, fingerprint: Callable[[], str]) -> Contents:
    """A Penstock store of HDF5 shards; each file is looked at when it is first read."""
    root, schema, reader = table.root.resolve(), table.schema, _Reader()
    places: OrderedDict[int, dict[str, _Place]] = OrderedDict()

    def find(shard: int, name: str, count: int) -> tuple[Segment, _Place]:
        found = places.get(shard)
        if found is None:
            found = _shard_places(
                inside(root, table.paths[shard]), [*schema.keys], [*schema.parents]
            )
            places[shard] = found
            if len(places) > 4096:
                places.popitem(last=False)
        place = found[name]
        if place.count != count:
            raise DataError(
                f"{place.path}: {name} has {place.count:,} values where {count:,} were expected: "
                "restore it or write the store again."
            )
        return reader.segment(place, int(table.sizes[shard])), place

    def values(key: str) -> Callable[[int], Segment]:
        totals = table.totals[schema.keys[key].innermost]
        dtype = np.dtype(schema.keys[key].dtype)

        def open_shard(shard: int) -> Segment:
            found, place = find(shard, f"{key}/data_0", int(totals[shard]))
            if place.dtype.newbyteorder("=") != dtype:
                raise DataError(f"{place.path}: {place.name} is {place.dtype}, not {dtype}.")
            return found

        return open_shard

    def offsets(array: str) -> Callable[[int], Segment]:
        entries = schema.entries(array, table.documents, table.totals)

        def open_shard(shard: int) -> Segment:
            found, place = find(shard, f"{OFFSETS}/{array}", int(entries[shard]) + 1)
            total = int(table.totals[array][shard])
            numbers = found[0 : place.count].astype(np.int64, copy=False)
            return check_offsets(numbers, total, place.path)

        return open_shard

    return tabled(table, values, offsets, fingerprint)


def _shard_places(path: Path, keys: Sequence[str], arrays: Sequence[str]) -> dict[str, _Place]:
    wanted = [f"{key}/data_0" for key in keys] + [f"{OFFSETS}/{array}" for array in arrays]
    found = {}
    with opened(path) as file:
        tops = dict(_members(file, str(path)))
        for name in wanted:
            group, _, member = name.partition("/")
            inner = tops.get(group)
            dataset = None
            if isinstance(inner, h5py.Group):
                dataset = dict(_members(inner, f"{path}:{group}")).get(member)
            if dataset is None:
                raise DataError(f"{path} has no dataset {name}: write the store again.")
            found[name] = _place(path, dataset)
    return found
