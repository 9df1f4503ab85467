"""Views whose rows are all windows of some memory, so that one fancy index gathers a batch.

Over one array that is `as_strided`. Rows from a thousand mapped files have no array in common but
one: the address space. A view of all of it is indexed by the rows' addresses, and numpy copies
the rows without a Python slice for each (128 rows of 2,049 tokens over 1,000 files: 85 µs, where
slices take 145 and one file takes 55). Nothing but the rows is ever read, so all that has to hold
is what `Column._gather_mapped` sees to: each row lies in a mapping that it keeps alive.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ORIGIN = 4096  # the first page is never mapped, and a view from address 0 would be a null pointer
LONGEST = 16384  # rows beyond this gain nothing, and the view's size would overflow
_ADDRESSES = 2**48
SUPPORTED = sys.maxsize > 2**32


def windows(values: Array, length: int) -> Array:
    """A (len - length + 1, length) view whose row s is values[s : s + length].

    >>> windows(np.arange(4), 3).tolist()
    [[0, 1, 2], [1, 2, 3]]
    """
    step = values.itemsize
    rows = max(len(values) - length + 1, 0)
    return np.lib.stride_tricks.as_strided(values, (rows, length), (step, step), writeable=False)


class _AllMemory:
    def __init__(self, dtype: np.dtype[Any], length: int) -> None:
        self.__array_interface__ = {
            "data": (ORIGIN, True),
            "shape": (_ADDRESSES // dtype.itemsize, length),
            "strides": (dtype.itemsize, dtype.itemsize),
            "typestr": dtype.str,
            "version": 3,
        }


def memory_windows(dtype: np.dtype[Any], length: int) -> Array:
    """A read-only view whose row (address - ORIGIN) // itemsize is the window at that address."""
    assert SUPPORTED
    assert length <= LONGEST
    return np.asarray(_AllMemory(dtype, length))
