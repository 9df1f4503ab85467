"""What a store says of itself: manifest.json, and the meta.json of each shard.

The manifest is in columns, so that a store of 100,000 shards is a few arrays and opens without a
look at any shard. Format version 1, for one shard of ten tokens in two records:

    {"format": "penstock", "version": 1, "storage": "bin", "tokens": 10, "documents": 2,
     "keys": {"sequence": {"dtype": "uint16", "role": "ids", "offsets": ["sequence"]}},
     "shards": {"path": ["__default__/shard_0000"], "documents": [2],
                "totals": {"sequence": [10]}, "checksum": ["…"], "bytes": [0]},
     "metadata": {"eos_token_id": 0}, "ledger": {}, "digest": "…"}

`totals` has one column an offsets array: what it measures, tokens or items. The checksum is that
of the shard's meta.json, which holds those of its other files; or that of its one HDF5 file,
whose size is in `bytes`. The digest, which comes last, is that of all bytes before it; the first
manifests of version 1 had none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.errors import DataError
from penstock.store.paths import natural, parse_json, read_bytes, read_json, safe_name, scan
from penstock.store.schema import Schema
from penstock.store.segments import I64

FORMAT = "penstock"
FORMAT_VERSION = 1
STORAGES = ("bin", "h5")
MANIFEST = "manifest.json"
META = "meta.json"
INCOMPLETE = ".incomplete"  # there from a writer's first shard until the manifest stands
_MOST = 2**53
_WITHOUT_DIGEST = {
    "format", "version", "storage", "tokens", "documents", "keys", "metadata", "ledger", "shards",
}  # fmt: skip
_DIGEST = re.compile(rb',\s*"digest":\s*"([0-9a-f]{32})"\s*\}\s*\Z')
_STORAGE = re.compile(rb'"storage": *"(bin|h5)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The shards of a store, in columns; from its manifest, or from its meta.json files."""

    root: Path
    storage: str
    schema: Schema
    paths: list[str]
    documents: I64
    totals: dict[str, I64]
    checksums: list[str]
    sizes: I64  # bytes of each HDF5 file; 0 for .bin shards
    metadata: dict[str, Any] = field(default_factory=dict)
    digest: str = ""  # of the manifest's bytes; none where there is no manifest
    sealed: bool = True  # whether the manifest holds a digest of itself

    @property
    def tokens(self) -> int:
        """The least total of the per-token keys, which is the store's length."""
        keys = [self.schema.keys[name] for name in self.schema.token_keys]
        return min((int(self.totals[key.innermost].sum()) for key in keys), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one shard's meta.json says."""

    path: str
    storage: str
    schema: Schema
    documents: int
    totals: dict[str, int]
    checksums: dict[str, str]
    checksum: str
    size: int = 0


def is_penstock(value: dict[str, Any]) -> bool:
    """Whether a JSON object is Penstock's and not AstrAI's flat `{key: {shape, dtype}}`."""
    return isinstance(value.get("format"), str)


def read_manifest(root: Path) -> Table:
    """The table in `root`/manifest.json; nothing else is read."""
    path = root / MANIFEST
    raw = read_bytes(path)
    value = parse_json(raw, path)
    _check_version(value, path)
    _check_digest(value, raw, path)
    schema = Schema.from_json(value.get("keys"), path)
    shards = value.get("shards")
    if not isinstance(shards, dict):
        raise DataError(f'{path} has no "shards" object: write the store again.')
    names = _strings(shards.get("path"), f'{path}, "shards.path"')
    for name in names:
        if not safe_name(name):
            raise DataError(f"{path} lists the shard {name!r}, which is not a path below {root}.")
    if len(set(names)) != len(names):
        raise DataError(f"{path} lists a shard twice: write the store again.")
    table = Table(
        root=root,
        storage=_storage(value, path),
        schema=schema,
        paths=names,
        documents=_counts(shards.get("documents"), len(names), f'{path}, "shards.documents"'),
        totals=_totals(shards.get("totals"), schema, len(names), path),
        checksums=_strings(shards.get("checksum"), f'{path}, "shards.checksum"', len(names)),
        sizes=_counts(shards.get("bytes"), len(names), f'{path}, "shards.bytes"'),
        metadata=_metadata(value, path),
        digest=xxhash.xxh3_128_hexdigest(raw),
        sealed="digest" in value,
    )
    stated = (value.get("tokens"), value.get("documents"))
    found = (table.tokens, int(table.documents.sum()))
    if stated != found:
        raise DataError(
            f"{path} states {stated[0]} tokens and {stated[1]} documents, but its shards add up to "
            f"{found[0]} and {found[1]}: write the store again."
        )
    return table


def storage_of(root: Path) -> str:
    """The storage that the manifest in `root` states, which stands in its first few lines."""
    with (root / MANIFEST).open("rb") as file:
        found = _STORAGE.search(file.read(4096))
    if found is not None:
        return found[1].decode()
    return _storage(read_json(root / MANIFEST), root / MANIFEST)


def manifest_bytes(table: Table, metadata: dict[str, Any], ledger: dict[str, Any]) -> bytes:
    """The manifest of a table; the same table gives the same bytes."""
    value = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "storage": table.storage,
        "tokens": table.tokens,
        "documents": int(table.documents.sum()),
        "keys": table.schema.to_json(),
        "metadata": metadata,
        "ledger": ledger,
        "shards": {
            "path": table.paths,
            "documents": table.documents.tolist(),
            "totals": {name: column.tolist() for name, column in table.totals.items()},
            "checksum": table.checksums,
            "bytes": table.sizes.tolist(),
        },
    }
    lines = [f"{json.dumps(key)}: {json.dumps(part)}" for key, part in value.items()]
    return sealed(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def sealed(raw: bytes) -> bytes:
    r"""A JSON object with a digest of its own bytes as its last entry.

    >>> sealed(b'{"version": 1}')
    b'{"version": 1,\n"digest": "425fc6d2cbd7f13eb61793d336f2ed0f"\n}\n'
    """
    content = raw.rstrip()[:-1].rstrip()
    digest = xxhash.xxh3_128_hexdigest(content)
    return content + f',\n"digest": "{digest}"\n}}\n'.encode()


def parse_meta(
    raw: bytes, path: Path, name: str, *, checksum: str | None = None, size: int = 0
) -> Shard:
    """The shard `name` that a meta.json (or the same object in an HDF5 file) describes.

    Its checksum is that of `raw`, unless another is given ("" for none).
    """
    value = parse_json(raw, path)
    _check_version(value, path)
    schema = Schema.from_json(value.get("keys"), path)
    documents = int(_counts([value.get("documents")], 1, f'{path}, "documents"')[0])
    totals: dict[str, int] = {}
    for key, stored in schema.keys.items():
        shape = value["keys"][key].get("shape")
        total = int(_counts(shape, 1, f'{path}, the shape of "{key}"')[0])
        if totals.setdefault(stored.innermost, total) != total:
            raise DataError(
                f"{path} gives {key!r} {total:,} values, and a key aligned with it "
                f"{totals[stored.innermost]:,}: write the store again."
            )
    _outer_totals(value.get("offsets"), schema, documents, totals, path)
    checksums = value.get("checksums", {})
    if not isinstance(checksums, dict) or not all(
        safe_name(file) and isinstance(digest, str) for file, digest in checksums.items()
    ):
        raise DataError(f"{path} has checksums that are not names with hex digests.")
    return Shard(
        path=name,
        storage=_storage(value, path),
        schema=schema,
        documents=documents,
        totals=totals,
        checksums=checksums,
        checksum=xxhash.xxh3_64_hexdigest(raw) if checksum is None else checksum,
        size=size,
    )


def offsets_layout(
    schema: Schema, documents: Any, totals: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Where each offsets array stands in offsets.bin: first number and count, of one shard or many.

    >>> offsets_layout(Schema.of({"sequence": "uint16"}), 2, {"sequence": 10})
    {'sequence': (0, 3)}
    """
    layout, first = {}, 0
    for array in schema.parents:
        count = schema.entries(array, documents, totals) + 1
        layout[array] = (first, count)
        first = first + count
    return layout


def read_shards(root: Path) -> Iterable[Shard]:
    """The .bin shards below `root`, in natural order of their paths, from their meta.json files."""
    found = {
        str(path.parent.relative_to(root).as_posix()): path
        for path in scan(root, lambda n: n == META)
    }
    for name in sorted(found, key=natural):
        yield parse_meta(read_bytes(found[name]), found[name], name)


def tabulate(root: Path, shards: Sequence[Shard]) -> Table:
    """Shards as one table; all have to hold the same keys."""
    if not shards:
        raise DataError(f"{root} holds no shard, so there is nothing to open or to commit.")
    first = shards[0]
    for shard in shards:
        if shard.schema != first.schema or shard.storage != first.storage:
            raise DataError(
                f"{root / shard.path} holds other keys or dtypes than {root / first.path}: all "
                "shards of a store hold the same."
            )
    return Table(
        root=root,
        storage=first.storage,
        schema=first.schema,
        paths=[shard.path for shard in shards],
        documents=np.array([shard.documents for shard in shards], np.int64),
        totals={
            array: np.array([shard.totals[array] for shard in shards], np.int64)
            for array in first.schema.parents
        },
        checksums=[shard.checksum for shard in shards],
        sizes=np.array([shard.size for shard in shards], np.int64),
    )


def _outer_totals(
    layout: object, schema: Schema, documents: int, totals: dict[str, int], path: Path
) -> None:
    """Fill in what outer arrays measure (items), from the counts of the arrays below them."""
    if not isinstance(layout, dict) or set(layout) != set(schema.parents):
        raise DataError(f'{path} has an "offsets" object that does not fit its keys.')
    counts = {}
    for array, place in layout.items():
        counts[array] = int(_counts(place, 2, f'{path}, the offsets "{array}"')[1])
    for array, parent in schema.parents.items():
        if parent is not None and totals.setdefault(parent, counts[array] - 1) != counts[array] - 1:
            raise DataError(f"{path} counts the items of {parent!r} in two ways.")
    if {name: tuple(place) for name, place in layout.items()} != offsets_layout(
        schema, documents, totals
    ):
        raise DataError(f'{path} has an "offsets" object that does not fit its counts.')


def _check_version(value: dict[str, Any], path: Path) -> None:
    if value.get("format") != FORMAT:
        raise DataError(f"{path} is not a Penstock store's: its format is {value.get('format')!r}.")
    version = value.get("version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {version!r}, and this Penstock reads up to "
            f"{FORMAT_VERSION}: upgrade Penstock."
        )


def _check_digest(value: dict[str, Any], raw: bytes, path: Path) -> None:
    """Refuse a manifest that is not as it was written."""
    if "digest" not in value and value.keys() <= _WITHOUT_DIGEST:
        return
    found = _DIGEST.search(raw, max(len(raw) - 200, 0))
    content = raw[: found.start()] if found else raw
    if found is None or found[1].decode() != xxhash.xxh3_128_hexdigest(content):
        raise DataError(
            f"{path} has another digest than the one in its last line: it was changed after it was "
            "written; restore it, or remove it and commit() the shards again."
        )


def _storage(value: dict[str, Any], path: Path) -> str:
    storage = value.get("storage")
    if storage not in STORAGES:
        raise DataError(f'{path} has the storage {storage!r}, where "bin" or "h5" was expected.')
    return str(storage)


def _metadata(value: dict[str, Any], path: Path) -> dict[str, Any]:
    metadata, ledger = value.get("metadata", {}), value.get("ledger", {})
    if not isinstance(metadata, dict) or not isinstance(ledger, dict):
        raise DataError(f"{path} has metadata or a ledger that is not an object.")
    return {**metadata, "ledger": ledger} if ledger else metadata


def _totals(value: object, schema: Schema, count: int, path: Path) -> dict[str, I64]:
    if not isinstance(value, dict) or set(value) != set(schema.parents):
        raise DataError(f'{path} has "shards.totals" that do not fit its keys.')
    return {
        name: _counts(value[name], count, f'{path}, "shards.totals.{name}"')
        for name in schema.parents
    }


def _strings(value: object, where: str, count: int | None = None) -> list[str]:
    if (
        not isinstance(value, list)
        or not all(isinstance(item, str) for item in value)
        or len(value) != (len(value) if count is None else count)
    ):
        raise DataError(f"{where} is not a list of one string a shard: write the store again.")
    return value


def _counts(value: object, count: int, where: str) -> I64:
    """A list of `count` non-negative whole numbers as an array."""
    try:
        found = np.array(value) if isinstance(value, list) and value else np.empty(0, np.int64)
    except (ValueError, OverflowError):
        found = np.empty(0)
    if (
        not isinstance(value, list)
        or found.dtype != np.int64
        or found.shape != (count,)
        or (count and not 0 <= int(found.min()) <= int(found.max()) < _MOST)
        or float(found.sum(dtype=np.float64)) >= _MOST
    ):
        raise DataError(f"{where} is not {count} whole number(s) from 0 on: write the store again.")
    return found
