"""Plain text, with no Python object a document: what is kept of it, and what is put around it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]


def sifted(
    texts: pa.LargeStringArray, min_chars: int, max_chars: int, *, keep_blank: bool = False
) -> dict[str, npt.NDArray[np.bool_]]:
    """Which texts each rule filters; the first that applies has it.

    >>> found = sifted(pa.array(["short", "long enough", "      "], pa.large_string()), 6, 100)
    >>> {rule: np.flatnonzero(mask).tolist() for rule, mask in found.items()}
    {'min_chars': [0], 'max_chars': [], 'empty': [2]}
    """
    lengths = np.asarray(pc.utf8_length(texts))
    short, long = lengths < min_chars, lengths > max_chars
    if keep_blank:
        return {"min_chars": short, "max_chars": long}
    # Nearly every text has a visible ASCII character, and the search ends at the first.
    blank = ~np.asarray(pc.match_substring_regex(texts, "[!-~]"), dtype=np.bool_) & ~short & ~long
    for i in np.flatnonzero(blank).tolist():
        blank[i] = not texts[i].as_py().strip()
    return {"min_chars": short, "max_chars": long, "empty": blank}
