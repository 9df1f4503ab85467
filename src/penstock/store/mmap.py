"""`MmapStore`: tokens mapped from files, whichever tool wrote them.

A Penstock store, AstrAI's folders of `.bin` + `meta.json`, a folder of `.npy` files, or raw
`.bin` files of a stated dtype; a single `.npy` or `.bin` file too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import DataError, MissingData
from penstock.store.base import Store
from penstock.store.binary import open_shards, refuse_unfinished
from penstock.store.contents import Contents
from penstock.store.flat import open_meta, open_npy, open_raw
from penstock.store.folder import described, describes, token_files
from penstock.store.manifest import MANIFEST, META, is_penstock
from penstock.store.paths import read_json, scan

if TYPE_CHECKING:
    import numpy.typing as npt


class MmapStore(Store):
    """A store whose files are mapped, read-only; shards are opened when they are first read.

    `dtype`: that of raw .bin files, which have no header; `default_dtype`: of those for which no
    meta.json beside them states one. `file_pattern`: which files are meant of a folder that is no
    store itself (default: its own .npy, else .bin files). They come before any store further
    below, which is opened where there are none. `partial`: open a Penstock store whose writer has
    not finished.
    """

    def __init__(
        self,
        *,
        dtype: npt.DTypeLike | None = None,
        default_dtype: npt.DTypeLike | None = None,
        file_pattern: str | None = None,
        partial: bool = False,
    ) -> None:
        super().__init__()
        self._raw_dtype = dtype
        self._default_dtype = default_dtype
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
        files = [] if described(path) else token_files(path, self._file_pattern)
        return self._open_files(path, files) if files else self._open_below(path)

    def _open_below(self, root: Path) -> Contents:
        """The stores that meta.json files describe, else all files of one kind, at any depth."""
        metas = list(scan(root, lambda name: name == META))
        first = next(filter(describes, map(read_json, metas)), None)
        if first is not None and is_penstock(first):
            return open_shards(root, partial=self._partial)
        if first is not None:
            return open_meta(root, metas)
        every: list[Path] = []
        if self._file_pattern is None:
            every = list(scan(root, lambda name: name.endswith((".npy", ".bin"))))
        found = [path for path in every if path.suffix == ".npy"] or every
        if not found:
            wanted = self._file_pattern or "*.npy or *.bin"
            raise MissingData(f"No supported data files found at {root}: nothing matches {wanted}.")
        return self._open_files(root, found)

    def _open_files(self, root: Path, files: Sequence[Path]) -> Contents:
        kinds = {path.suffix.lower() for path in files}
        if kinds == {".npy"}:
            return open_npy(root, files)
        if kinds == {".bin"}:
            return open_raw(root, files, self._raw_dtype, self._default_dtype)
        names = ", ".join(sorted(kinds))
        raise DataError(f"Unsupported file format: {names} at {root}; .npy or .bin was expected.")
