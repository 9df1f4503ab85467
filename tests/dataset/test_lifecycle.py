"""Opening and closing: nothing is held after a close or a failed open, and errors say so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.dataset.stores import npy

from penstock.dataset import MemoryMappedDataset, WindowDataset
from penstock.errors import ConfigError, DataError
from penstock.store import open_store


def held(folder: Path) -> list[str]:
    """Mappings and descriptors that this process has of files below a folder."""
    maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line
    ]
    fds = []
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - links that may be gone at once
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        except OSError:
            continue
        if str(folder) in target:
            fds.append(target)
    return maps + fds


def test_close_lets_go_of_every_file_and_may_be_called_again(tmp_path: Path) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, np.arange(12), np.arange(12)), 4)
    batch = dataset.take([0, 5])
    assert held(tmp_path)
    dataset.close()
    dataset.close()
    assert not held(tmp_path)
    assert batch["input_ids"].tolist() == [[0, 1, 2], [8, 9, 10]]


def test_use_after_close_says_that_it_is_closed(tmp_path: Path) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, np.arange(12)), 4)
    sliding = WindowDataset(open_store(tmp_path), 4)
    for each in (dataset, sliding):
        _ = each[0]
        each.close()
        with pytest.raises(RuntimeError, match="closed"):
            _ = each[0]
        with pytest.raises(RuntimeError, match="closed"):
            each.take([0])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(b"not an array"),
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: np.save(file, np.zeros((2, 2), np.uint16)),
        lambda file: file.write_bytes(b""),
    ],
    ids=["other bytes", "cut short", "two dimensions", "no bytes"],
)
def test_a_failed_open_leaves_no_mapping_and_no_descriptor(tmp_path: Path, spoil: Any) -> None:
    folder = npy(tmp_path, *[np.arange(1000)] * 5)
    spoil(folder / "003.npy")
    with pytest.raises(DataError, match=r"003\.npy") as caught:
        MemoryMappedDataset(folder, 8)
    assert not held(tmp_path)
    del caught


def test_a_refused_setting_leaves_no_mapping_and_no_descriptor(tmp_path: Path) -> None:
    folder = npy(tmp_path, np.arange(1000))
    with pytest.raises(ConfigError) as caught:
        MemoryMappedDataset(folder, 8, pack_sequences=True, eos_token_id=70_000)
    assert not held(tmp_path)
    del caught


def test_a_file_that_shrinks_after_opening_is_an_error_and_no_crash(tmp_path: Path) -> None:
    folder = npy(tmp_path, np.arange(1000), np.arange(1000))
    dataset = MemoryMappedDataset(folder, 8)
    (folder / "001.npy").write_bytes((folder / "001.npy").read_bytes()[:200])
    assert dataset[0]["input_ids"].tolist() == list(range(7))
    with pytest.raises(DataError, match=r"001\.npy"):
        _ = dataset[len(dataset) - 1]
