"""Foreign stores: AstrAI's flat meta.json, folders of .npy files, raw .bin files.

AstrAI writes, in any number of folders, `<key>.bin` files and a meta.json

    {"sequence": {"shape": [10], "dtype": "int32", "offsets": [0, 4, 10]}}

whose offsets (starts of records, with or without the final total) are optional. A folder of .npy
or raw .bin files is one key, "sequence", each file a shard, in the order of their paths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError, MissingData
from penstock.pack import bounds_of
from penstock.store.aligned import Part, check_aligned
from penstock.store.contents import Contents, sampled_fingerprint, value_keys
from penstock.store.manifest import META
from penstock.store.mapping import map_file
from penstock.store.paths import inside, read_json, safe_name
from penstock.store.records import Level
from penstock.store.schema import named_dtype, parse_dtype
from penstock.store.segments import Array, Column, common_dtype

SEQUENCE = "sequence"


def column_of_files(
    dtypes: Sequence[np.dtype[Any]],
    counts: Sequence[int],
    opener: Callable[[int], Array],
    where: object,
) -> Column:
    """A column with a file, or a stretch of one, for each shard."""
    return Column(common_dtype(dtypes, where), bounds_of(counts), opener)


# ---------------------------------------------------------------------------- AstrAI's meta.json


def open_meta(root: Path, metas: Sequence[Path]) -> Contents:
    """The keys that AstrAI's meta.json files describe, shards in the order of the files."""
    files: dict[str, list[tuple[Path, np.dtype[Any], int]]] = {}
    offsets: dict[str, list[Array | None]] = {}
    parts: dict[Path, dict[str, Part]] = {}
    for meta in metas:
        parts[meta] = {}
        for key, entry in read_json(meta).items():
            path, dtype, count, starts = _entry(meta, key, entry)
            files.setdefault(key, []).append((path, dtype, count))
            offsets.setdefault(key, []).append(starts)
            sizes = None if starts is None else np.diff(starts)
            parts[meta][key] = Part(lengths=[count], records=sizes)
    check_aligned(parts)
    columns = {key: _mapped(shards, root) for key, shards in files.items()}
    levels: dict[str, tuple[Level, ...]] = {
        key: (Level.of([starts for starts in found if starts is not None]),)
        for key, found in offsets.items()
        if all(starts is not None for starts in found)
    }

    def fingerprint() -> str:
        shards = [path for found in files.values() for path, _, _ in found]
        return sampled_fingerprint(root, [*metas, *shards])

    return Contents(
        columns=columns, levels=levels, values=value_keys(columns), fingerprint=fingerprint
    )


def _mapped(shards: Sequence[tuple[Path, np.dtype[Any], int]], root: Path) -> Column:
    def open_shard(index: int) -> Array:
        path, dtype, count = shards[index]
        return map_file(path, count * dtype.itemsize, f" ({count:,} of {dtype})").view(dtype)

    dtypes = [dtype for _, dtype, _ in shards]
    return column_of_files(dtypes, [count for *_, count in shards], open_shard, root)


def _entry(meta: Path, key: str, entry: object) -> tuple[Path, np.dtype[Any], int, Array | None]:
    """One key of a flat meta.json: its file, dtype, length and record offsets."""
    if not safe_name(key) or "/" in key:
        raise DataError(f"{meta} has the key {key!r}, which is not the name of a file beside it.")
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if (
        not isinstance(entry, dict)
        or not isinstance(shape, list)
        or len(shape) != 1
        or type(shape[0]) is not int
        or not 0 <= shape[0] < 2**53
    ):
        raise DataError(
            f"{meta} describes {key!r} as {str(entry)[:80]}, where "
            '{"shape": [length], "dtype": name} was expected.'
        )
    dtype = parse_dtype(entry.get("dtype"), f"{meta}, key {key!r},")
    starts = None
    if entry.get("offsets") is not None:
        starts = _offsets(entry["offsets"], shape[0], f"{meta}, the offsets of {key!r}")
    return inside(meta.parent, f"{key}.bin"), dtype, shape[0], starts


def _offsets(value: object, total: int, where: str) -> Array:
    """Record offsets with their final total, which the list may or may not hold.

    >>> _offsets([0, 4], 10, "…").tolist(), _offsets([0, 4, 10], 10, "…").tolist()
    ([0, 4, 10], [0, 4, 10])
    """
    try:
        found = np.array(value if isinstance(value, list) else None)
    except (ValueError, OverflowError):
        found = np.empty(0)
    if value == []:
        found = np.zeros(1, np.int64)
    if found.dtype != np.int64 or found.ndim != 1 or found[0] != 0 or (np.diff(found) < 0).any():
        raise DataError(f"{where} are not a rising list of whole numbers from 0.")
    if found[-1] > total:
        raise DataError(f"{where} reach {found[-1]:,}, past the total of {total:,}.")
    return found if found[-1] == total else np.append(found, total)


# ---------------------------------------------------------------------------- .npy and raw .bin


def open_npy(root: Path, files: Sequence[Path]) -> Contents:
    """A folder of .npy files, or one, as the key "sequence"."""
    headers = [npy_header(path) for path in files]

    def open_file(index: int) -> Array:
        dtype, count, skip = headers[index]
        why = f" (a header of {skip} and {count:,} of {dtype})"
        return map_file(files[index], skip + count * dtype.itemsize, why)[skip:].view(dtype)

    dtypes = [dtype for dtype, _, _ in headers]
    column = column_of_files(dtypes, [count for _, count, _ in headers], open_file, root)
    return Contents(
        columns={SEQUENCE: column}, fingerprint=lambda: sampled_fingerprint(root, files)
    )


def npy_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    """A .npy file's dtype, its length, and where its values begin; never unpickles."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            if version not in {(1, 0), (2, 0)}:
                raise ValueError(f"its .npy version is {version}")
            reader = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = reader(file)
            skip = file.tell()
            size = file.seek(0, 2)
    except FileNotFoundError:
        raise MissingData(f"{path} is missing: name a .npy file or a folder of them.") from None
    except (ValueError, OSError, TypeError, RecursionError, MemoryError) as err:
        raise DataError(f"{path} is not a .npy file that can be read: {err}.") from err
    if dtype.kind not in "iu":
        raise DataError(f"{path} holds {dtype} values, where integer tokens were expected.")
    if len(shape) != 1:
        raise DataError(
            f"{path} has shape {shape}, where one dimension of tokens was expected: save "
            "tokens.reshape(-1)."
        )
    if size != skip + int(shape[0]) * dtype.itemsize:
        raise DataError(
            f"{path} holds {size:,} bytes where its header of {skip} announces {shape[0]:,} of "
            f"{dtype}: it was cut short or changed; write it again."
        )
    return dtype, int(shape[0]), skip


def open_raw(
    root: Path,
    files: Sequence[Path],
    dtype: npt.DTypeLike | None,
    default: npt.DTypeLike | None = None,
) -> Contents:
    """Raw .bin files without a header as the key "sequence", each of the dtype stated for it."""
    shards = [
        (path, stated := _stated(path, dtype, default), _count(path, stated)) for path in files
    ]
    names = [stated.name for _, stated, _ in shards]
    facts = names if len(set(names)) > 1 else names[:1]
    return Contents(
        columns={SEQUENCE: _mapped(shards, root)},
        fingerprint=lambda: sampled_fingerprint(root, files, *facts),
    )


def raw_dtype_beside(path: Path) -> str | None:
    """The dtype that a meta.json beside a raw .bin file states for it, or for all: {"dtype": …}."""
    meta = path.parent / META
    if not meta.exists():
        return None
    value = read_json(meta)
    keys = value.get("keys")  # a shard of Penstock's own
    entry = (keys if isinstance(keys, dict) else value).get(path.stem, value)
    found = entry.get("dtype") if isinstance(entry, dict) else None
    return None if found is None else parse_dtype(found, meta).name


def _stated(
    path: Path, dtype: npt.DTypeLike | None, default: npt.DTypeLike | None
) -> np.dtype[Any]:
    """The dtype of a raw file: what was passed, else what is beside it, else the default."""
    found = raw_dtype_beside(path) if dtype is None else dtype
    found = default if found is None else found
    if found is None:
        there = (path.parent / META).exists()
        what = (
            "a meta.json beside it which states no dtype for it"
            if there
            else "no meta.json beside it"
        )
        raise ConfigError(
            f"{path} has {what}, so its dtype is unknown: pass dtype='uint16' (or what it is), or "
            "run `penstock prepare`."
        )
    stated = np.dtype(named_dtype(found)).newbyteorder("<")
    if stated.kind not in "iu":
        raise ConfigError(f"dtype is {stated}, where an integer dtype of tokens was expected.")
    return stated


def _count(path: Path, dtype: np.dtype[Any]) -> int:
    """How many tokens a raw file holds."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise MissingData(f"{path} is missing: name a .bin file or a folder of them.") from None
    count, rest = divmod(size, dtype.itemsize)
    if rest:
        raise DataError(
            f"{path} holds {size:,} bytes, which is not a whole number of {dtype} tokens: "
            "it is cut short, or the dtype is another."
        )
    return count
