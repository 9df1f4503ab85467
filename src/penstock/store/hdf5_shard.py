"""A finished shard as one HDF5 file: the layout that `H5Store` documents."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from penstock.store.hdf5 import ATTRIBUTE, OFFSETS
from penstock.store.manifest import Shard
from penstock.store.schema import Schema
from penstock.store.spool import SOURCE_SUFFIX, Spool, file_digest, sync_file

_BLOCK = 1 << 22  # values copied at a time


def finish_hdf5(spool: Spool, domain: str, schema: Schema) -> tuple[list[Path], Shard]:
    """Turn the spooled values into `data_<shard>.h5`; gives the files made and what they hold."""
    spool.close()
    path = spool.folder.with_name(f"{spool.folder.name}.h5")
    made, checksums = [path], {}
    if spool.has_source:
        source = path.with_suffix(SOURCE_SUFFIX)
        checksums[source.name] = spool.write_source(source)
        made.append(source)
    with h5py.File(path, "w", libver="earliest") as file:
        file.attrs[ATTRIBUTE] = spool.meta("h5", checksums).decode()
        for name, key in schema.keys.items():
            total = spool.totals[key.innermost]
            dataset = file.create_group(name).create_dataset("data_0", (total,), key.dtype)
            with (spool.folder / f"{name}.bin").open("rb") as raw:
                for first in range(0, total, _BLOCK):
                    block = np.fromfile(raw, key.dtype, min(_BLOCK, total - first))
                    dataset[first : first + len(block)] = block
        group = file.create_group(OFFSETS)
        for array, offsets in zip(schema.parents, spool.offsets(), strict=True):
            group.create_dataset(array, data=offsets.astype("<i8"))
    for name in schema.keys:
        (spool.folder / f"{name}.bin").unlink()
    spool.folder.rmdir()
    sync_file(path)
    shard = spool.shard(
        f"{domain}/{path.name}", "h5", checksums, file_digest(path), path.stat().st_size
    )
    return made, shard
