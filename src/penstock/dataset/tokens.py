"""What datasets over a store's token stream share: keys, checks, and items cut from batches."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from penstock.batch import Sample, Windows, cut_up
from penstock.dataset.base import Indices, SampleDataset
from penstock.errors import ConfigError, DataError
from penstock.store import Store

TOKENS, MASK = "sequence", "loss_mask"


class TokenDataset(SampleDataset):
    """Samples of `width` tokens, an input and a label fewer each; `gather` says which tokens."""

    _documented: ClassVar[tuple[str, ...]] = ("input_ids", "labels", "doc_ids")  # of an item

    def __init__(self, store: Store, width: int, eos_token_id: int | None) -> None:
        if width < 2:
            raise ConfigError("a sample needs at least two tokens, an input and its label")
        check_tokens(store, eos_token_id)
        self.store, self.width = store, width
        self._keys = [key for key in (TOKENS, MASK) if key in store.keys]
        self._masked = MASK in self._keys
        self.sample_bytes = width * (store.dtype(TOKENS).itemsize + self._masked)

    @property
    def tokens_a_sample(self) -> float:
        """Labels in a sample, on average."""
        return self.width - 1

    def gather(self, indices: npt.NDArray[np.int64]) -> Windows:
        """The samples' tokens and masks, narrow, and where documents begin in them."""
        raise NotImplementedError

    def take(self, indices: Indices) -> Sample:
        """The samples at `indices` as one batch."""
        array = self.checked(indices)
        return self.gather(array).batch(0, len(array))

    def expect_random(self) -> None:
        """Have pages read by themselves from now on."""
        self.store.expect_random(*self._keys)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """The items at `indices`, cut from one batch."""
        batch = self.take(indices)
        return cut_up({key: batch[key] for key in self._documented if key in batch}, len(indices))

    def close(self) -> None:
        """Let go of the files; calling it again does nothing."""
        self.store.close()


def check_tokens(store: Store, eos_token_id: int | None) -> None:
    """Refuse a store without tokens to train on, and an EOS that they cannot hold."""
    if TOKENS not in store.keys:
        raise DataError(
            f"{store.path} has no {TOKENS!r}, only {store.keys}: "
            "preference pairs and groups are read by DatasetFactory.load('dpo' | 'grpo', ...)"
        )
    dtype: np.dtype[Any] = store.dtype(TOKENS)
    if dtype.kind not in "iu":
        raise DataError(f"{store.path} holds {dtype} values where integer tokens were expected")
    if eos_token_id is not None and not 0 <= eos_token_id <= np.iinfo(dtype).max:
        raise ConfigError(
            f"eos_token_id {eos_token_id} cannot be found among {dtype} tokens, "
            f"which end at {np.iinfo(dtype).max}"
        )
    if MASK in store.keys and store.total(MASK) != store.total(TOKENS):
        raise DataError(
            f"{store.path} has {store.total(TOKENS):,} tokens but a {MASK} of "
            f"{store.total(MASK):,}: nothing says which belongs to which; prepare it again"
        )
