"""What readers give: units of work, batches of documents, and what was refused with its reason.

A document's address is its row in a Parquet file or a JSON list, and the byte offset of its line
in JSON Lines (of the decompressed stream where there is compression). An address never depends on
how the work was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DataError

Policy = Literal["error", "reject"]
Addresses = npt.NDArray[np.int64]

SHOWN = 200  # characters of the offending input that a reject keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What one worker reads at a time; fixed by the input alone.

    `begin` and `end` are row groups of a Parquet file and bytes of a JSON Lines file. Where a
    giant row group is cut, `row_begin` and `row_end` are rows within it; -1 is its end.
    """

    file: int  # index into the list of files
    begin: int
    end: int
    row_begin: int = 0
    row_end: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """A document that was refused, where it is and why."""

    path: str
    address: int
    line: int | None  # from 1 on, where it is known without reading the file from its start
    reason: str
    text: str  # how the offending input begins


@dataclass(slots=True)
class Records:
    """A batch of documents as dicts, with their addresses."""

    addresses: Addresses  # (n,)
    records: list[dict[str, Any]]  # (n,)
    rejects: list[Reject]


@dataclass(slots=True)
class Texts:
    """A batch of texts in one Arrow array, with their addresses and, where there are any, ids."""

    addresses: Addresses  # (n,)
    texts: pa.LargeStringArray  # (n,), no nulls
    rejects: list[Reject]
    ids: pa.LargeStringArray | None  # (n,), the field "id"


def refused(reject: Reject, policy: Policy, place: str) -> Reject:
    """The reject itself under policy "reject"; under "error", its error.

    >>> bad = Reject(path="a.jsonl", address=0, line=1, reason="no field 'text'", text='{"id": 1}')
    >>> refused(bad, "reject", "line 1").reason
    "no field 'text'"
    """
    if policy == "error":
        begins = f" It begins {reject.text!r}." if reject.text else ""
        raise DataError(
            f"{reject.path}, {place}: {reject.reason}.{begins} Mend the file, or have such "
            "documents set aside and counted with the policy 'reject'."
        )
    return reject


def shown(raw: bytes | memoryview | str) -> str:
    r"""How the input begins, for people.

    >>> shown(b"caf\xe9 " + b"x" * 1000)[:6], len(shown("x" * 1000))
    ('caf� x', 200)
    """
    if not isinstance(raw, str):
        raw = bytes(raw[: 4 * SHOWN]).decode(errors="replace")
    return raw[:SHOWN]


def is_utf8(raw: bytes) -> bool:
    r"""Whether these bytes are UTF-8; Arrow looks at 3 to 27 GB/s, and makes no copy.

    >>> is_utf8("é".encode()), is_utf8(b"\xff"), is_utf8(b"\xed\xa0\x80")
    (True, False, False)
    """
    ends = pa.py_buffer(np.array([0, len(raw)], np.int64))
    try:
        pa.LargeStringArray.from_buffers(1, ends, pa.py_buffer(raw)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
