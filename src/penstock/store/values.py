"""Which numbers pass: into a store, what its dtype holds; out of it, what int64 tensors hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DataError
from penstock.store.schema import Schema, StoredKey
from penstock.store.segments import I64, Array


def checked_values(
    name: str,
    key: StoredKey,
    values: Array,
    vocab_size: int | None,
    where: Callable[[int], str],
) -> Array:
    """The values in the key's dtype, little-endian; refuses what that would change.

    `where(i)` names the record that value i belongs to.

    >>> key = StoredKey(dtype="uint16", role="ids", offsets=("sequence",))
    >>> checked_values("sequence", key, np.array([70_000]), None, lambda _: "Record 0")
    Traceback (most recent call last):
    penstock.errors.DataError: Record 0: 'sequence' holds 70000, which uint16 cannot (0 to 65535).
    """
    dtype = np.dtype(key.dtype).newbyteorder("<")
    if not values.size:
        return np.empty(0, dtype)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            found = values.astype(dtype)
        lost = np.isinf(found) & ~np.isinf(values)
        if lost.any():
            place = int(lost.argmax())
            raise DataError(f"{where(place)}: {name!r} holds {values[place]}, past {key.dtype}.")
        return found
    if values.dtype.kind == "f":
        raise DataError(
            f"{where(0)}: {name!r} holds {values.dtype} values, but is stored as {key.dtype}: cast "
            "them, or store the key as float32."
        )
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    least, most = int(values.min()), int(values.max())
    if least < low or most > high:
        place = int((values < low).argmax() if least < low else values.argmax())
        raise DataError(
            f"{where(place)}: {name!r} holds {int(values[place])}, which {key.dtype} cannot "
            f"({low} to {high})."
        )
    if key.role == "ids" and vocab_size is not None and (most >= vocab_size or least < 0):
        place = int(values.argmax() if most >= vocab_size else values.argmin())
        raise DataError(
            f"{where(place)}: {name!r} holds the id {int(values[place])}, which is not below the "
            f"vocabulary's size of {vocab_size}: was another tokenizer used?"
        )
    return values.astype(dtype, copy=False)


def check_int64(values: Array, where: str) -> None:
    """Refuse uint64 tokens that would be negative ids in an int64 tensor.

    >>> check_int64(np.array([1, 2**63], np.uint64), "tokens/: 'sequence'")
    Traceback (most recent call last):
    penstock.errors.DataError: tokens/: 'sequence' holds the token 9223372036854775808, which ...
    """
    if values.dtype.kind != "u" or values.itemsize < 8 or not values.size:
        return
    most = int(values.max())
    if most > np.iinfo(np.int64).max:
        raise DataError(
            f"{where} holds the token {most}, which no int64 tensor does (up to "
            f"{np.iinfo(np.int64).max}): state another dtype than uint64, or write it again."
        )


def checked_offsets(
    schema: Schema, offsets: npt.ArrayLike | Mapping[str, npt.ArrayLike]
) -> dict[str, I64]:
    """Offsets for each array of the schema: from 0, never falling, each fitting the one outside."""
    given: dict[str, Any] = {}
    if isinstance(offsets, Mapping):
        given = dict(offsets)
    elif len(schema.parents) == 1:
        given = dict.fromkeys(schema.parents, offsets)
    if given.keys() != schema.parents.keys():
        raise DataError(
            f"offsets were given for {', '.join(given) or 'all keys at once'}, where "
            f"{', '.join(schema.parents)} were expected, as a mapping."
        )
    found: dict[str, I64] = {}
    records = None
    for array, parent in schema.parents.items():
        edges = np.asarray(given[array])
        if (
            edges.ndim != 1
            or not len(edges)
            or edges.dtype.kind not in "iu"
            or edges[0] != 0
            or (edges[1:] < edges[:-1]).any()
        ):
            raise DataError(f"The offsets of {array!r} are not whole numbers that rise from 0.")
        found[array] = edges.astype(np.int64)
        outer = int(found[parent][-1]) if parent is not None else records
        if outer is not None and len(edges) - 1 != outer:
            raise DataError(
                f"The offsets of {array!r} are of {len(edges) - 1} entries, not {outer}."
            )
        if parent is None:
            records = len(edges) - 1
    return found
