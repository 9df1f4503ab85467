"""What processes share on one disk: the cache folder, locks, and files that stand whole or not.

    folder = cache_folder("packing")              ~/.cache/penstock/packing
    with locked(folder / ".a.lock", wait=True):   one process at a time, until it ends or dies
        if not (folder / "a.json").exists():      another was first
            write_whole(folder / "a.json", raw)   readers need no lock: they see all of it or none

Whoever finds what it wants reads on without locking; whoever does not locks, looks again, makes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import ConfigError


def cache_folder(room: str) -> Path:
    """Where a room keeps what can be made again; it need not exist yet.

    >>> os.environ["PENSTOCK_CACHE_DIR"] = "/scratch/cache"
    >>> cache_folder("packing")
    PosixPath('/scratch/cache/packing')
    >>> del os.environ["PENSTOCK_CACHE_DIR"]
    """
    chosen = os.environ.get("PENSTOCK_CACHE_DIR")
    if chosen:
        return Path(chosen) / room
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise ConfigError(f"no place for a cache ({error}): set PENSTOCK_CACHE_DIR") from None
    return Path(home) / "penstock" / room


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of this name; the kernel lets go of it when its holder dies.

    The file stays when the lock is free again. Without `wait`, a lock that another holds (a thread
    of this process, too) is a BlockingIOError.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lock"
    >>> with locked(path, wait=True), locked(path, wait=False):
    ...     pass
    Traceback (most recent call last):
    BlockingIOError: [Errno 11] Resource temporarily unavailable
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(path, wait=wait)
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(path: Path, *, wait: bool) -> int:
    """A descriptor that holds the lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # A file that was removed before it was locked keeps nobody out of the next one.
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def write_whole(path: Path, raw: bytes) -> None:
    """Write a file, or put another in its place: whole or not at all, whenever the power goes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        write_synced(temporary, raw)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_synced(path: Path, raw: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot, and say so
            os.fsync(handle)
    finally:
        os.close(handle)
