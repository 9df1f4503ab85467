"""BOS and EOS put around ragged ids, many documents at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.pack.rows import bounds_of

U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

LONG = 400  # tokens a document, from which on to copy each costs less than a mask over all of them


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
