"""Files mapped into memory, read-only, under one cap for the whole process.

Python's own mmap keeps a file descriptor for each mapping (until 3.13), so that a store of 1,000
shards would run out of the usual 1,024. Here libc's mmap is called, and the descriptor closed at
once: what is capped is the number of mappings, by the kernel's `vm.max_map_count`. Where libc's
cannot be used, Python's is, under a cap taken from RLIMIT_NOFILE.

A mapping that is evicted lives on for as long as an array views it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import DataError, MissingData

Bytes = npt.NDArray[np.uint8]

_WITHOUT_DESCRIPTOR = sys.platform == "linux" and sys.maxsize > 2**32


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


LIBC = _libc() if _WITHOUT_DESCRIPTOR else None


class _Region:
    """A stretch of mapped memory, unmapped when the last array over it is gone."""

    def __init__(self, address: int, size: int, *, writable: bool = False) -> None:
        assert LIBC is not None
        self.__array_interface__ = {
            "data": (address, not writable),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }
        weakref.finalize(self, LIBC.munmap, address, size).atexit = False


def map_descriptor(descriptor: int, size: int, *, writable: bool = False) -> Bytes:
    """The first `size` > 0 bytes of an open file as an array; it may be closed after."""
    if LIBC is None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(descriptor, size, access=access), np.uint8)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = LIBC.mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return np.asarray(_Region(address, size, writable=writable))


def map_file(path: Path, size: int | None = None, why: str = "") -> Bytes:
    """All bytes of a file, mapped; it must hold `size` bytes, which is what `why` explains."""
    for attempt in (0, 1):
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            try:
                found = os.fstat(descriptor).st_size
                if size is not None and found != size:
                    raise DataError(
                        f"{path} holds {found:,} bytes where {size:,} were expected{why}: it is "
                        f"{'cut short' if found < size else 'too long'}; restore it or write the "
                        "store again."
                    )
                return map_descriptor(descriptor, found) if found else np.empty(0, np.uint8)
            finally:
                os.close(descriptor)
        except OSError as err:
            if err.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM} and not attempt:
                POOL.evict(len(POOL) // 2 + 1)
                continue
            if err.errno == errno.ENOENT:
                raise MissingData(
                    f"{path} is missing, but the store lists it: restore it or write the store "
                    "again."
                ) from None
            raise DataError(f"{path} cannot be opened ({err.strerror}).") from err
    raise AssertionError  # the second attempt returned or raised


class Slots(Protocol):
    """What holds mappings for the pool: one slot a shard."""

    def touched(self, index: int) -> bool:
        """Whether the slot was read since last asked; asking forgets."""

    def drop(self, index: int) -> None:
        """Let go of the slot's mapping."""


class Pool:
    """All open mappings of the process: the first admitted goes first, with a second chance.

    The lock is for admission and eviction; reading a mapped shard takes none.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.lock = threading.RLock()
        self._queue: deque[tuple[weakref.ref[Any], int]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def admit(self, owner: Slots, index: int) -> None:
        """Count one more mapping, and let others go if there are too many (with the lock held)."""
        self._queue.append((weakref.ref(owner), index))
        if len(self._queue) > self.cap:
            self.evict(len(self._queue) - self.cap)

    def evict(self, count: int) -> None:
        """Let go of `count` mappings, those read lately last."""
        with self.lock:
            chances = len(self._queue)
            while count > 0 and self._queue:
                reference, index = self._queue.popleft()
                owner: Slots | None = reference()
                if owner is not None and chances > 0 and owner.touched(index):
                    chances -= 1
                    self._queue.append((reference, index))
                    continue
                if owner is not None:
                    owner.drop(index)
                count -= 1

    def forget(self, owner: Slots) -> None:
        """Stop counting the mappings of an owner that is being closed."""
        with self.lock:
            self._queue = deque(item for item in self._queue if item[0]() not in {None, owner})


def _cap() -> int:
    """A quarter of the mappings the kernel allows, or half of the descriptors."""
    if _WITHOUT_DESCRIPTOR:
        limit = Path("/proc/sys/vm/max_map_count")
        return max(16, min(int(limit.read_text()) // 4 if limit.exists() else 16384, 16384))
    try:
        import resource  # noqa: PLC0415 - absent on Windows
    except ImportError:
        return 1024
    return max(16, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 4096))


POOL = Pool(_cap())


def _after_fork() -> None:
    POOL.lock = threading.RLock()  # another thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
