"""Keys that belong together, in files of other tools: the same lengths in every file.

A Penstock shard cannot be otherwise, since aligned keys share their offsets. Elsewhere a mask that
is missing from one file would be read as the mask of another file's tokens.

>>> one = {"sequence": Part(lengths=[10]), "loss_mask": Part(lengths=[9])}
>>> check_aligned({Path("a/meta.json"): one})
Traceback (most recent call last):
penstock.errors.DataError: a/meta.json: 'sequence' has lengths [10] and 'loss_mask' [9], where ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.errors import DataError
from penstock.store.schema import aligned_with

_OF_ONE_RECORD = (
    ("sequence", "loss_mask", "position_ids"),
    ("chosen", "chosen_mask", "rejected", "rejected_mask"),
    ("prompts", "responses", "masks", "rewards"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one file has of a key: lengths of its arrays; sizes of its records, where known."""

    lengths: Sequence[int] = ()
    records: npt.ArrayLike | None = None

    @property
    def count(self) -> int:
        """How many records."""
        return 0 if self.records is None else np.size(self.records)


def check_aligned(files: Mapping[Path, Mapping[str, Part]]) -> None:
    """Refuse files in which keys of one record differ in length, or in number of records."""
    keys = dict.fromkeys(key for parts in files.values() for key in parts)
    tokens = [(aligned_with(key), key) for key in keys if aligned_with(key) in keys]
    tokens = [(lead, key) for lead, key in tokens if lead != key]
    records = [[key for key in group if key in keys] for group in _OF_ONE_RECORD]
    for path, parts in files.items():
        for lead, key in tokens:
            for problem in _of_tokens(lead, key, parts):
                raise DataError(f"{path}: {problem}: write it again.")
        for group in records:
            for problem in _of_records(group, parts):
                raise DataError(f"{path}: {problem}: write it again.")


def _of_tokens(lead: str, key: str, parts: Mapping[str, Part]) -> Iterator[str]:
    """Two keys with a value a token each, of which a file has neither or both."""
    if lead not in parts and key not in parts:
        return
    one, other = parts.get(lead, Part()), parts.get(key, Part())
    if list(one.lengths) != list(other.lengths):
        yield _differ(lead, "lengths", _shown(one.lengths), key, _shown(other.lengths))
    elif one.records is not None and other.records is not None:
        first, second = np.asarray(one.records), np.asarray(other.records)
        if not np.array_equal(first, second):
            yield _differ(
                lead, "records of sizes", _shown(first.tolist()), key, _shown(second.tolist())
            )


def _of_records(group: Sequence[str], parts: Mapping[str, Part]) -> Iterator[str]:
    """Keys of one record, of which a file has as many records each, where it has records."""
    known = {
        key: parts[key].count for key in group if key in parts and parts[key].records is not None
    }
    counts = known | {key: 0 for key in group if known and key not in parts}
    first = next(iter(counts), "")
    for key, count in counts.items():
        if count != counts[first]:
            yield _differ(first, "records:", f"{counts[first]:,}", key, f"{count:,}")


def _differ(one: str, what: str, found: str, other: str, differs: str) -> str:
    return (
        f"{one!r} has {what} {found} and {other!r} {differs}, where keys that belong together have "
        "the same in every file"
    )


def _shown(numbers: Sequence[int]) -> str:
    """The first few of them.

    >>> _shown([1, 2]), _shown(range(20)), _shown([])
    ('[1, 2]', '[0, 1, 2, 3, 4, 5, ... 20 in all]', 'none')
    """
    if not len(numbers):
        return "none"
    if len(numbers) <= 8:
        return str(list(numbers))
    return f"[{', '.join(map(str, numbers[:6]))}, ... {len(numbers):,} in all]"
