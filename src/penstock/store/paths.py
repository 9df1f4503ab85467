r"""Names on disk: which may be followed, and in which order they are read.

Nothing that a manifest or a meta.json says may lead out of its own directory, whatever it says:

    >>> safe_name("wiki/shard_0000")
    True
    >>> [safe_name(name) for name in ("/etc", "a/../b", "a//b", "a\\b", ".hidden", "a\0")]
    [False, False, False, False, False, False]
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.errors import DataError, MissingData

_NAME = re.compile(
    r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*(?:/[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]*)*"
)
HDF5 = (".h5", ".hdf5")
_DIGITS = re.compile(r"([0-9]+)")


def safe_name(name: object) -> bool:
    r"""Whether a relative path stays below its directory: no "..", "\", NUL or dot file."""
    return isinstance(name, str) and len(name) < 4096 and _NAME.fullmatch(name) is not None


def natural(name: str) -> list[list[str | int]]:
    """Sort key for paths, folder by folder, under which numbers count as numbers.

    >>> sorted(["data_10", "data_9", "data_1/b"], key=natural)
    ['data_1/b', 'data_9', 'data_10']
    """
    # Splitting puts digits at odd places, so that numbers meet numbers and text meets text.
    return [
        [int(part) if place % 2 else part for place, part in enumerate(_DIGITS.split(folder))]
        for folder in name.split("/")
    ]


def inside(root: Path, name: str) -> Path:
    """The file `name` below `root`; refuses a symbolic link on the way that leaves `root`."""
    path = root / name
    step = root
    for part in name.split("/"):
        step = step / part
        if step.is_symlink():
            if not path.resolve().is_relative_to(root.resolve()):
                raise DataError(
                    f"{path} is a symbolic link that leaves {root}, which a store must not do: "
                    "copy the files instead of linking them."
                )
            break
    return path


def scan(root: Path, wanted: Callable[[str], bool]) -> Iterator[Path]:
    """Files below `root` whose names are wanted, sorted by path; hidden names are skipped."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder) / n for n in files if not n.startswith(".") and wanted(n)]
    yield from sorted(found)


def read_bytes(path: Path) -> bytes:
    """The bytes of a file, or one sentence about why there are none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise MissingData(f"{path} is missing: restore it, or write the store again.") from None
    except OSError as err:
        raise DataError(f"{path} cannot be read ({err.strerror}): check its permissions.") from err


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or one sentence about what is wrong with it."""
    return parse_json(read_bytes(path), path)


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `raw`, read from `path`."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as err:
        raise DataError(f"{path} is not valid JSON ({err}): write the store again.") from None
    if not isinstance(value, dict):
        raise DataError(
            f"{path} holds a JSON {type(value).__name__} where an object was expected: "
            "write the store again."
        )
    return value
