"""Where records came from: the tables of sources that writers leave beside their shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import OutOfBounds
from penstock.pack import bounds_of
from penstock.store.manifest import MANIFEST, read_manifest
from penstock.store.spool import SOURCE, SOURCE_SUFFIX


def source_of(root: Path, record: int) -> dict[str, Any] | None:
    """The row of a record in its shard's table: its file, its address there, its id, and so on.

    None where the store keeps no sources, as those of other tools do not.
    """
    if not (root / MANIFEST).exists():
        return None
    table = read_manifest(root)
    bounds = bounds_of(table.documents)
    if not 0 <= record < bounds[-1]:
        raise OutOfBounds(f"Record {record} is out of bounds: there are {bounds[-1]}.")
    shard = int(np.searchsorted(bounds, record, "right")) - 1
    path = root / table.paths[shard]
    path = path / SOURCE if table.storage == "bin" else path.with_suffix(SOURCE_SUFFIX)
    if not path.exists():
        return None
    import pyarrow.parquet as pq  # noqa: PLC0415 - only stores with sources need Arrow

    row = record - int(bounds[shard])
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row < rows:
                found: dict[str, Any] = file.read_row_group(group).slice(row, 1).to_pylist()[0]
                return found
            row -= rows
    return None
