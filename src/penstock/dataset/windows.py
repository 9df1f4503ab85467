"""Fixed spans of a store as samples: inputs, and labels one token on.

`MemoryMappedDataset` is the KempnerForge one, over folders of .npy or .bin files: a sample spans
`seq_len` tokens of one file. `WindowDataset` is over any store: a sample has `seq_len` inputs and
as many labels, windows follow one another across shards, every token but the first is a label once.
"""

from __future__ import annotations

import operator
from copy import copy
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.batch import Windows
from penstock.dataset.excluded import Ranges, tokens_of
from penstock.dataset.tokens import MASK, TOKENS, TokenDataset
from penstock.errors import ConfigError, MissingData
from penstock.pack import eos_cuts
from penstock.store import MmapStore, Store


class TokenWindows(TokenDataset):
    """Samples that are `width` tokens from a place in a store: what both datasets share."""

    def __init__(
        self,
        store: Store,
        width: int,
        stride: int,
        pack_sequences: bool,
        eos_token_id: int | None,
    ) -> None:
        super().__init__(store, width, eos_token_id)
        self.stride, self.pack_sequences = stride, pack_sequences
        self.eos_token_id = None if eos_token_id is None else operator.index(eos_token_id)
        if pack_sequences:
            self.group_bytes = 1 << 20  # the boundaries' dozen calls
        self._epoch = 0

    def excluding(self, documents: Ranges) -> Self:
        """A view in which the labels of these documents are -100."""
        view = copy(self)
        view.excluded = tokens_of(self.store, TOKENS, documents)
        return view

    def _starts(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where in the store each sample begins."""
        raise NotImplementedError

    def gather(self, indices: npt.NDArray[np.int64]) -> Windows:
        """The samples' tokens, masks and document starts, in a few numpy calls."""
        starts = self._starts(indices)
        rows = Windows(self.store.gather(starts, self.width, TOKENS))
        if self._masked:
            rows.mask = self.store.gather(starts, self.width, MASK).astype(np.bool_, copy=False)
        if self.excluded is not None:
            rows.mask = self.excluded.spans.masked(starts, self.width, rows.mask)
        if self.pack_sequences:
            if self.eos_token_id is not None:
                rows.cuts = eos_cuts(rows.tokens, self.eos_token_id)
            else:
                rows.cuts = self.store.cuts(starts, self.width, TOKENS)
        return rows

    def advise(self, indices: npt.NDArray[np.int64]) -> None:
        """Have the samples' pages read ahead."""
        starts = self._starts(indices)
        for key in self._keys:
            self.store.advise(starts, self.width, key)

    def layout(self) -> str:
        """What a sample looks like, in words."""
        return f"{self.width - 1} inputs and labels, {'packed' if self.pack_sequences else 'plain'}"

    def identity(self) -> dict[str, Any]:
        """The store's fingerprint, and how windows are cut from it."""
        return {
            "data": self.store.fingerprint,
            "samples": len(self),
            "window": self.width,
            "stride": self.stride,
            "pack_sequences": self.pack_sequences,
            "eos_token_id": self.eos_token_id,
        }

    def state_dict(self) -> dict[str, Any]:
        """Keys: `epoch`, `total_samples`. Where in the epoch a run is, the loader knows."""
        return {"epoch": self._epoch, "total_samples": len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `epoch`; the number of samples follows from the data."""
        self._epoch = int(state.get("epoch", 0))


class MemoryMappedDataset(TokenWindows):
    """Token files in a folder, cut into samples of `seq_len` tokens.

    Sample i of a file is its tokens [i * seq_len, (i + 1) * seq_len), which gives seq_len - 1
    inputs and as many labels; what is left at the end of a file is not used. With `pack_sequences`,
    documents end at `eos_token_id`: labels across the boundary are -100, and `doc_ids` counts
    documents from 0 in each sample. Batches (`take`, loaders) have `position_ids`, `cu_seqlens` and
    `max_seqlen` too.

    A folder that is a store itself is read as one. Else `file_pattern` alone decides, whatever
    stores lie below; where nothing matches, they are read.

    A `.npy` file states its dtype; a raw `.bin` file does not, so `dtype` (or a `meta.json` beside
    the file, or else `default_dtype`) has to.
    """

    def __init__(
        self,
        data_dir: str | Path,
        seq_len: int,
        file_pattern: str = "*.npy",
        pack_sequences: bool = False,
        eos_token_id: int | None = None,
        *,
        dtype: str | None = None,
        default_dtype: str | None = None,
    ) -> None:
        if pack_sequences and eos_token_id is None:
            raise ConfigError(
                "eos_token_id is required when pack_sequences=True: documents end at that token"
            )
        store = MmapStore(dtype=dtype, default_dtype=default_dtype, file_pattern=file_pattern)
        try:
            store.load(data_dir)
        except MissingData:
            raise MissingData(
                f"No files match {file_pattern!r} in {data_dir}: write .npy or .bin files there, "
                "or correct the folder or file_pattern"
            ) from None
        self.seq_len = operator.index(seq_len)
        super().__init__(store, self.seq_len, self.seq_len, pack_sequences, eos_token_id)
        self._files = store.bounds(TOKENS)
        samples = np.diff(self._files) // self.seq_len
        self._first = np.concatenate([[0], np.cumsum(samples)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def _starts(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if len(self._first) == 2:
            return indices * self.width
        file = np.searchsorted(self._first, indices, "right") - 1
        starts: npt.NDArray[np.int64] = self._files[file]
        starts += (indices - self._first[file]) * self.width
        return starts


class WindowDataset(TokenWindows):
    """Any store, cut into samples of `seq_len` inputs and as many labels.

    Where the store has a `loss_mask`, labels that are not trained are -100. With `pack_sequences`
    documents are kept apart, by the store's own record boundaries or, where it has none, by
    `eos_token_id`.
    """

    def __init__(
        self,
        store: Store,
        seq_len: int,
        pack_sequences: bool = False,
        eos_token_id: int | None = None,
    ) -> None:
        by_records = pack_sequences and store.documents > 0
        if pack_sequences and not by_records and eos_token_id is None:
            raise ConfigError(
                f"{store.path} has no record boundaries, so eos_token_id is required "
                "when pack_sequences=True"
            )
        if by_records:
            store.record_lengths(TOKENS, 0, 0)  # says so now if only other keys have records
        self.seq_len = operator.index(seq_len)
        eos = None if by_records else eos_token_id
        super().__init__(store, self.seq_len + 1, self.seq_len, pack_sequences, eos)
        self._samples = max(store.total(TOKENS) - 1, 0) // self.seq_len

    def __len__(self) -> int:
        return self._samples

    def _starts(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return indices * self.seq_len
