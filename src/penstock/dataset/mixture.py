"""Several datasets laid end to end, each sample told which one it is from."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from penstock.batch import Place, Sample, Windows, merge, to_place
from penstock.dataset.base import Deferred, Gathered, Indices, SampleDataset
from penstock.errors import ConfigError


class MixtureDataset(SampleDataset):
    """Datasets end to end; a sample is its dataset's own, in a new dict with `dataset_idx`.

    Index i lies in the dataset k with cumulative_sizes[k] <= i < cumulative_sizes[k + 1].
    """

    def __init__(self, datasets: Sequence[Any], names: Sequence[str]) -> None:
        if not datasets:
            raise ConfigError("At least one dataset is needed for a mixture")
        if isinstance(names, str):
            raise ConfigError(f"names are a list, one a dataset, not the string {names!r}")
        if len(datasets) != len(names):
            raise ConfigError(
                f"datasets and names must have the same length, "
                f"not {len(datasets)} and {len(names)}"
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"the datasets of a mixture need different names, not {list(names)}")
        _check_layouts(datasets, names)
        self.datasets = list(datasets)
        self.dataset_names = list(names)
        self.cumulative_sizes = [0, *accumulate(len(dataset) for dataset in datasets)]
        self._ends = np.asarray(self.cumulative_sizes[1:])
        sizes = [d.sample_bytes if isinstance(d, SampleDataset) else 0 for d in datasets]
        self.sample_bytes = max(sizes) if all(sizes) else 0
        self.group_bytes = 1 << 20  # a call a source
        self.balanced = _balanced(datasets, names)

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    @property
    def takes(self) -> bool:
        """Whether every dataset in it takes batches, rather than items one by one."""
        return all(takes_batches(dataset) for dataset in self.datasets)

    def take(self, indices: Indices) -> Sample:
        """The samples at `indices` as one batch."""
        array = self.checked(indices)
        return self.gather(array).batch(0, len(array), None)

    def gather(self, indices: npt.NDArray[np.int64]) -> Gathered:
        """The samples at `indices`, fetched source by source."""
        if not all(isinstance(dataset, SampleDataset) for dataset in self.datasets):
            return _OneByOne(self, indices)
        parts, places = [], []
        for k, place, local in self._by_source(indices) or [(0, indices, indices)]:
            part = self.datasets[k].gather(local)
            if not isinstance(part, Windows):
                return _OneByOne(self, indices)
            parts.append(part)
            places.append(place)
        rows = merge(parts, places)
        rows.source = self._source(indices)
        return rows

    def advise(self, indices: npt.NDArray[np.int64]) -> None:
        """Have the samples read ahead, by the datasets that can."""
        for k, _, local in self._by_source(indices):
            if isinstance(self.datasets[k], SampleDataset):
                self.datasets[k].advise(local)

    def layout(self) -> str:
        """What a sample looks like, in words."""
        layouts = (d.layout() for d in self.datasets if isinstance(d, SampleDataset))
        return next(filter(None, layouts), "")

    def expect_random(self) -> None:
        """Tell the datasets that can act on it."""
        for dataset in self.datasets:
            if isinstance(dataset, SampleDataset):
                dataset.expect_random()

    def costs(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What each sample costs its trainer."""
        found = np.zeros(len(indices), np.int64)
        for k, place, local in self._by_source(indices):
            found[place] = self.datasets[k].costs(local)
        return found

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """The items at `indices`, fetched source by source."""
        array = self.checked(indices)
        items: list[Sample] = [{}] * len(array)
        for k, place, local in self._by_source(array):
            for at, item in zip(place.tolist(), _items(self.datasets[k], local), strict=True):
                items[at] = {**item, "dataset_idx": k}
        return items

    def collate(self, samples: list[Sample]) -> Sample:
        """Samples into a batch, the way their datasets do."""
        bare = [{k: v for k, v in each.items() if k != "dataset_idx"} for each in samples]
        source = torch.tensor([sample["dataset_idx"] for sample in samples], dtype=torch.int64)
        return {**_collate(self.datasets[0], bare), "dataset_idx": source}

    def identity(self) -> dict[str, Any]:
        """Each dataset's own, by name."""
        parts = zip(self.dataset_names, self.datasets, strict=True)
        return {"sources": {name: identity_of(dataset) for name, dataset in parts}}

    def state_dict(self) -> dict[str, Any]:
        """Each dataset's own, under `dataset_<k>`."""
        return {
            f"dataset_{k}": dataset.state_dict()
            for k, dataset in enumerate(self.datasets)
            if _stateful(dataset)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore each dataset that the state knows."""
        for k, dataset in enumerate(self.datasets):
            if f"dataset_{k}" in state and _stateful(dataset):
                dataset.load_state_dict(state[f"dataset_{k}"])

    def _source(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.searchsorted(self._ends, indices, "right")

    def _by_source(
        self, indices: npt.NDArray[np.int64]
    ) -> list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """(dataset, places among `indices`, indices within the dataset) of each one that is met."""
        source = self._source(indices)
        order = np.argsort(source, kind="stable")
        counts = np.bincount(source, minlength=len(self.datasets))
        ends = np.cumsum(counts)
        met = []
        for k in np.flatnonzero(counts).tolist():
            place = order[ends[k] - counts[k] : ends[k]]
            met.append((k, place, indices[place] - self.cumulative_sizes[k]))
        return met


class _OneByOne(Deferred):
    """A mixture of datasets that have nothing but items: collated as they come."""

    def batch(self, lo: int, hi: int, place: Place | None) -> Sample:
        """Samples lo to hi as one batch."""
        items = self.dataset.__getitems__(self.indices[lo:hi].tolist())
        batch = self.dataset.collate(items)
        if place is not None:
            batch = to_place(batch, place)
        return batch


def takes_batches(dataset: Any) -> bool:
    """Whether `dataset.take(indices)` gives a batch at once; elsewhere `take(n)` is the first n."""
    if isinstance(dataset, MixtureDataset):
        return dataset.takes
    return isinstance(dataset, SampleDataset)


def _items(dataset: Any, indices: npt.NDArray[np.int64]) -> list[Sample]:
    if isinstance(dataset, SampleDataset):
        return dataset.__getitems__(indices.tolist())
    return [dataset[i] for i in indices.tolist()]


def _collate(dataset: Any, samples: list[Sample]) -> Sample:
    while isinstance(dataset, MixtureDataset):
        dataset = dataset.datasets[0]
    if isinstance(dataset, SampleDataset):
        return dataset.collate(samples)
    batch: Sample = default_collate(samples)
    return batch


def _balanced(datasets: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether ranks are to share costs evenly: what some of the datasets want, all have to."""
    wanted = [isinstance(d, SampleDataset) and d.balanced for d in datasets]
    if any(wanted) and not all(wanted):
        raise ConfigError(
            f"a mixture is balanced in all its datasets or in none: {names[wanted.index(True)]!r} "
            f"is, {names[wanted.index(False)]!r} is not"
        )
    return all(wanted)


def _check_layouts(datasets: Sequence[Any], names: Sequence[str]) -> None:
    """Samples of one batch have one shape: better said now than at the step where two meet."""
    first: tuple[str, str] | None = None
    for name, dataset in zip(names, datasets, strict=True):
        layout = dataset.layout() if isinstance(dataset, SampleDataset) else ""
        if layout and first is not None and layout != first[1]:
            raise ConfigError(
                "the datasets of a mixture need samples that look the same, in length and in "
                f"pack_sequences: {first[0]!r} has {first[1]}, {name!r} has {layout}"
            )
        first = first or ((name, layout) if layout else None)


def identity_of(dataset: Any, fingerprint: str | None = None) -> dict[str, Any]:
    """A dataset's identity; one that has none is known by type, length and what the user says."""
    own: Callable[[], dict[str, Any]] | None = getattr(dataset, "identity", None)
    if own is not None and fingerprint is None:
        return own()
    size = len(dataset) if isinstance(dataset, Sized) else None
    return {"data": fingerprint, "type": type(dataset).__name__, "samples": size}


def _stateful(dataset: Any) -> bool:
    return callable(getattr(dataset, "state_dict", None)) and callable(
        getattr(dataset, "load_state_dict", None)
    )
