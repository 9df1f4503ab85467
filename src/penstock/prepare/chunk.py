"""Records as columns, with where each came from: what is cut, dropped and put in order at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.pack import bounds_of, sums
from penstock.text.arrow import integers, repeated, strings

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`values` of each key end to end, `lengths` by offsets array; and where each record stood."""

    values: dict[str, npt.NDArray[Any]]
    lengths: dict[str, I64]
    path: str | list[str]  # of all records, or of each
    addresses: I64
    own: pa.Array | None

    def __len__(self) -> int:
        return len(self.addresses)

    def pieces(self, record: npt.NDArray[Any], start: npt.NDArray[Any], length: I64) -> Chunk:
        """Spans of records, each a record of its own; all keys are cut alike."""
        first = bounds_of(self.lengths["sequence"])[:-1][record] + start
        length = length.astype(np.int64)
        at = np.repeat(first - bounds_of(length)[:-1], length) + np.arange(int(length.sum()))
        values = {name: value[at] for name, value in self.values.items()}
        path = self.path if isinstance(self.path, str) else [self.path[i] for i in record.tolist()]
        own = None if self.own is None else self.own.take(integers(record))
        lengths = dict.fromkeys(self.lengths, length)
        return Chunk(values, lengths, path, self.addresses[record], own)

    def cut(self, most: int, *, from_end: bool) -> Chunk:
        """Records of at most `most` tokens: their starts, or their ends."""
        lengths = self.lengths["sequence"]
        if int(lengths.max(initial=0)) <= most:
            return self
        kept = np.minimum(lengths, most)
        start = lengths - kept if from_end else np.zeros_like(lengths)
        return self.pieces(np.arange(len(self)), start, kept)

    def untrained(self) -> npt.NDArray[np.intp]:
        """The records of which nothing is trained."""
        if "loss_mask" not in self.values:
            return np.empty(0, np.intp)
        trained = sums(self.values["loss_mask"] != 0, bounds_of(self.lengths["sequence"]))
        return np.flatnonzero(trained == 0)

    def without(self, gone: npt.NDArray[np.intp]) -> Chunk:
        """All but some of the records."""
        if not len(gone):
            return self
        kept = np.setdiff1d(np.arange(len(self)), gone)
        lengths = self.lengths["sequence"][kept]
        return self.pieces(kept, np.zeros_like(lengths), lengths)

    def paths(self) -> list[str]:
        """The file of each record."""
        return [self.path] * len(self) if isinstance(self.path, str) else self.path

    def _files(self) -> pa.DictionaryArray:
        if isinstance(self.path, str):
            return repeated(self.path, len(self))
        return strings(self.path).cast(pa.string()).dictionary_encode()

    def source(self, rows: I64 | None) -> pa.Table:
        """Where each record came from: its file, its address there, its own id, its packed row."""
        columns: dict[str, Any] = {
            "file": self._files(),
            "address": integers(self.addresses),
            "id": _names(self),
        }
        if rows is not None:
            columns["row"] = integers(rows)
        return pa.Table.from_arrays(list(columns.values()), list(columns))


def _names(chunk: Chunk) -> pa.Array:
    return pa.nulls(len(chunk), pa.string()) if chunk.own is None else chunk.own.cast(pa.string())


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Chunks one after the other."""
    names, arrays = chunks[0].values, chunks[0].lengths
    return Chunk(
        {name: np.concatenate([c.values[name] for c in chunks]) for name in names},
        {name: np.concatenate([c.lengths[name] for c in chunks]) for name in arrays},
        [path for chunk in chunks for path in chunk.paths()],
        np.concatenate([c.addresses for c in chunks]),
        pa.concat_arrays([_names(chunk) for chunk in chunks]),
    )
