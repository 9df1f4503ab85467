"""Temporary folders that die with their writer, and how a store comes to stand.

A writer works in `.tmp-…` inside the store's folder, which readers skip, and holds a lock that the
kernel drops when it dies; the next writer removes the folders whose lock is free. From the first
shard that is renamed into place until the manifest stands, `.incomplete` is there, and readers
refuse the store: a kill at any moment leaves what is not taken for a whole store.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.cache import locked, sync_directory, write_synced
from penstock.errors import ConfigError, DataError
from penstock.store.binary import OFFSETS
from penstock.store.manifest import (
    INCOMPLETE,
    MANIFEST,
    META,
    Shard,
    Table,
    is_penstock,
    manifest_bytes,
    offsets_layout,
    read_manifest,
    read_shards,
    tabulate,
)
from penstock.store.paths import HDF5, natural, read_json, scan
from penstock.store.schema import parse_dtype
from penstock.store.spool import SOURCE_SUFFIX, file_digest

_PREFIX = ".tmp-"
ALONE = "one writer"
SEVERAL = "several writers"


class Workspace:
    """A temporary folder under a lock that dies with this process."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        sweep(out)
        self.path = out / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        self._lock = ExitStack()
        self._lock.enter_context(locked(self._lock_path, wait=True))
        self.path.mkdir()

    def close(self) -> None:
        """Remove the folder; closing twice is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)
        self._lock.close()


def sweep(out: Path) -> None:
    """Remove what dead writers left in temporary folders."""
    for lock_path in sorted(out.glob(f"{_PREFIX}*.lock")):
        # Another user's lock cannot be opened: it is left to that user's next writer.
        with suppress(BlockingIOError, PermissionError), locked(lock_path, wait=False):
            shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
            lock_path.unlink(missing_ok=True)


def check_unfinished(out: Path, *, alone: bool) -> None:
    """Refuse to mix the shards of a writer that owns its store with those of several."""
    left = left_by(out)
    if left == SEVERAL and alone:
        raise ConfigError(
            f"{out} holds shards that are not committed yet: commit() them, or pass overwrite=True."
        )
    if left == ALONE and not alone:
        raise ConfigError(f"{out} holds what a killed writer left: discard({str(out)!r}) it first.")


def left_by(out: Path) -> str | None:
    """Who left an unfinished store: ALONE, SEVERAL, or None where nothing is unfinished."""
    mark = out / INCOMPLETE
    if not mark.exists() or (out / MANIFEST).exists():
        return None
    return SEVERAL if mark.read_text().startswith(SEVERAL) else ALONE


def mark_unfinished(out: Path, by: str = SEVERAL) -> None:
    """From now until its manifest is written, `out` is not taken for a whole store."""
    (out / INCOMPLETE).write_text(f"{by}\n")
    sync_directory(out)


def publish(
    out: Path, shards: list[tuple[Path, str]], *, alone: bool, replace_existing: bool
) -> None:
    """Rename finished shards to their places; from now on `out` is marked as incomplete."""
    check_unfinished(out, alone=alone)
    mark_unfinished(out, ALONE if alone else SEVERAL)
    if (out / MANIFEST).exists():  # of the store that is being replaced
        (out / MANIFEST).unlink()
        sync_directory(out)
    folders = set()
    for made, name in shards:
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            if not replace_existing:
                raise DataError(
                    f"{target} exists already: write elsewhere, or pass overwrite=True."
                )
            _remove(target)
        made.rename(target)
        folders.add(target.parent)
    for folder in sorted(folders):
        sync_directory(folder)
    sync_directory(out)


def commit(
    out_dir: str | Path,
    *,
    metadata: dict[str, Any] | None = None,
    ledger: dict[str, Any] | None = None,
) -> Path:
    """Write the manifest of the shards that stand in a folder, which makes them a store.

    The shards come in the natural order of their paths, whoever wrote them and whenever, so that
    the same shards give the same bytes. Gives the manifest's path.
    """
    out = Path(out_dir)
    shards = [_complete(out, shard) for shard in read_shards(out)]
    shards += [
        replace(shard, checksum=file_digest(out / shard.path)) for shard in _hdf5_shards(out)
    ]
    shards.sort(key=lambda shard: natural(shard.path))
    table = tabulate(out, shards)
    workspace = Workspace(out)
    try:
        finish(workspace, table, metadata or {}, ledger or {})
    finally:
        workspace.close()
    return out / MANIFEST


def finish(
    workspace: Workspace, table: Table, metadata: dict[str, Any], ledger: dict[str, Any]
) -> None:
    """Put the manifest in place, and take the mark away that the store is incomplete."""
    out, made = workspace.path.parent, workspace.path / MANIFEST
    write_synced(made, manifest_bytes(table, metadata, ledger))
    made.replace(out / MANIFEST)
    sync_directory(out)
    (out / INCOMPLETE).unlink(missing_ok=True)
    sync_directory(out)


def tidy(out: Path) -> None:
    """Take away what a writer left that was killed after its manifest stood."""
    sweep(out)
    if (out / MANIFEST).exists():
        (out / INCOMPLETE).unlink(missing_ok=True)


def discard(out_dir: str | Path) -> None:
    """Remove the store in a folder, its manifest first, and nothing that is not Penstock's."""
    out = Path(out_dir)
    if not out.is_dir():
        return
    listed: list[str] = []
    if (out / MANIFEST).exists():
        with suppress(DataError):
            listed = read_manifest(out).paths
    (out / INCOMPLETE).write_text(f"{ALONE}\n")
    sync_directory(out)
    (out / MANIFEST).unlink(missing_ok=True)
    sync_directory(out)
    metas = scan(out, lambda name: name == META)
    targets = {meta.parent for meta in metas if is_penstock(read_json(meta))}
    targets |= {out / shard.path for shard in _hdf5_shards(out)}
    targets |= {out / name for name in listed if (out / name).exists()}
    for target in sorted(targets):
        if target.is_file():
            _remove(target.with_suffix(SOURCE_SUFFIX))
        _remove(target)
        with suppress(OSError):
            target.parent.rmdir()  # a domain with nothing left in it
    sync_directory(out)
    (out / INCOMPLETE).unlink()


def _hdf5_shards(out: Path) -> list[Shard]:
    """Penstock's HDF5 files below a folder."""
    files = list(scan(out, lambda name: name.lower().endswith(HDF5)))
    if not files:
        return []
    from penstock.store.hdf5 import read_shard  # noqa: PLC0415 - h5py is for HDF5 stores only

    return [shard for shard in (read_shard(out, path) for path in files) if shard is not None]


def _remove(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def _complete(out: Path, shard: Shard) -> Shard:
    """The shard, after a look at the sizes of its files."""
    folder, layout = out / shard.path, offsets_layout(shard.schema, shard.documents, shard.totals)
    wanted = {OFFSETS: 8 * sum(count for _, count in layout.values())}
    for name, key in shard.schema.keys.items():
        size = parse_dtype(key.dtype, folder).itemsize
        wanted[f"{name}.bin"] = size * shard.totals[key.innermost]
    for name, size in wanted.items():
        path = folder / name
        found = path.stat().st_size if path.exists() else -1
        if found != size:
            raise DataError(
                f"{path} {'is missing' if found < 0 else f'holds {found:,} bytes'}, where {size:,} "
                "bytes were expected: write the shard again."
            )
    return shard
