"""Reading ahead: many ranges of mapped memory asked for in one system call.

`process_madvise` takes an array of (address, length) pairs, which a numpy array of shape (n, 2)
is, and lets go of the GIL. Where the kernel does not have it, or forbids it, each range is one
`madvise`; where that is missing too, nothing is read ahead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

from penstock.store.mapping import LIBC

I64 = npt.NDArray[np.int64]

PAGE = mmap.PAGESIZE
_PROCESS_MADVISE = 440  # the same number on every Linux architecture
_WILL_NEED = 3
_RANDOM = 1
_MOST = 1024  # ranges a call


class _Process:
    """A descriptor of this very process, opened again after a fork; None once refused."""

    def __init__(self) -> None:
        self.refused = LIBC is None or not hasattr(os, "pidfd_open")
        self._lock = threading.Lock()
        self._owner = 0
        self._descriptor = -1

    def descriptor(self) -> int:
        if self._owner != os.getpid():
            with self._lock:
                if self._owner != os.getpid():
                    self._descriptor = os.pidfd_open(os.getpid())
                    self._owner = os.getpid()
        return self._descriptor


_SELF = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: setattr(_SELF, "_lock", threading.Lock()))


def merge_pages(begin: I64, end: I64) -> npt.NDArray[np.uint64]:
    """Byte ranges as whole pages, sorted, those that touch joined: (n, 2) of (address, length).

    >>> merge_pages(np.array([9000, 10, 4096]), np.array([9001, 20, 4100])).tolist()
    [[0, 12288]]
    """
    first = begin & -PAGE
    last = (end + (PAGE - 1)) & -PAGE
    order = first.argsort()
    first = first[order]
    last = np.maximum.accumulate(last[order])
    opens = np.concatenate(([True], first[1:] > last[:-1]))
    first = first[opens]
    last = last[np.concatenate((np.flatnonzero(opens)[1:] - 1, [len(last) - 1]))]
    return np.stack([first, last - first], 1).astype(np.uint64)


def will_need(begin: I64, end: I64) -> None:
    """Start reading the pages of mapped byte ranges; an advice, so nothing is raised."""
    if not len(begin) or LIBC is None:
        return
    ranges = merge_pages(begin, end)
    for first in range(0, len(ranges), _MOST):
        block = np.ascontiguousarray(ranges[first : first + _MOST])
        if _SELF.refused or not _advise_block(block):
            for address, length in block.tolist():
                LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _WILL_NEED)


def expect_random(address: int, size: int) -> None:
    """Mapped memory will be read in no order: a fault should bring its own page and no more.

    The system's habit is to read around a fault, from 128 KiB to some MiB: with windows of 4 KiB
    taken from all over a corpus, hundreds of times what is used.
    """
    if LIBC is not None:
        first = address & -PAGE
        LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(address + size - first), _RANDOM)


def _advise_block(block: npt.NDArray[np.uint64]) -> bool:
    """Advise up to 1,024 ranges at once; False, from then on, where that cannot be done."""
    assert LIBC is not None
    try:
        descriptor = _SELF.descriptor()
    except OSError:
        _SELF.refused = True
        return False
    done = LIBC.syscall(
        ctypes.c_long(_PROCESS_MADVISE),
        ctypes.c_long(descriptor),
        ctypes.c_void_p(block.ctypes.data),
        ctypes.c_size_t(len(block)),
        ctypes.c_long(_WILL_NEED),
        ctypes.c_long(0),
    )
    if done < 0 and ctypes.get_errno() in {1, 22, 38}:  # EPERM, EINVAL, ENOSYS
        _SELF.refused = True
        return False
    return True
