"""The datasets of AstrAI: one for each way of training, over any store.

    dataset = DatasetFactory.load("sft", "tokens/", window_size=2048)
    dataset[0].keys()           # input_ids, target_ids, loss_mask, position_ids

Here are what they share and the two that read windows of the token stream, `seq` and `sft`; `dpo`
and `grpo`, which read records, are in `records`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from penstock.batch import Place, Sample, Windows, cut_up
from penstock.dataset.base import Gathered, Indices, SampleDataset
from penstock.dataset.excluded import Ranges, tokens_of
from penstock.errors import ConfigError, DataError, OutOfBounds
from penstock.pack import Documents
from penstock.store import Store, StoreFactory, detect_format

Kind = TypeVar("Kind", bound="type[BaseDataset]")


class BaseDataset(SampleDataset):
    """Windows of `window_size` tokens, `stride` apart (default: one after the other).

    Window i covers [begin, begin + window_size) with begin = i * stride, moved back at the end so
    that its last target is a token: there are (tokens - 1 - window_size) // stride + 1 of them, or
    none where tokens <= window_size.
    """

    required_keys: ClassVar[tuple[str, ...]] = ()
    least_window: ClassVar[int] = 1

    def __init__(self, window_size: int, stride: int | None = None) -> None:
        self.window_size = operator.index(window_size)
        self.stride = self.window_size if stride is None else operator.index(stride)
        if self.window_size < self.least_window or self.stride < min(1, self.window_size):
            raise ConfigError(
                f"window_size must be >= {self.least_window} and stride >= 1, not {window_size} "
                f"and {self.stride}"
            )
        self._store: Store | None = None

    def load(self, load_path: str | Path, storage_type: str | None = None) -> None:
        """Open the store at `load_path`; its format is detected unless `storage_type` names it."""
        store = StoreFactory.create(storage_type or detect_format(load_path))
        store.load(load_path)
        self._check(store)
        self._store = store

    def _check(self, store: Store) -> None:
        missing = [key for key in self.required_keys if key not in store.keys]
        if missing:
            raise DataError(
                f"{type(self).__name__} needs the keys {list(self.required_keys)}; "
                f"{store.path} has {store.keys} and lacks {missing}"
            )
        floats = [key for key in self.required_keys if store.dtype(key).kind == "f"]
        if floats not in ([], ["rewards"]):
            raise DataError(f"{store.path} holds fractions in {floats}, where tokens were expected")

    @property
    def store(self) -> Store | None:
        """The store, once loaded."""
        return self._store

    storage = store

    @property
    def loaded(self) -> Store:
        """The store; an error before `load`, and once it is closed."""
        if self._store is None or not self._store.keys:
            raise RuntimeError("Dataset not loaded (or its store is closed): call load(path) first")
        return self._store

    @property
    def count(self) -> int:
        """Tokens in the store; 0 before `load`."""
        return 0 if self._store is None else len(self._store)

    @property
    def keys(self) -> list[str]:
        """Keys in the store; none before `load`."""
        return [] if self._store is None else self._store.keys

    def __len__(self) -> int:
        if self.count <= self.window_size:
            return 0
        return (self.count - 1 - self.window_size) // self.stride + 1

    def get_index(self, index: int) -> tuple[int, int]:
        """The span [begin, end) of a window; past the last one, that of the last full window."""
        tokens = len(self.loaded)
        if tokens <= self.window_size:
            raise DataError(f"Data too short: {tokens} tokens <= window_size {self.window_size}")
        if index < 0:
            raise OutOfBounds(f"Index {index} out of range [0, {len(self)})")
        begin = min(operator.index(index) * self.stride, tokens - 1 - self.window_size)
        return begin, begin + self.window_size

    def checked(self, indices: Indices) -> npt.NDArray[np.int64]:
        """`indices` as an array within [0, len) of what is loaded."""
        _ = self.loaded
        return super().checked(indices)

    def identity(self) -> dict[str, Any]:
        """The store's fingerprint, and how samples are cut from it."""
        return {
            "data": self.loaded.fingerprint,
            "kind": type(self).__name__,
            "samples": len(self),
            "window": self.window_size,
            "stride": self.stride,
        }


class DatasetFactory:
    """Datasets by name: `DatasetFactory.load("seq", path, window_size=2048)`.

    Outsiders add theirs with a decorator: `@DatasetFactory.register("mine")`.
    """

    _kinds: ClassVar[dict[str, type[BaseDataset]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[Kind], Kind]:
        """A decorator that adds a dataset class under a name."""

        def add(kind: Kind) -> Kind:
            cls._kinds[name] = kind
            return kind

        return add

    @classmethod
    def create(cls, train_type: str, window_size: int, stride: int | None = None) -> BaseDataset:
        """A dataset that has loaded nothing yet."""
        if train_type not in cls._kinds:
            raise ConfigError(
                f"Unknown component {train_type!r}: the datasets are {sorted(cls._kinds)}"
            )
        return cls._kinds[train_type](window_size, stride)

    @classmethod
    def load(
        cls,
        train_type: str,
        load_path: str | Path,
        window_size: int,
        stride: int | None = None,
        storage_type: str | None = None,
    ) -> BaseDataset:
        """Create a dataset and open its store."""
        dataset = cls.create(train_type, window_size, stride)
        dataset.load(load_path, storage_type)
        return dataset


@DatasetFactory.register("seq")
class SEQDataset(BaseDataset):
    """Next-token prediction: `input_ids`, and `target_ids` one token on."""

    required_keys = ("sequence",)
    _wanted: ClassVar[tuple[str, ...]] = ("sequence",)

    def excluding(self, documents: Ranges) -> Self:
        """A view in which the targets of these documents are -100, their `loss_mask` False."""
        view = copy(self)
        view.excluded = tokens_of(self.loaded, "sequence", documents)
        return view

    def _check(self, store: Store) -> None:
        super()._check(store)
        self.sample_bytes = (self.window_size + 1) * store.dtype("sequence").itemsize

    def layout(self) -> str:
        """What a sample looks like, in words."""
        return f"{self.window_size} inputs and targets of {type(self).__name__}"

    def gather(self, indices: npt.NDArray[np.int64]) -> Gathered:
        """The windows' tokens, narrow."""
        return self._windows(self._begins(indices))

    def take(self, indices: Indices) -> Sample:
        """The windows at `indices` as one batch."""
        array = self.checked(indices)
        return self.gather(array).batch(0, len(array), None)

    def advise(self, indices: npt.NDArray[np.int64]) -> None:
        """Have the windows' pages read ahead."""
        begins = self._begins(indices)
        for key in self._read:
            self.loaded.advise(begins, self.window_size + 1, key)

    def expect_random(self) -> None:
        """Have pages read by themselves from now on."""
        self.loaded.expect_random(*self._read)

    @property
    def _read(self) -> list[str]:
        """The keys that a window needs, of those the store has."""
        return [key for key in self._wanted if key in self.keys]

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        """The items at `indices`, cut from one batch."""
        return cut_up(self.take(indices), len(indices))

    def _begins(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.minimum(indices * self.stride, self.count - 1 - self.window_size)

    def _windows(self, begins: npt.NDArray[np.int64]) -> Windows:
        tokens = self.loaded.gather(begins, self.window_size + 1, "sequence")
        mask = None
        if self.excluded is not None:
            mask = self.excluded.spans.masked(begins, self.window_size + 1, None)
        return Windows(tokens, mask, target="target_ids")


@DatasetFactory.register("sft")
class SFTDataset(SEQDataset):
    """The same with the `loss_mask` of the targets and the `position_ids` of the inputs.

    Without a stored `loss_mask` everything is trained; without stored `position_ids` they count
    from each record's start (from the window's, where the store has no records).
    """

    _wanted = ("sequence", "loss_mask", "position_ids")

    def _check(self, store: Store) -> None:
        super()._check(store)
        if store.documents and "position_ids" not in store.keys:
            store.record_lengths("sequence", 0, 0)  # says so now if only other keys have records
        self.sample_bytes += 5 * self.window_size  # a bool and an int32 each

    def gather(self, indices: npt.NDArray[np.int64]) -> Gathered:
        """The windows' tokens, narrow, with their masks and positions."""
        store, begins, size = self.loaded, self._begins(indices), self.window_size
        windows = self._windows(begins)
        masked, placed = "loss_mask" in self.keys, "position_ids" in self.keys
        mask = store.gather(begins + 1, size, "loss_mask") if masked else None
        if windows.mask is not None:
            there = windows.mask[:, 1:]
            mask = there if mask is None else mask.astype(np.bool_) & there
        return _Supervised(
            windows,
            mask,
            store.gather(begins, size, "position_ids") if placed else self._positions(begins),
        )

    def _positions(self, begins: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Places in the record: in the first of each window, counted from before the window."""
        store, rows, width = self.loaded, len(begins), self.window_size + 1
        if not store.documents:
            return np.broadcast_to(np.arange(width - 1, dtype=np.int32), (rows, width - 1))
        cuts = store.cuts(begins, width, "sequence")
        found = Documents.of(cuts, rows, width).batch(0, rows)
        firsts, _ = store.document_spans(store.document_of(begins, "sequence"), "sequence")
        before = (begins - firsts).astype(np.int32).reshape(-1, 1)
        positions = found.position_ids
        return np.add(positions, before, out=positions, where=found.doc_ids == 0)


@dataclass(frozen=True, slots=True)
class _Supervised:
    """Windows, the masks of their targets and the positions of their inputs."""

    windows: Windows
    mask: npt.NDArray[Any] | None  # (n, T); None: everything is trained
    positions: npt.NDArray[Any]  # (n, T)

    def batch(self, lo: int, hi: int, place: Place | None) -> Sample:
        """Rows lo to hi as one batch."""
        batch = self.windows.batch(lo, hi, place)
        positions = self.positions[lo:hi].astype(np.int64)
        mask = np.ones_like(positions, np.bool_)
        if self.mask is not None:
            mask = self.mask[lo:hi].astype(np.bool_)
        for key, array in (("loss_mask", mask), ("position_ids", positions)):
            tensor = torch.from_numpy(array)
            batch[key] = tensor if place is None else place.send(tensor)
        return batch
