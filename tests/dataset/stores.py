"""Stores to test datasets on: in Penstock's own format, in AstrAI's, in HDF5, as .npy files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import h5py
import numpy as np
import numpy.typing as npt
import torch

from penstock.dataset import SampleDataset
from penstock.store import Key, ShardWriter

if TYPE_CHECKING:
    import pytest

Sample = dict[str, Any]


def npy(folder: Path, *files: npt.ArrayLike, dtype: str = "uint16") -> Path:
    """A folder of 000.npy, 001.npy, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, tokens in enumerate(files):
        np.save(folder / f"{i:03d}.npy", np.asarray(tokens, dtype))
    return folder


def penstock(
    folder: Path,
    records: Sequence[Mapping[str, Any]],
    keys: Mapping[str, Key | str | None],
    *,
    shard: int = 1 << 30,
    storage: Literal["bin", "h5"] = "bin",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """A store of Penstock's, a new shard after every `shard` tokens."""
    with ShardWriter(
        folder, keys, max_tokens_per_shard=shard, storage=storage, metadata=metadata
    ) as writer:
        for record in records:
            writer.append(record)
    return folder


def documents(folder: Path, *texts: Sequence[int], dtype: str = "uint16", **options: Any) -> Path:
    """A store of plain documents: the key "sequence" alone."""
    return penstock(folder, [{"sequence": text} for text in texts], {"sequence": dtype}, **options)


def astrai(
    folder: Path,
    *shards: Mapping[str, npt.NDArray[Any]],
    offsets: Sequence[Mapping[str, list[int]]] = (),
) -> Path:
    """AstrAI's flat meta.json, one sub-folder a shard."""
    for i, shard in enumerate(shards):
        where = folder / f"shard_{i:04d}"
        where.mkdir(parents=True)
        meta: dict[str, dict[str, Any]] = {}
        for key, values in shard.items():
            values.tofile(where / f"{key}.bin")
            meta[key] = {"shape": [len(values)], "dtype": str(values.dtype)}
            if offsets and key in offsets[i]:
                meta[key]["offsets"] = offsets[i][key]
        (where / "meta.json").write_text(json.dumps(meta))
    return folder


def hdf5(file: Path, keys: Mapping[str, Sequence[npt.NDArray[Any]]]) -> Path:
    """AstrAI's HDF5: a group a key, with datasets data_0, data_1, ..."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as out:
        for key, segments in keys.items():
            for i, values in enumerate(segments):
                out.create_dataset(f"{key}/data_{i}", data=values)
    return file.parent


def as_lists(sample: Sample) -> Sample:
    """A sample or batch with lists in place of its tensors, to compare with ==."""

    def lists(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return [lists(each) for each in value] if isinstance(value, list) else value

    return {key: lists(value) for key, value in sample.items()}


def tensors(batch: Sample) -> list[torch.Tensor]:
    """All tensors of a batch or sample, in lists too."""
    values = [each for v in batch.values() for each in (v if isinstance(v, list) else [v])]
    return [each for each in values if isinstance(each, torch.Tensor)]


def record_takes(monkeypatch: pytest.MonkeyPatch, *datasets: SampleDataset) -> list[Any]:
    """The indices of every `take` of these datasets from now on, in a list that grows."""
    taken: list[Any] = []

    def spied(take: Callable[[Any], Sample]) -> Callable[[Any], Sample]:
        def spy(indices: Any) -> Sample:
            taken.append(indices)
            return take(indices)

        return spy

    for dataset in datasets:
        monkeypatch.setattr(dataset, "take", spied(dataset.take))
    return taken


def check_fresh(*batches: Sample) -> None:
    """No two tensors of these batches share memory, and none keeps more alive than it shows."""
    places = []
    for tensor in [each for batch in batches for each in tensors(batch) if each.numel()]:
        size = tensor.numel() * tensor.element_size()
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == size
        places.append((tensor.data_ptr(), tensor.data_ptr() + size))
    places.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
