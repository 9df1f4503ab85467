"""A remote file as a local one: read on where it breaks off, read ahead where it is read in turn.

    with RemoteFile("https://host/a.parquet", size) as file:
        file.seek(-8, os.SEEK_END), file.read(8)     one request for 8 bytes
        file.seek(0), file.read(1 << 20), ...        1, 2, 4, 4, ... MiB a request

Several places are read in turn where Parquet's columns are, so each has its own bytes ahead. fsspec
would read 5 MiB ahead at every place, and let go of them at the next.
"""

from __future__ import annotations

import io
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError, DataError, MissingExtra
from penstock.text.retry import patience, retried

AHEAD = 4 << 20  # bytes asked for at a time, where what was read before was asked for in turn
PLACES = 4  # read from in turn
HUB_ATTEMPTS = 2  # each is six of huggingface_hub's own
# Of these, fsspec's files ask for just the bytes that are read, when told so.
_RANGES = {"http", "https", "hf", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}


def filesystem(url: str) -> tuple[Any, str]:
    """The file system that a URL names, and the path on it."""
    from fsspec.core import url_to_fs  # noqa: PLC0415 - only URLs need it

    try:
        system, path = url_to_fs(url, **_timeouts(url))
    except ImportError as error:
        raise MissingExtra(f"{url} cannot be opened: {error} (pip install it)") from error
    except ValueError as error:
        raise ConfigError(f"{url} cannot be opened: {error}") from error
    return system, path


def _timeouts(url: str) -> dict[str, Any]:
    """Settings by which HTTP gives a silent server up; all other systems have their own."""
    named = {part.partition("://")[0] for part in url.split("::")} & {"http", "https"}
    if not named:
        return {}
    from aiohttp import ClientTimeout  # noqa: PLC0415 - what fsspec's HTTP is made of
    from fsspec.config import conf  # noqa: PLC0415

    seconds = patience().timeout
    timeout = ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
    options = {}
    for protocol in sorted(named):
        users = conf.get(protocol, {}).get("client_kwargs", {})
        options[protocol] = {"client_kwargs": {"timeout": timeout, **users}}
    return options


@dataclass(slots=True)
class _Place:
    """Bytes that were fetched, from `begin` on."""

    begin: int
    data: bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


class RemoteFile(io.RawIOBase):
    """The bytes of a file that had this size when it was listed."""

    def __init__(self, path: str, size: int) -> None:
        self.size = size
        self._path = path
        self._at = 0
        self._places: list[_Place] = []  # the one read last comes last
        self._system: Any = None  # held on to: an archive is closed with its system
        self._file: Any = None  # None too when a read went wrong: the next one opens it anew
        if size:
            self._file = retried(path, "opening", self._open)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place; nothing is asked for."""
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if at < 0:
            raise ValueError(f"{at} is before the file's beginning")
        self._at = at
        return at

    def read(self, count: int | None = -1, /) -> bytes:
        """As many bytes as were asked for, fewer only at the end."""
        if self.closed:
            raise ValueError("the file is closed")
        left = max(self.size - self._at, 0)
        count = left if count is None or count < 0 else min(count, left)
        found = self._read(self._at, count) if count else b""
        self._at += count
        return found

    def readinto(self, buffer: Any, /) -> int:
        """The same into a buffer."""
        view = memoryview(buffer).cast("B")
        found = self.read(len(view))
        view[: len(found)] = found
        return len(found)

    def close(self) -> None:
        """Let go of the connection and of what was read ahead."""
        if not self.closed:
            self._drop()
            self._places.clear()
        super().close()

    def _read(self, begin: int, count: int) -> bytes:
        place = next((p for p in self._places if p.begin <= begin <= p.end), None)
        if place is None:
            place = _Place(begin, self._fetch(begin, count, count))
            del self._places[: len(self._places) - PLACES + 1]
        else:
            self._places.remove(place)
        self._places.append(place)
        found = place.data[begin - place.begin :][:count]
        missing = count - len(found)
        if missing:
            ahead = min(2 * len(place.data), AHEAD)
            begin = place.end
            place.data = self._fetch(begin, missing, max(missing, ahead))
            place.begin = begin
            found += place.data[:missing]
        return found

    # --- asking

    def _fetch(self, begin: int, least: int, most: int) -> bytes:
        """At least so many bytes, and more if they come at once; whatever has come is kept."""
        most = min(most, self.size - begin)
        parts: list[bytes] = []
        while least > 0:
            part = self._part(begin, least, most)
            parts.append(part)
            begin, least, most = begin + len(part), least - len(part), most - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _part(self, begin: int, least: int, most: int) -> bytes:
        return retried(
            self._path,
            f"reading at byte {begin:,}",
            lambda: self._once(begin, least, most),
            most=HUB_ATTEMPTS if "hf://" in self._path else math.inf,
        )

    def _once(self, begin: int, least: int, most: int) -> bytes:
        """One attempt; after one that failed, no more is asked for than has to be."""
        if self._file is None:
            self._file, most = self._open(), least
        try:
            self._file.seek(begin)
            found: bytes = self._file.read(most)
            if not found:
                raise ConnectionError(f"no byte came, where the file has {self.size:,}")
        except BaseException:
            self._drop()
            raise
        return found

    def _open(self) -> Any:
        from fsspec.spec import AbstractBufferedFile  # noqa: PLC0415

        self._system, path = filesystem(self._path)
        protocols = self._system.protocol
        protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        options = {"cache_type": "none"} if protocols & _RANGES else {}
        opened = self._system.open(path, "rb", **options)
        if isinstance(opened, AbstractBufferedFile) and opened.size != self.size:
            has = opened.size
            opened.close()
            if has is None:
                raise DataError(
                    f"{self._path}: its server gives a file from the beginning only, and no part "
                    "of it: copy it to a disk first"
                )
            raise DataError(
                f"{self._path} had {self.size:,} bytes when files were listed, and has {has:,} "
                "now: list the input again"
            )
        return opened

    def _drop(self) -> None:
        opened, self._file = self._file, None
        if opened is not None:
            with suppress(Exception):  # a connection that broke need not be closed
                opened.close()
