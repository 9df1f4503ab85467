"""Plain text, with no Python object a document: what is kept of it, and what is put around it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.text.arrow import begins_of, flags, integers, numbers

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
    if keep_blank:
        return {"min_chars": short, "max_chars": long}
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
