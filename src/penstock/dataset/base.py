"""What every Penstock dataset is: `take(indices)` gives a batch, and one item is `take([i])`.

A loader asks for more than it hands out at once: `gather(indices)` fetches the samples of several
batches together, narrow as they are stored, and `batch(lo, hi)` of the result makes one batch of
them, in tensors of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, default_collate

from penstock.batch import Place, Sample, to_place
from penstock.dataset.excluded import Excluded
from penstock.errors import OutOfBounds

Indices = Sequence[int] | npt.NDArray[Any]


class Gathered(Protocol):
    """Samples fetched together, to be handed out in batches."""

    def batch(self, lo: int, hi: int, place: Place | None) -> Sample:
        """Samples lo to hi as one batch, here or at `place`."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """Nothing fetched yet: for datasets that gain nothing from fetching batches together."""

    dataset: SampleDataset
    indices: npt.NDArray[np.int64]

    def batch(self, lo: int, hi: int, place: Place | None) -> Sample:
        """Samples lo to hi as one batch."""
        batch: Sample = self.dataset.take(self.indices[lo:hi])
        if place is not None:
            batch = to_place(batch, place)
        return batch


class SampleDataset(Dataset[Sample]):
    """A map-style dataset whose primitive is `take`.

    `sample_bytes` is what a gathered sample takes; 0 where nothing is won by gathering several
    batches together. `group_bytes` is how much to gather at once: what stays in the cache beside
    the batches made of it, and more where each call costs more. Where it is `balanced`, loaders
    deal each global batch so that all ranks get about the same `costs`. Those that
    know documents have a method `excluding(ranges)`: a view of the dataset in which the labels of
    these documents are masked, as its `excluded` says.
    """

    sample_bytes = 0
    group_bytes = 320 << 10
    balanced = False
    excluded: Excluded | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def take(self, indices: Indices) -> Sample:
        """The samples at `indices` as one batch of fresh tensors."""
        return self.collate(self.__getitems__(self.checked(indices).tolist()))

    def gather(self, indices: npt.NDArray[np.int64]) -> Gathered:
        """The samples at `indices`, fetched together."""
        return Deferred(self, indices)

    def advise(self, indices: npt.NDArray[np.int64]) -> None:
        """Ask the system to read the samples at `indices` ahead of their use."""

    def layout(self) -> str:
        """What a sample looks like, in words; in a mixture, whoever says so says the same."""
        return ""

    def expect_random(self) -> None:
        """Be told that samples will be read in no order."""

    def costs(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What each sample costs a trainer; asked of `balanced` datasets only."""
        raise AssertionError(f"a balanced dataset knows what samples {indices} cost")

    def identity(self) -> dict[str, Any]:
        """What decides the content of each sample, for checkpoints: small and JSON-able."""
        return {"data": type(self).__name__, "samples": len(self)}

    def collate(self, samples: list[Sample]) -> Sample:
        """Samples one by one into a batch."""
        batch: Sample = default_collate(samples)
        return batch

    def __getitem__(self, index: int) -> Sample:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """The items at `indices`: torch's own loader fetches a whole batch through this."""
        return [self[i] for i in indices]

    def checked(self, indices: Indices) -> npt.NDArray[np.int64]:
        """`indices` as an array within [0, len)."""
        array = np.asarray(indices)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise OutOfBounds(
                "Samples are taken by one whole number each, counted from 0, not by "
                f"{array.dtype} of shape {array.shape}"
            )
        length = len(self)
        if array.size and (int(array.min()) < 0 or int(array.max()) >= length):
            bad = array[(array < 0) | (array >= length)][0]
            raise OutOfBounds(f"Index {bad} out of range [0, {length})")
        return array.astype(np.int64, copy=False)
