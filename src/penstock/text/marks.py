"""Where the two backends normalise differently: combining marks that Unicode has had since 2017.

    rows_with_newer_marks(pa.array(["abc", "a" + chr(0x0C3C)]))        # [1], a Telugu nukta

Normalisation (NFC and its like) puts marks in canonical order. The tables of `tokenizers` 0.23 do
not know 157 marks that gigatoken 0.10 does: those on which ids differed when each of the 1,112,064
code points was tried between other marks. Texts that hold one are left to the reference, which
decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.text.arrow import flags

NEWER_MARKS = (
    "07FD 0897-089F 08CA-08D3 09FE 0C3C 0D3B-0D3C 0EBA 1715 1ABF-1ADD 1AE0-1AEB 1DF6-1DFA A82C "
    "10D24-10D27 10D69-10D6D 10EAB-10EAC 10EFA-10EFB 10EFD-10EFF 10F46-10F50 10F82-10F85 11070 "
    "1133B 113C2 113CE-113D0 1145E 11839-1183A 1193D-1193E 11943 119E0 11A34 11A47 11A99 11D42 "
    "11D44-11D45 11D97 11F41-11F42 1611E 1612F 16D67 16FF0-16FF1 1E08F 1E130-1E136 1E2AE "
    "1E2EC-1E2EF 1E4EC-1E4EF 1E5EE-1E5EF 1E6E3 1E6E6 1E6EE-1E6EF 1E6F5"
)
PATTERN = "[{}]".format(
    "".join(
        "-".join(rf"\x{{{point}}}" for point in span.split("-")) for span in NEWER_MARKS.split()
    )
)


def rows_with_newer_marks(texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
    """The rows that hold such a mark.

    >>> rows_with_newer_marks(pa.array(["abc", "a" + chr(0x0C3C), "a" + chr(0x0301)])).tolist()
    [1]
    """
    return np.flatnonzero(flags(pc.match_substring_regex(texts, PATTERN)))


def normalises(content: dict[str, Any]) -> bool:
    """Whether a tokenizer.json brings text into one of Unicode's normal forms.

    >>> normalises({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}})
    True
    """
    stage = content.get("normalizer") or {}
    parts = stage.get("normalizers") or [stage]
    return any(part.get("type") in ("NFC", "NFD", "NFKC", "NFKD") for part in parts)
