"""What a folder holds: a store of its own, token files as they come, or stores further below.

Nearest first. A folder is a store by what lies in it: a manifest, a meta.json that describes keys
(Penstock's, or AstrAI's `{key: {shape, dtype}}`), an HDF5 file. Else its own token files are meant,
those that match a pattern where one is given; only where there are none, stores in sub-folders.

>>> describes({"sequence": {"shape": [10], "dtype": "int32"}}), describes({"dtype": "uint16"})
(True, False)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.store.manifest import MANIFEST, META, is_penstock
from penstock.store.paths import HDF5, read_json, scan


def describes(meta: dict[str, Any]) -> bool:
    """Whether a meta.json says which keys there are, and not just the dtype of raw files."""
    return is_penstock(meta) or any(
        isinstance(entry, dict) and "shape" in entry for entry in meta.values()
    )


def described(folder: Path) -> bool:
    """Whether the meta.json in this very folder describes keys."""
    meta = folder / META
    return meta.is_file() and describes(read_json(meta))


def has_hdf5(root: Path) -> bool:
    """Whether an HDF5 file lies in this very folder."""
    return any(path.suffix.lower() in HDF5 for path in root.glob("[!.]*"))


def is_store(root: Path) -> bool:
    """Whether the folder itself is a store, whatever lies further below."""
    return (root / MANIFEST).is_file() or has_hdf5(root) or described(root)


def holds_store(path: str | Path, file_pattern: str) -> bool:
    """Whether a store is meant by a path, rather than the files in it that match a pattern.

    A store in a sub-folder (a validation set, say) is meant only where no file matches.
    """
    root = Path(path)
    if root.is_file():
        return root.suffix.lower() in HDF5
    if is_store(root):
        return True
    if token_files(root, file_pattern):
        return False
    if any(scan(root, lambda name: name.lower().endswith(HDF5))):
        return True
    return any(describes(read_json(meta)) for meta in scan(root, lambda name: name == META))


def token_files(root: Path, pattern: str | None) -> list[Path]:
    """The files of a folder that match a pattern, sorted; without one, its own .npy, else .bin.

    None where all of them are parts of stores, which the meta.json beside each describes.
    """
    if root.is_file():
        return [root]
    if pattern is None:
        own = sorted(path for path in root.glob("[!.]*") if path.is_file())
        return [p for p in own if p.suffix == ".npy"] or [p for p in own if p.suffix == ".bin"]
    try:
        found = sorted(path for path in root.glob(pattern) if path.is_file())
    except (ValueError, NotImplementedError) as err:
        raise ConfigError(f"file_pattern {pattern!r}: {err}.") from None
    folders = {path.parent: described(path.parent) for path in found if path.suffix == ".bin"}
    parts = [path for path in found if path.suffix == ".bin" and folders[path.parent]]
    loose = [path for path in found if path not in parts]
    if parts and loose:
        raise ConfigError(
            f"file_pattern {pattern!r} matches {loose[0]} and also {parts[0]}, which the {META} "
            "beside it makes a part of a store: narrow the pattern to one of the two."
        )
    return loose
