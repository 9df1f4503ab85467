"""Datasets of every kind, loaders for every rank, and what each batch must be, item by item."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.loader.reference import Batch, Run, Schedule, position_of
from torch.utils.data import default_collate

from penstock import (
    DataConfig,
    DatasetFactory,
    DistributedSampler,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    PackedDataset,
    Stage,
    StatefulDataLoader,
    WindowDataset,
    open_store,
)
from penstock.dataset.base import SampleDataset
from penstock.order import quantise
from penstock.store import Key, ShardWriter

EOS = 3
IN_PROCESS = DataConfig(num_workers=0)


# ------------------------------------------------------------------------------------------- data


def write_npy(folder: Path, files: Sequence[int], *, seed: int = 0, dtype: str = "uint16") -> Path:
    """Token files of those lengths; one token in ten or so is EOS."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i, length in enumerate(files):
        tokens = rng.integers(10, 60_000, length).astype(dtype)
        tokens[rng.random(length) < 0.1] = EOS
        np.save(folder / f"part_{i:03d}.npy", tokens)
    return folder


def write_store(folder: Path, documents: int, *, masked: bool = True, seed: int = 0) -> Path:
    """A committed store of documents of 1 to 20 tokens, in several shards."""
    rng = np.random.default_rng(seed)
    keys = {"sequence": "uint16"} | ({"loss_mask": "bool"} if masked else {})
    with ShardWriter(folder, keys, max_tokens_per_shard=150, metadata={"eos_token_id": EOS}) as out:
        for _ in range(documents):
            length = int(rng.integers(1, 21))
            record: dict[str, Any] = {"sequence": rng.integers(10, 60_000, length)}
            record["sequence"][-1] = EOS
            if masked:
                record["loss_mask"] = rng.random(length) < 0.7
            out.append(record)
    return folder


def write_pairs(folder: Path, pairs: int) -> Path:
    """Preference pairs of different lengths."""
    rng = np.random.default_rng(1)
    names = ("chosen", "chosen_mask", "rejected", "rejected_mask")
    with ShardWriter(folder, {n: "bool" if "mask" in n else "uint16" for n in names}) as out:
        for _ in range(pairs):
            a, b = (int(x) for x in rng.integers(1, 12, 2))
            out.append(
                {
                    "chosen": rng.integers(1, 999, a),
                    "chosen_mask": rng.random(a) < 0.5,
                    "rejected": rng.integers(1, 999, b),
                    "rejected_mask": rng.random(b) < 0.5,
                }
            )
    return folder


def write_groups(folder: Path, prompts: int) -> Path:
    """Prompts with one to four responses and a reward each."""
    rng = np.random.default_rng(2)
    keys = {
        "prompts": "uint16",
        "responses": Key(dtype="uint16", nested=True),
        "masks": Key(dtype="bool", nested=True),
        "rewards": "float32",
    }
    with ShardWriter(folder, keys) as out:
        for _ in range(prompts):
            lengths = rng.integers(1, 9, rng.integers(1, 5)).tolist()
            out.append(
                {
                    "prompts": rng.integers(1, 999, rng.integers(1, 9)),
                    "responses": [rng.integers(1, 999, k) for k in lengths],
                    "masks": [rng.random(k) < 0.5 for k in lengths],
                    "rewards": rng.random(len(lengths)).astype(np.float32),
                }
            )
    return folder


class Squares(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Somebody's own dataset: items, a length, and nothing else."""

    def __init__(self, n: int = 60) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return {"input_ids": torch.full((4,), index), "square": torch.tensor(index**2)}


class Pairs(Squares):
    """The same, with tuples for items, as torch's own datasets have."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index]), index


class Taking(SampleDataset):
    """Somebody's own dataset of Penstock's kind: it takes batches, and says no more."""

    def __init__(self, n: int = 60) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def take(self, indices: Any) -> dict[str, torch.Tensor]:
        at = torch.as_tensor(self.checked(indices))
        return {"input_ids": at[:, None].repeat(1, 4), "square": at**2}

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: value[0] for key, value in self.take([index]).items()}


# ------------------------------------------------------------------------------------------ kinds


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A dataset, and what a batch of it is, made from one item at a time."""

    name: str
    dataset: Any
    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()
    _single: dict[int, Any] = field(default_factory=dict)

    @property
    def mixed(self) -> bool:
        return bool(self.names)

    def expected(self, samples: Sequence[int]) -> Any:
        """The batch of those samples, put together from single ones."""
        ones = [self._one(i) for i in samples]
        if not hasattr(self.dataset, "take"):
            return default_collate(ones)
        if not isinstance(ones[0], dict) or "chosen" in ones[0] or "prompts" in ones[0]:
            return self.dataset.collate(ones)
        if isinstance(self.dataset, MixtureDataset) and not self.dataset.takes:
            return self.dataset.collate(ones)
        return _stacked(ones)

    def _one(self, index: int) -> Any:
        if index not in self._single:
            by_item = not hasattr(self.dataset, "take") or self.name in ("dpo", "grpo")
            by_item = by_item or self.name == "mixture_items"
            one = self.dataset[index] if by_item else self.dataset.take([index])
            self._single[index] = one
        return self._single[index]


def _stacked(ones: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Batches of one row as one batch; documents are counted over its flat tokens."""
    batch: dict[str, Any] = {}
    for key in ones[0]:
        if key == "max_seqlen":
            batch[key] = max(one[key] for one in ones)
        elif key == "cu_seqlens":
            width = int(ones[0][key][-1])
            parts = [one[key][:-1] + row * width for row, one in enumerate(ones)]
            batch[key] = torch.cat([*parts, torch.tensor([width * len(ones)], dtype=torch.int32)])
        else:
            batch[key] = torch.cat([one[key] for one in ones])
    return batch


def packed(store: Path, seq_len: int = 8, **options: Any) -> PackedDataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a few rows of random masks have no label
        return PackedDataset(open_store(store), seq_len, **options)


def make_kinds(root: Path) -> dict[str, Kind]:
    """Every kind of dataset, 50 to 90 samples each."""
    tokens = write_npy(root / "tokens", [300, 5, 201, 120])
    wide = write_npy(root / "wide", [350], seed=1, dtype="int32")
    store = write_store(root / "store", 45)
    datasets: dict[str, Any] = {
        "windows": MemoryMappedDataset(tokens, 9),
        "packed": MemoryMappedDataset(tokens, 9, pack_sequences=True, eos_token_id=EOS),
        "store": WindowDataset(open_store(store), 8),
        "store_packed": WindowDataset(open_store(store), 8, pack_sequences=True),
        "seq": DatasetFactory.load("seq", store, 8, stride=5),
        "sft": DatasetFactory.load("sft", store, 8),
        "dpo": DatasetFactory.load("dpo", write_pairs(root / "pairs", 53), 8),
        "grpo": DatasetFactory.load("grpo", write_groups(root / "groups", 51), 6),
        "items": Squares(),
        "tuples": Pairs(),
        "taking": Taking(),
        "rows": packed(store),
        "rows_crop": packed(store, 3, strategy="best_fit_crop", buffer_size=9, refill=4),
        "rows_bos": packed(store, bos="every", bos_token_id=1),
    }
    parts = {
        "mixture": [
            datasets["windows"],
            datasets["store"],
            MemoryMappedDataset(wide, 9),
        ],
        "mixture_packed": [datasets["packed"], datasets["store_packed"]],
        "mixture_rows": [datasets["rows"], datasets["rows_bos"]],
        "mixture_items": [Squares(30), Squares(41)],
        "mixture_sft": [datasets["sft"], datasets["sft"]],
    }
    kinds = {name: Kind(name=name, dataset=d, sizes=(len(d),)) for name, d in datasets.items()}
    for name, sources in parts.items():
        names = tuple("abc"[: len(sources)])
        sizes = tuple(map(len, sources))
        mixed = MixtureDataset(sources, names)
        kinds[name] = Kind(name=name, dataset=mixed, sizes=sizes, names=names)
    return kinds


@cache
def weights_of(*weights: float) -> tuple[int, ...]:
    return quantise(weights)


# ---------------------------------------------------------------------------------------- loaders


def loaders(
    kind: Kind,
    run: Run,
    world: int,
    *,
    schedule: Schedule | None = None,
    accumulation: int | None = None,
    config: DataConfig = IN_PROCESS,
    **options: Any,
) -> list[StatefulDataLoader]:
    """The loaders of all ranks, as `build_dataloader` makes them: stages go by their own plan."""
    schedule = run.schedule if schedule is None else schedule
    accumulation = run.accumulation if accumulation is None else accumulation
    each = [(step, size // world) for step, size in schedule]
    stages: list[Stage] = []
    if run.phases:
        own = Run(sizes=run.sizes, schedule=schedule, accumulation=accumulation, tail="endless")
        stages = [Stage(position_of(own, step), weights, step) for step, weights in run.phases]
    made = []
    for rank in range(world):
        sampler: Any = DistributedSampler(kind.dataset, world, rank, run.shuffle, run.seed)
        if kind.mixed:
            sizes = kind.dataset.cumulative_sizes
            sampler = MixtureSampler(
                sizes, [], world, rank, run.shuffle, run.seed, names=run.names, stages=stages
            )
        made.append(
            StatefulDataLoader(
                kind.dataset, each, sampler, config, accumulation=accumulation, **options
            )
        )
    return made


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """A state as it comes back from a file."""
    again = json.loads(json.dumps(state))
    assert again == state
    return again


def assert_same(got: Any, expected: Any) -> None:
    """Equal in structure, dtype and every bit."""
    if isinstance(expected, dict):
        assert set(got) == set(expected)
        for key, value in expected.items():
            assert_same(got[key], value)
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert torch.equal(got, expected)
    else:
        assert got == expected


def assert_batch(kind: Kind, expected: Batch, got: Sequence[Any]) -> None:
    """One global batch: what each rank got, against the simulation's samples."""
    world = len(got)
    for rank, batch in enumerate(got):
        assert_same(batch, kind.expected(expected.samples[rank::world]))


class Endless:
    """A loader's epochs one after the other, as a training loop sees them."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] = iter(loader)

    def __next__(self) -> Any:
        batch = next(self._iterator, None)
        while batch is None:
            self._iterator = iter(self.loader)
            batch = next(self._iterator, None)
        return batch

    def again(self) -> None:
        """What `iter()` a second time does: go on."""
        self._iterator = iter(self.loader)


# ------------------------------------------------------------------------------------- leftovers


def threads_of_ours() -> list[str]:
    import threading

    return [t.name for t in threading.enumerate() if t.name.startswith("penstock")]


def children() -> list[int]:
    """Processes below this one, but for the tracker that Python starts once and keeps."""
    import psutil

    found = []
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in child.cmdline()):
                found.append(child.pid)
    return found


def shared_memory() -> set[str]:
    root = Path("/dev/shm")
    return {path.name for path in root.iterdir()} if root.exists() else set()


def no_children_after(check: Callable[[], Any], seconds: float = 5.0) -> bool:
    """Whether `check` becomes empty within a few seconds: processes take a moment to be gone."""
    import time

    end = time.monotonic() + seconds
    while check():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def bare(dataset: Any) -> bool:
    return not isinstance(dataset, SampleDataset)
