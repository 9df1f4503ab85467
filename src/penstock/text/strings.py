"""Batches of documents in whatever form they come, as one Arrow array of UTF-8.

large_strings(["a", "é"])        # pa.LargeStringArray, checked: no nulls, valid UTF-8
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError
from penstock.text.arrow import begins_of, binaries, strings

# Below this, what threads cost is more than what they save.
LEAST = 64 << 10


def large_strings(
    texts: pa.Array | pa.ChunkedArray | Sequence[str] | Sequence[bytes],
) -> pa.LargeStringArray:
    r"""The texts as large_string; bytes have to be UTF-8.

    >>> large_strings([b"caf\xc3\xa9"])[0].as_py()
    'café'
    """
    if isinstance(texts, str | bytes):
        raise ConfigError(f"texts is one {type(texts).__name__}, expected several: pass [text]")
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
        if isinstance(texts, pa.ChunkedArray):  # what older versions of pyarrow give
            texts = pa.concat_arrays(texts.chunks)
    if isinstance(texts, pa.Array):
        return _from_arrow(texts)
    rows = list(texts)
    kinds = {type(row) for row in rows}
    if kinds <= {bytes}:
        return _from_arrow(binaries(rows))
    for i, row in enumerate(rows):
        if not isinstance(row, str):
            raise DataError(f"text {i} is a {type(row).__name__}, expected str (or all bytes)")
    try:
        return strings(rows)
    except UnicodeEncodeError:
        raise DataError(_surrogate(rows)) from None


def _from_arrow(texts: pa.Array) -> pa.LargeStringArray:
    kinds = pa.types
    if texts.null_count:
        first = int(np.flatnonzero(texts.is_null())[0])
        raise DataError(f"text {first} is null, expected a string")
    if kinds.is_null(texts.type) and len(texts) == 0:
        return strings([])
    if not any(
        test(texts.type)
        for test in (
            kinds.is_large_string,
            kinds.is_string,
            kinds.is_binary,
            kinds.is_large_binary,
            kinds.is_string_view,
            kinds.is_binary_view,
            kinds.is_dictionary,
        )
    ):
        raise DataError(f"texts are {texts.type}, expected strings or bytes")
    try:
        found = texts.cast(pa.large_string())
        found.validate(full=True)
    except pa.ArrowInvalid:
        raise DataError(_not_utf8(texts)) from None
    return found


def _not_utf8(texts: pa.Array) -> str:
    for i, row in enumerate(texts.cast(pa.large_binary())):
        try:
            row.as_py().decode()
        except UnicodeDecodeError as error:
            return f"text {i} is not UTF-8 at byte {error.start}: {error.reason}"
    return "a text is not UTF-8"


def _surrogate(rows: Sequence[str]) -> str:
    for i, row in enumerate(rows):
        try:
            row.encode()
        except UnicodeEncodeError as error:
            return f"text {i} has half a surrogate pair at character {error.start}"
    return "a text has half a surrogate pair"


def split_rows(texts: pa.LargeStringArray, parts: int) -> list[pa.LargeStringArray]:
    """Consecutive rows in at most so many parts of about the same number of bytes.

    >>> [len(part) for part in split_rows(large_strings(["x" * 90_000, "y", "z" * 90_000]), 2)]
    [2, 1]
    """
    parts = min(parts, len(texts), texts.nbytes // LEAST)
    if parts <= 1:
        return [texts]
    begins = begins_of(texts)
    goals = begins[0] + (begins[-1] - begins[0]) * np.arange(1, parts) // parts
    cuts = np.unique([0, *np.searchsorted(begins[:-1], goals, side="right"), len(texts)])
    return [texts.slice(a, b - a) for a, b in pairwise(cuts)]


def replace_rows(
    ids: npt.NDArray[np.uint32],
    offsets: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    others: npt.NDArray[np.uint32],
    ends: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Ragged ids in which some rows, in rising order, are others.

    >>> ids, offsets = np.uint32([1, 2, 2, 3]), np.array([0, 1, 3, 4])
    >>> replace_rows(ids, offsets, np.array([1]), np.uint32([7, 7, 7]), np.array([0, 3]))
    (array([1, 7, 7, 7, 3], dtype=uint32), array([0, 1, 4, 5]))
    """
    parts, kept = [], 0
    for i, row in enumerate(rows.tolist()):
        parts += [ids[kept : offsets[row]], others[ends[i] : ends[i + 1]]]
        kept = offsets[row + 1]
    counts = np.diff(offsets)
    counts[rows] = np.diff(ends)
    new = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return np.concatenate([*parts, ids[kept:]]), new
