"""Arrow arrays made of buffers, and numpy's made of theirs.

    strings(["a", None, "é"]), integers(np.arange(3)), numbers(pc.utf8_length(texts))

`pa.array`, `pa.table` and `to_numpy` do the same, and import pandas where it is installed, to see
whether what they were given is of it: half a second and 50 MB for every process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def strings(rows: Sequence[str | None]) -> pa.LargeStringArray:
    """Texts, None being null; half of a surrogate pair is a UnicodeEncodeError.

    >>> strings(["a", None, "é"]).to_pylist()
    ['a', None, 'é']
    """
    return binaries([None if row is None else row.encode() for row in rows]).view(pa.large_string())


def binaries(rows: Sequence[bytes | None]) -> pa.LargeBinaryArray:
    """Bytes, None being null."""
    ends = np.zeros(len(rows) + 1, np.int64)
    valid = None
    if None in rows:
        there = np.array([row is not None for row in rows])
        valid = pa.py_buffer(np.packbits(there, bitorder="little"))
        rows = [row or b"" for row in rows]
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=ends[1:])  # type: ignore[arg-type]
    buffers = [valid, pa.py_buffer(ends), pa.py_buffer(b"".join(rows))]  # type: ignore[arg-type]
    return pa.Array.from_buffers(pa.large_binary(), len(rows), buffers)


def integers(values: npt.NDArray[np.signedinteger]) -> pa.Array:
    """Whole numbers, in the buffer in which they are.

    >>> integers(np.arange(3, dtype=np.int32)).type
    DataType(int32)
    """
    kind = pa.from_numpy_dtype(values.dtype)
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [None, buffer])


def repeated(text: str, count: int) -> pa.DictionaryArray:
    """One text many times.

    >>> repeated("a.jsonl", 2).to_pylist()
    ['a.jsonl', 'a.jsonl']
    """
    one = strings([text]).cast(pa.string())
    return pa.DictionaryArray.from_arrays(integers(np.zeros(count, np.int32)), one)


def numbers(array: pa.Array) -> npt.NDArray[np.signedinteger]:
    """Whole numbers without nulls, where they are.

    >>> numbers(integers(np.arange(5)).slice(3)).tolist()
    [3, 4]
    """
    assert not array.null_count
    found = np.frombuffer(array.buffers()[1], array.type.to_pandas_dtype())
    return found[array.offset : array.offset + len(array)]


def flags(array: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    """Booleans without nulls, a byte each.

    >>> flags(strings(["a", None]).is_null()).tolist()
    [False, True]
    """
    assert not array.null_count
    if not len(array):
        return np.empty(0, np.bool_)
    bits = np.frombuffer(array.buffers()[1], np.uint8)
    found = np.unpackbits(bits, count=array.offset + len(array), bitorder="little")
    return found[array.offset :].view(np.bool_)


def begins_of(texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
    """Where each text begins in the buffer of all, and where the last one ends.

    >>> begins_of(strings(["a", "bc", "d"]).slice(1)).tolist()
    [1, 3, 4]
    """
    if not len(texts):
        return np.zeros(1, np.int64)  # what has no rows may have no buffer
    return np.frombuffer(texts.buffers()[1], np.int64)[texts.offset :][: len(texts) + 1]
