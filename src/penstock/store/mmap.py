"""`MmapStore`: tokens mapped from files, whichever tool wrote them.

A Penstock store, AstrAI's folders of `.bin` + `meta.json`, a folder of `.npy` files, or raw
`.bin` files of a stated dtype; a single `.npy` or `.bin` file too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, DataError, MissingData
from penstock.store.base import Store
from penstock.store.binary import open_shards, refuse_unfinished
from penstock.store.contents import Contents
from penstock.store.flat import open_meta, open_npy, open_raw, raw_dtype_beside
from penstock.store.manifest import MANIFEST, META, is_penstock
from penstock.store.paths import read_json, scan

if TYPE_CHECKING:
    import numpy.typing as npt


class MmapStore(Store):
    """A store whose files are mapped, read-only; shards are opened when they are first read.

    `dtype`: that of raw .bin files, which have no header. `file_pattern`: which files of a folder
    without manifest or meta.json are meant (default: all .npy, else all .bin files below it).
    `partial`: open a Penstock store whose writer has not finished.
    """

    def __init__(
        self,
        *,
        dtype: npt.DTypeLike | None = None,
        file_pattern: str | None = None,
        partial: bool = False,
    ) -> None:
        super().__init__()
        self._raw_dtype = dtype
        self._file_pattern = file_pattern
        self._partial = partial

    def _open(self, path: Path) -> Contents:
        if path.is_file():
            return self._open_files(path, [path])
        if not path.is_dir():
            raise MissingData(f"No supported data files found at {path}: there is no such path.")
        if (path / MANIFEST).exists():
            return open_shards(path)
        refuse_unfinished(path, partial=self._partial)
        metas = list(scan(path, lambda name: name == META))
        found = self._described(path, metas) if metas else None
        return self._open_files(path, self._chosen(path)) if found is None else found

    def _described(self, root: Path, metas: Sequence[Path]) -> Contents | None:
        """What meta.json files describe; None where all they state is the dtype of raw files."""
        first = read_json(metas[0])
        if is_penstock(first):
            return open_shards(root, partial=self._partial)
        if any(isinstance(entry, dict) and "shape" in entry for entry in first.values()):
            return open_meta(root, metas)
        return None

    def _chosen(self, root: Path) -> list[Path]:
        if self._file_pattern is not None:
            try:
                found = sorted(path for path in root.glob(self._file_pattern) if path.is_file())
            except (ValueError, NotImplementedError) as err:
                raise ConfigError(f"file_pattern {self._file_pattern!r}: {err}.") from None
            wanted = self._file_pattern
        else:
            found = list(scan(root, lambda name: name.endswith(".npy")))
            found = found or list(scan(root, lambda name: name.endswith(".bin")))
            wanted = "*.npy or *.bin"
        if not found:
            raise MissingData(f"No supported data files found at {root}: nothing matches {wanted}.")
        return found

    def _open_files(self, root: Path, files: Sequence[Path]) -> Contents:
        kinds = {path.suffix.lower() for path in files}
        if kinds == {".npy"}:
            return open_npy(root, files)
        if kinds == {".bin"}:
            dtype = self._raw_dtype
            return open_raw(root, files, raw_dtype_beside(files[0]) if dtype is None else dtype)
        names = ", ".join(sorted(kinds))
        raise DataError(f"Unsupported file format: {names} at {root}; .npy or .bin was expected.")
