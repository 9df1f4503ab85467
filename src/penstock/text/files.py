"""Which files an input names, and how their bytes are opened: local or through fsspec.

    data/                        a directory: all below it, sorted, hidden ones left out
    data/**/*.jsonl.zst          a glob
    s3://bucket/x.parquet        any fsspec URL, globs and directories too

A file's kind is told by its name alone.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

from penstock.errors import ConfigError, DataError, MissingData, PenstockError
from penstock.text.remote import RemoteFile, filesystem
from penstock.text.retry import is_absence, retried

Kind = Literal["parquet", "jsonl", "json"]
Compression = Literal["gzip", "zstd"]
Place = tuple[str, str, int, str]  # path as opened, name that tells the kind, size, stamp

_KINDS: dict[str, Kind] = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_KNOWN = ".parquet, .jsonl, .ndjson, .json, and the last three with .gz or .zst"
_NO_DATA = ("_", "README", "LICENSE")  # _SUCCESS, _metadata: passed over in a directory
# What object stores call a fingerprint of the content; failing these, a time of change.
_CONTENT = ("ETag", "etag", "md5Hash", "md5", "checksum", "sha256", "blob_id", "CRC")
_CHANGED = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file of documents, as it was when it was found."""

    path: str  # as it is opened, and as errors and addresses name it
    kind: Kind
    compression: Compression | None
    size: int  # bytes on disk
    stamp: str  # another one when the content is


class Stream(Protocol):
    """What is read from: the next `count` bytes at most, none at the end."""

    def read(self, count: int, /) -> bytes:
        """The next bytes."""
        ...


def find_files(inputs: Sequence[str | os.PathLike[str]]) -> list[InputFile]:
    """The files that the inputs name, in order, each once.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> for name in ("b.jsonl.gz", "a.parquet", ".hidden.json"):
    ...     _ = (folder / name).write_bytes(b"")
    >>> [(pathlib.Path(f.path).name, f.kind, f.compression) for f in find_files([folder])]
    [('a.parquet', 'parquet', None), ('b.jsonl.gz', 'jsonl', 'gzip')]
    """
    if isinstance(inputs, str | os.PathLike):
        inputs = [inputs]
    found: dict[str, InputFile] = {}
    for each in inputs:
        path, before = os.fspath(each), len(found)
        local = "://" not in path and ("::" not in path or Path(path).exists())
        for where, name, size, stamp in _local(path) if local else _remote(path):
            kind, compression = kind_of(name, where)
            identity = where if "://" in where else os.path.realpath(where)
            file = InputFile(path=where, kind=kind, compression=compression, size=size, stamp=stamp)
            seen = identity in found
            found.setdefault(identity, file)
            before -= seen  # a file named twice counts as found
        if len(found) == before:
            raise MissingData(f"{path} holds no file of documents ({_KNOWN})")
    if not found:
        raise MissingData(f"no input was named: give files, directories, globs or URLs ({_KNOWN})")
    return list(found.values())


def kind_of(name: str, path: str) -> tuple[Kind, Compression | None]:
    """What a name says of its file.

    >>> kind_of("c4.00.json.gz", "c4.00.json.gz")
    ('json', 'gzip')
    """
    stem, suffix = os.path.splitext(name.lower())  # noqa: PTH122 - a URL is no Path
    compression = _COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]  # noqa: PTH122
    kind = _KINDS.get(suffix)
    if kind is None or (kind == "parquet" and compression):
        raise ConfigError(
            f"{path} does not say by its name what it holds; known are {_KNOWN}. Rename it, or "
            "leave it out with a glob such as 'data/**/*.jsonl'."
        )
    return kind, compression


def _listed(names: Iterable[str], root: str) -> list[str]:
    """Those of a directory's files that are meant to be read, sorted."""
    kept = []
    for name in sorted(names):
        parts = name.removeprefix(root).strip("/").split("/")
        if any(part.startswith(".") for part in parts):
            continue
        known = Path(parts[-1].lower()).suffix in {**_KINDS, **_COMPRESSIONS}
        if known or not parts[-1].startswith(_NO_DATA):
            kept.append(name)
    return kept


# ------------------------------------------------------------------------------------ on this disk


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _local(given: str) -> Iterator[Place]:
    path = Path(given).expanduser()
    if path.exists():
        matches = [str(path)]
    elif glob.has_magic(given):
        # pathlib's own glob finds hidden files, and takes no absolute pattern.
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
    else:
        raise MissingData(f"{given} does not exist: name a file, a directory, a glob or a URL")
    for match in matches:
        names = _listed(_walk(match, set()), match) if Path(match).is_dir() else [match]
        for name in names:
            if not _is_text(name):
                raise ConfigError(
                    f"{name!r} has a name that is not UTF-8, which no address could state: rename "
                    "it"
                )
            stat = Path(name).stat()
            yield name, name, stat.st_size, f"{stat.st_size}-{stat.st_mtime_ns}"


def _walk(folder: str, seen: set[str]) -> Iterator[str]:
    """All files below, through links to directories too, none of which is gone through twice."""
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                yield from _walk(entry.path, seen)
            elif entry.is_file() or entry.is_symlink():
                yield entry.path


# ------------------------------------------------------------------------------- through fsspec


def _remote(url: str) -> Iterator[Place]:
    system, path = retried(url, "opening", lambda: filesystem(url))
    if "::" not in url and "file" in system.protocol:
        yield from _local(path)
        return
    found = retried(url, "listing", lambda: _matches(system, path))
    if not found:
        raise MissingData(f"{url} names no file: name a file, a directory or a glob")
    for name, info in sorted(found.items()):
        where = _url(url, system.unstrip_protocol(name))
        size = info.get("size")
        if size is None:
            raise DataError(f"{where} does not tell its size: copy it to a disk first")
        stamp = next((info[key] for key in (*_CONTENT, *_CHANGED) if info.get(key)), "")
        yield where, name.split("?")[0], int(size), f"{size}-{stamp}"


def _matches(system: Any, path: str) -> dict[str, Mapping[str, Any]]:
    """The files at a path, below a directory or matching a glob, with what is known of each."""
    try:
        info = system.info(path)
    except FileNotFoundError as error:
        if not is_absence(error):
            raise
    else:
        if info["type"] == "file":
            return {path: info}
    if not glob.has_magic(path):
        below = system.find(path, detail=True)
        return {name: below[name] for name in _listed(below, path)}
    found: dict[str, Mapping[str, Any]] = {}
    for name, info in system.glob(path, detail=True).items():
        if info["type"] == "directory":
            found |= _matches(system, name)
        elif not name.rpartition("/")[2].startswith("."):
            found[name] = info
    return found


def _url(given: str, one: str) -> str:
    """The URL of one file among those that the given one names.

    >>> _url("zip://*.jsonl::s3://bucket/a.zip", "zip://a.jsonl")
    'zip://a.jsonl::s3://bucket/a.zip'
    >>> _url("simplecache::s3://bucket/*.jsonl", "s3://bucket/a.jsonl")
    'simplecache::s3://bucket/a.jsonl'
    """
    head, chained, tail = given.partition("::")
    if not chained:
        return one
    return f"{one}::{tail}" if "://" in head else f"{head}::{one}"


# ----------------------------------------------------------------------------------------- opening


@contextmanager
def open_raw(file: InputFile) -> Iterator[BinaryIO]:
    """The bytes as they are stored; can be sought in."""
    with reading(file):
        if "://" in file.path or ("::" in file.path and not Path(file.path).exists()):
            opened = cast("BinaryIO", RemoteFile(file.path, file.size))
        else:
            opened = cast("BinaryIO", Path(file.path).open("rb", buffering=0))  # noqa: SIM115
        with opened:
            yield opened


@contextmanager
def open_stream(file: InputFile, *, skip: int = 0) -> Iterator[Stream]:
    """The bytes as they are meant, decompressed, but for the first `skip`."""
    import pyarrow as pa  # noqa: PLC0415 - finding files does not need it

    with open_raw(file) as raw:
        if file.compression is None:
            raw.seek(skip)
            yield raw
            return
        if file.size == 0:
            raise DataError(f"{file.path} is empty, which no {file.compression} file is")
        with pa.CompressedInputStream(pa.PythonFile(raw, "r"), file.compression) as stream:
            while skip > 0 and (chunk := stream.read(min(skip, 1 << 20))):
                skip -= len(chunk)
            yield stream


@contextmanager
def reading(file: InputFile) -> Iterator[None]:
    """Damage that Arrow meets in a file becomes an error that names the file."""
    import pyarrow as pa  # noqa: PLC0415

    try:
        yield
    except PenstockError:
        raise
    except FileNotFoundError as error:
        raise MissingData(f"{file.path} was there when files were listed, and is gone") from error
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's or the network's word, not the file's content
        what = f"{file.compression} file" if file.compression else f"{file.kind} file"
        raise DataError(
            f"{file.path} is cut short, damaged, or no {what}: {error}. Fetch it anew."
        ) from error
