"""The end of a run: parts put in their places, in the order of the input."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import DataError
from penstock.store.manifest import META
from penstock.store.paths import HDF5, scan
from penstock.store.spool import SOURCE_SUFFIX


def shards_in(out: Path) -> list[Path]:
    """The shards of Penstock's that stand in a folder, committed or not."""
    found = [meta.parent for meta in scan(out, lambda name: name == META)]
    return found + list(scan(out, lambda name: name.endswith(HDF5)))


def move(made: Path, domain: Path, number: int) -> None:
    """A shard to its final place; one that is there already was moved before a kill."""
    prefix, suffix = made.stem.rsplit("_", 1)[0], made.suffix
    target = domain / f"{prefix}_{number:04d}{suffix}"
    domain.mkdir(parents=True, exist_ok=True)
    beside = made.with_suffix(SOURCE_SUFFIX)
    if suffix and beside.exists():
        beside.rename(target.with_suffix(SOURCE_SUFFIX))
    if made.exists():
        made.rename(target)
    elif not target.exists():
        raise DataError(f"{made} is missing, though its work is complete: start with --overwrite")


def join(parts: Iterable[Path], target: Path, *, wanted: bool) -> None:
    """Rejects of all works in one file, in the order of the input."""
    if not wanted:
        target.unlink(missing_ok=True)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    with temporary.open("wb") as out:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, out)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(target)
