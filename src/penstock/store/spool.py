"""One shard while it is being written: values streamed to files, checksums kept on the way.

Nothing here is visible to a reader: the shard is made in a temporary folder, synced to disk, and
renamed by whoever finishes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import xxhash

from penstock.cache import sync_directory, write_synced
from penstock.store.binary import OFFSETS
from penstock.store.manifest import FORMAT, FORMAT_VERSION, META, Shard, offsets_layout
from penstock.store.schema import Schema
from penstock.store.segments import I64, Array

if TYPE_CHECKING:
    import pyarrow as pa

_BUFFER = 1 << 20
SOURCE = "source.parquet"
SOURCE_SUFFIX = ".source.parquet"  # beside an HDF5 shard


class Spool:
    """The shard being filled in `folder`: values go to disk, offsets wait in memory."""

    def __init__(self, folder: Path, schema: Schema) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.documents = 0
        self.totals = dict.fromkeys(schema.parents, 0)
        self._schema = schema
        self._offsets: dict[str, list[I64]] = {a: [np.zeros(1, np.int64)] for a in schema.parents}
        self._sources: list[pa.Table] = []
        self._digests = {name: xxhash.xxh3_64() for name in schema.keys}
        self._files: dict[str, IO[bytes]] = {}
        for name in schema.keys:
            self._files[name] = (folder / f"{name}.bin").open("wb", buffering=_BUFFER)

    def add(
        self, values: Mapping[str, Array], offsets: Mapping[str, I64], source: pa.Table | None
    ) -> None:
        """Add records: the values of each key, and each array's offsets, from 0 on."""
        for array, found in offsets.items():
            self._offsets[array].append(found[1:] + self.totals[array])
            if self._schema.parents[array] is None:
                count = len(found) - 1
        self.documents += count
        for array, found in offsets.items():
            self.totals[array] += int(found[-1])
        for name, array_of in values.items():
            raw = memoryview(np.ascontiguousarray(array_of)).cast("B")  # type: ignore[arg-type]
            self._files[name].write(raw)
            self._digests[name].update(raw)
        if source is not None:
            self._sources.append(source)

    def close(self) -> None:
        """Close the files; whatever is in the folder stays."""
        for file in self._files.values():
            file.close()

    def abandon(self) -> None:
        """Close the files of a shard that will not be; a full disk is no matter any more."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def finish(self, path: str) -> Shard:
        """Complete the folder as the .bin shard `path` and sync it to disk."""
        checksums = {f"{name}.bin": digest.hexdigest() for name, digest in self._digests.items()}
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.close()
        raw = b"".join(part.astype("<i8").tobytes() for part in self.offsets())
        write_synced(self.folder / OFFSETS, raw)
        checksums[OFFSETS] = xxhash.xxh3_64_hexdigest(raw)
        if self._sources:
            checksums[SOURCE] = self.write_source(self.folder / SOURCE)
        meta = self.meta("bin", checksums)
        write_synced(self.folder / META, meta)
        sync_directory(self.folder)
        return self.shard(path, "bin", checksums, xxhash.xxh3_64_hexdigest(meta))

    def offsets(self) -> list[I64]:
        """The offsets arrays, whole, in the order of the schema."""
        return [np.concatenate(self._offsets[array]) for array in self._schema.parents]

    def meta(self, storage: str, checksums: Mapping[str, str]) -> bytes:
        """What meta.json says."""
        layout = offsets_layout(self._schema, self.documents, self.totals)
        tokens = [self.totals[self._schema.keys[n].innermost] for n in self._schema.token_keys]
        value = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "storage": storage,
            "tokens": min(tokens),
            "documents": self.documents,
            "keys": self._schema.to_json(self.totals),
            "offsets": {array: list(place) for array, place in layout.items()},
            "checksums": dict(checksums),
        }
        return (json.dumps(value, indent=1) + "\n").encode()

    def shard(
        self, path: str, storage: str, checksums: Mapping[str, str], checksum: str, size: int = 0
    ) -> Shard:
        """The finished shard, for the manifest."""
        return Shard(
            path=path,
            storage=storage,
            schema=self._schema,
            documents=self.documents,
            totals=dict(self.totals),
            checksums=dict(checksums),
            checksum=checksum,
            size=size,
        )

    @property
    def has_source(self) -> bool:
        """Whether there is a table of sources to write."""
        return bool(self._sources)

    def write_source(self, path: Path) -> str:
        """Write the table of sources, one row a record; gives its checksum."""
        import pyarrow as pa  # noqa: PLC0415 - only stores with sources need Arrow
        import pyarrow.parquet as pq  # noqa: PLC0415

        table = pa.concat_tables(self._sources).combine_chunks()
        assert table.num_rows == self.documents
        pq.write_table(table, path, compression="zstd")
        sync_file(path)
        return file_digest(path)


def sync_file(path: Path) -> None:
    """Make a file's bytes survive a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def file_digest(path: Path) -> str:
    """The checksum of a file, read in blocks."""
    digest = xxhash.xxh3_64()
    buffer = bytearray(_BUFFER)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
