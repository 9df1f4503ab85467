"""The first batch and a resume at 10^9 samples cost what they cost at a hundred: it is counted."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.loader.support import IN_PROCESS, Squares, write_npy

from penstock import (
    DistributedSampler,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    StatefulDataLoader,
)
from penstock.dataset.base import SampleDataset
from penstock.order import permutation

BILLION = 10**9
MIB = 1 << 20


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> MemoryMappedDataset:
    """10^9 samples of two tokens in a file without a written block: 4 GB that take no disk."""
    folder = tmp_path_factory.mktemp("huge")
    with (folder / "zeros.bin").open("wb") as file:
        file.truncate(BILLION * 4)
    return MemoryMappedDataset(folder, 2, "*.bin", dtype="uint16")


def make(dataset: SampleDataset) -> StatefulDataLoader:
    sampler: Any = DistributedSampler(dataset, 1, 0, seed=1)
    if isinstance(dataset, MixtureDataset):
        sampler = MixtureSampler(dataset.cumulative_sizes, [3, 1], 1, 0, seed=1)
    return StatefulDataLoader(dataset, 16, sampler, IN_PROCESS)


@pytest.mark.parametrize("mixed", [False, True])
def test_first_batch_and_resume_at_a_billion_samples_take_little_memory_and_few_positions(
    huge: MemoryMappedDataset, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = MixtureDataset([huge, huge], ["a", "b"]) if mixed else huge
    assert len(dataset) == (2 * BILLION if mixed else BILLION)
    permuted = []
    real = permutation._once
    monkeypatch.setattr(
        permutation, "_once", lambda index, *rest: permuted.append(len(index)) or real(index, *rest)
    )
    next(iter(make(dataset)))  # what is imported or cached once is not the start's cost
    state = make(dataset).state_dict()
    state |= {"position": 16 * 50_000_000, "segments": [[0, 16, 1]]}
    permuted.clear()
    gc.collect()
    tracemalloc.start()
    next(iter(make(dataset)))
    loader = make(dataset)
    loader.load_state_dict(state)
    next(iter(loader))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert loader.position == state["position"] + 16
    assert peak < 10 * MIB
    assert sum(permuted) <= 4 * 4096  # a block of the order for each start, or two


def rss() -> int:
    gc.collect()
    return psutil.Process(os.getpid()).memory_info().rss


def soak(dataset: Any, batches: int) -> int:
    """How much larger the process is after that many batches than it was after a tenth of them."""
    sampler = DistributedSampler(dataset, 1, 0, seed=1)
    loader, done, before = StatefulDataLoader(dataset, 4, sampler, IN_PROCESS), 0, 0
    while done < batches:
        for _ in loader:
            done += 1
            if done == batches // 10:
                before = rss()
    return rss() - before


def test_memory_stays_flat_over_ten_thousand_batches(tmp_path: Path) -> None:
    data = MemoryMappedDataset(write_npy(tmp_path, [9000]), 9, pack_sequences=True, eos_token_id=3)
    assert soak(data, 10_000) < 8 * MIB


@pytest.mark.long
@pytest.mark.parametrize("kind", ["packed", "items"])
def test_memory_stays_flat_over_a_hundred_thousand_batches(tmp_path: Path, kind: str) -> None:
    data: Any = Squares(1000)
    if kind == "packed":
        files = write_npy(tmp_path, [90_000])
        data = MemoryMappedDataset(files, 9, pack_sequences=True, eos_token_id=3)
    assert soak(data, 10**5) < 8 * MIB


def test_the_huge_file_reads_as_it_should(huge: MemoryMappedDataset) -> None:
    assert huge.take(np.array([0, BILLION - 1]))["labels"].tolist() == [[0], [0]]
