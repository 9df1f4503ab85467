"""Batches of datasets that give single items, here or in torch's worker processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from penstock.batch import Place, Sample, to_place
from penstock.dataset.base import SampleDataset
from penstock.dataset.mixture import takes_batches
from penstock.loader.ahead import Job

Collate = Callable[[list[Any]], Any]


class Fetch(Dataset[Sample]):
    """A dataset whose item at a list of indices is a whole batch; errors name the sample."""

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, indices: list[int]) -> Any:
        if self.collate is None and takes_batches(self.dataset):
            try:
                return self.dataset.take(indices)
            except Exception as error:
                name_sample(error, self.dataset, indices)
                raise
        items = [self._item(index) for index in indices]
        if self.collate is not None:
            return self.collate(items)
        if isinstance(self.dataset, SampleDataset):
            return self.dataset.collate(items)
        return default_collate(items)

    def _item(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"raised by sample {index} of {type(self.dataset).__name__}")
            raise


def name_sample(error: Exception, dataset: Any, indices: Iterable[int]) -> None:
    """Note on an error which of the samples raised it: the first that does so alone."""
    for index in map(int, indices):
        try:
            dataset.take([index])
        except Exception as again:  # noqa: BLE001 - whichever it is, the first error is what matters
            if type(again) is type(error):
                error.add_note(f"raised by sample {index} of {type(dataset).__name__}")
                return


@dataclass(frozen=True, slots=True)
class Fetched:
    """Samples fetched when their batch is asked for."""

    fetch: Fetch
    indices: npt.NDArray[np.int64]

    def batch(self, lo: int, hi: int, place: Place | None) -> Any:
        """Samples lo to hi as one batch."""
        batch = self.fetch[self.indices[lo:hi].tolist()]
        return batch if place is None else to_place(batch, place)


def in_workers(
    fetch: Fetch, jobs: Iterator[Job], *, workers: int, prefetch: int, seed: int
) -> Generator[tuple[Job, Any]]:
    """Each job with its batch, made by torch's worker processes `prefetch` ahead.

    The processes end when this iterator does. Their seeds follow from `seed`; the trainer's own
    random state is not touched.
    """
    sent: deque[Job] = deque()

    def indices() -> Iterator[list[int]]:
        for job in jobs:
            sent.append(job)
            yield job.indices.tolist()

    loader: DataLoader[Any] = DataLoader(
        fetch,
        batch_size=None,
        sampler=_Once(indices()),
        num_workers=workers,
        prefetch_factor=prefetch,
        collate_fn=_as_it_is,
        generator=torch.Generator().manual_seed(seed),
    )
    try:
        for batch in loader:
            yield sent.popleft(), batch
    except (ConnectionError, EOFError) as error:
        # A worker that dies while it hands over a batch is first noticed by its connection; the
        # signal with which torch says who died, and of what, comes a moment later.
        if "DataLoader worker" not in str(error):
            time.sleep(1)
        raise error.with_traceback(None) from error.__cause__
    except BaseException as error:  # noqa: BLE001 - raised again, without
        # torch's frames: a traceback through them keeps its iterator, and so the processes, alive
        raise error.with_traceback(None) from error.__cause__


class _Once:
    """An iterator where torch asks for something to iterate."""

    def __init__(self, iterator: Iterator[list[int]]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[list[int]]:
        return self._iterator


def _as_it_is(batch: Any) -> Any:
    return batch
