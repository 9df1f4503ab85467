"""Plain text, with no Python object a document: what is kept of it, and what is put around it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.store.segments import bounds_of
from penstock.text.arrow import begins_of, flags, integers, numbers

LONG = 400  # tokens a document, from which on to copy each costs less than a mask over all of them

U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]


def sifted(
    texts: pa.LargeStringArray, min_chars: int, max_chars: int
) -> dict[str, npt.NDArray[np.bool_]]:
    """Which texts each rule filters; the first that applies has it.

    >>> found = sifted(pa.array(["short", "long enough", "      "], pa.large_string()), 6, 100)
    >>> {rule: np.flatnonzero(mask).tolist() for rule, mask in found.items()}
    {'min_chars': [0], 'max_chars': [], 'empty': [2]}
    """
    begins = begins_of(texts)
    most = np.diff(begins)  # characters at most: a byte each; and at least
    least = (most + 3) // 4
    short, long = most < min_chars, least > max_chars
    doubtful = np.flatnonzero(
        ((most >= min_chars) & (least < min_chars)) | ((most > max_chars) & (least <= max_chars))
    )
    if len(doubtful):
        lengths = numbers(pc.utf8_length(texts.take(integers(doubtful))))
        short[doubtful], long[doubtful] = lengths < min_chars, lengths > max_chars
    blank = ~(short | long)
    blank[blank] = _blank(texts, np.flatnonzero(blank), begins)
    return {"min_chars": short, "max_chars": long, "empty": blank}


def _blank(
    texts: pa.LargeStringArray, those: npt.NDArray[np.intp], begins: I64
) -> npt.NDArray[np.bool_]:
    """Which of those texts have nothing that can be seen."""
    hidden: npt.NDArray[np.bool_] = begins[those] == begins[those + 1]
    characters = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
    first = characters[begins[those[~hidden]]]
    hidden[~hidden] = (first < ord("!")) | (first > ord("~"))
    # Nearly every text begins with a visible ASCII character, or has one; the search ends at it.
    left = texts.take(integers(those[hidden]))
    hidden[hidden] = ~flags(pc.match_substring_regex(left, "[!-~]"))
    for i in np.flatnonzero(hidden).tolist():
        hidden[i] = not texts[int(those[i])].as_py().strip()
    return hidden


def framed(
    ids: U32, offsets: I64, *, bos: int | None, eos: int | None, limit: int | None
) -> tuple[U32, I64, int]:
    """Ragged ids with BOS before and EOS after each document, cut to a limit; how many were cut.

    >>> ids, offsets, cut = framed(
    ...     np.array([5, 6, 7], np.uint32), np.array([0, 2, 3]), bos=1, eos=2, limit=3)
    >>> ids.tolist(), offsets.tolist(), cut
    ([1, 5, 6, 1, 7, 2], [0, 3, 6], 1)
    """
    before, after = int(bos is not None), int(eos is not None)
    lengths = np.diff(offsets)
    whole = lengths + before + after
    kept = whole if limit is None else np.minimum(whole, limit)
    cut = int((whole - kept).sum())
    if not (before or after or cut) and len(ids) == lengths.sum():
        return ids, offsets, 0
    bounds = bounds_of(kept)
    if not cut and len(ids) > LONG * len(lengths):
        return _joined(ids, offsets, bos, eos), bounds, 0
    if cut:
        body = np.clip(kept - before, 0, lengths)
        # Token j of a document's body stands at its begin + j; the bodies follow each other.
        starts = np.repeat(offsets[:-1] - (np.cumsum(body) - body), body)
        found = ids[starts + np.arange(len(starts))]
    else:
        found = ids[offsets[0] : offsets[-1]]
    out = np.empty(int(bounds[-1]), ids.dtype)
    free = np.ones(len(out), np.bool_)
    if bos is not None:
        firsts = bounds[:-1][kept > 0]
        out[firsts], free[firsts] = bos, False
    if eos is not None:
        lasts = bounds[1:][kept == whole] - 1
        out[lasts], free[lasts] = eos, False
    out[free] = found
    return out, bounds, cut


def _joined(ids: U32, offsets: I64, bos: int | None, eos: int | None) -> U32:
    """What `framed` makes of long documents that are not cut: stretches copied whole."""
    first, last = (np.array([] if i is None else [i], ids.dtype) for i in (bos, eos))
    parts: list[U32] = []
    for begin, end in pairwise(offsets.tolist()):
        parts += (first, ids[begin:end], last)
    return np.concatenate(parts)
