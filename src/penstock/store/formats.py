"""Which format stands at a path, and the store that reads it.

>>> StoreFactory.create("bin").keys
[]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.errors import ConfigError, DataError, MissingData
from penstock.store.base import Store
from penstock.store.folder import described, has_hdf5, holds_store
from penstock.store.manifest import MANIFEST, META, storage_of
from penstock.store.mmap import MmapStore
from penstock.store.paths import HDF5, scan

if TYPE_CHECKING:
    import numpy.typing as npt


def detect_format(path: str | Path) -> str:
    """The format at a path: "h5", "bin" or "npy".

    What the folder is itself counts first; below it, HDF5 files win where there are several.
    """
    root = Path(path)
    if root.is_file():
        suffix = root.suffix.lower()
        match suffix:
            case ".h5" | ".hdf5":
                return "h5"
            case ".bin" | ".npy":
                return suffix[1:]
        raise DataError(
            f"Unsupported file format: {suffix or root.name} at {root}; .h5, .hdf5, .bin or .npy "
            "was expected."
        )
    if (root / MANIFEST).is_file():
        return storage_of(root)
    if has_hdf5(root) or described(root):
        return "h5" if has_hdf5(root) else "bin"
    found = {file.name if file.name == META else file.suffix.lower() for file in scan(root, _known)}
    if found & set(HDF5):
        return "h5"
    if META in found and ".bin" in found:
        return "bin"
    for suffix in (".npy", ".bin"):
        if suffix in found:
            return suffix[1:]
    raise MissingData(
        f"No supported data files found at {root}: expected a Penstock store, .bin + meta.json, "
        ".h5 or .npy files."
    )


def _known(name: str) -> bool:
    return name == META or name.lower().endswith((*HDF5, ".bin", ".npy"))


class StoreFactory:
    """Stores by the name of their format.

    Outsiders add theirs with a decorator: `@StoreFactory.register("mine")`.
    """

    _makers: ClassVar[dict[str, Callable[..., Store]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[Any], Any]:
        """Make a class (or a function) the store of that name."""

        def add(maker: Any) -> Any:
            cls._makers[name] = maker
            return maker

        return add

    @classmethod
    def create(cls, name: str, **options: Any) -> Store:
        """A store of that format, nothing loaded yet."""
        if name not in cls._makers:
            known = ", ".join(sorted(cls._makers))
            raise ConfigError(f"Unknown component {name!r}: the stores there are: {known}.")
        return cls._makers[name](**options)


StoreFactory.register("bin")(MmapStore)
StoreFactory.register("npy")(MmapStore)


@StoreFactory.register("h5")
def _h5(**options: Any) -> Store:
    from penstock.store.hdf5 import H5Store  # noqa: PLC0415 - h5py is for HDF5 stores only

    return H5Store(**options)


def open_store(
    path: str | Path,
    *,
    dtype: npt.DTypeLike | None = None,
    file_pattern: str | None = None,
    partial: bool = False,
) -> Store:
    """Open whatever stands at a path. `dtype` is that of raw .bin files.

    `file_pattern` chooses files in a folder that is no store itself, whatever lies further below.
    """
    of_files = file_pattern is not None and not holds_store(path, file_pattern)
    if not of_files and detect_format(path) == "h5":
        return StoreFactory.create("h5", partial=partial).load(path)
    return MmapStore(dtype=dtype, file_pattern=file_pattern, partial=partial).load(path)
