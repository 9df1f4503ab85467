"""`BaseDataset` and its factory, `seq` and `sft`: the keys, shifts and lengths AstrAI documents."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dataset.stores import (
    as_lists,
    astrai,
    check_fresh,
    documents,
    hdf5,
    npy,
    penstock,
    record_takes,
)
from torch.utils.data import DataLoader, default_collate

from penstock.batch import Place
from penstock.dataset import BaseDataset, DatasetFactory, SEQDataset, SFTDataset
from penstock.errors import ConfigError, DataError, MissingData
from penstock.store import Key, MmapStore, Store, StoreFactory

CPU = Place(torch.device("cpu"))
SFT: dict[str, Key | str | None] = {"sequence": "uint16", "loss_mask": "bool"}


def in_memory(kind: type[BaseDataset], window: int, stride: int | None, **keys: Any) -> BaseDataset:
    """A dataset over arrays: a key's segments, none of them a record."""
    store = Store()
    store._normalize({key: list(segments) for key, segments in keys.items()})
    dataset = kind(window, stride)
    dataset._check(store)
    dataset._store = store
    return dataset


def of_tokens(tokens: int, window: int, stride: int | None = None) -> BaseDataset:
    return in_memory(SEQDataset, window, stride, sequence=[np.arange(tokens)])


# -------------------------------------------------------------------------------- loading, before


@pytest.mark.parametrize("name", ["seq", "sft", "dpo", "grpo"])
def test_nothing_is_there_before_load_and_everything_after(tmp_path: Path, name: str) -> None:
    lengths = {"rewards": "float32"}
    keys = {
        "seq": ["sequence"],
        "sft": ["sequence", "loss_mask", "position_ids"],
        "dpo": ["chosen", "rejected", "chosen_mask", "rejected_mask"],
        "grpo": ["prompts", "responses", "masks", "rewards"],
    }[name]
    astrai(tmp_path / "a", {key: np.ones(9, lengths.get(key, "int32")) for key in keys})
    dataset = DatasetFactory.create(name, 4)
    assert (dataset.store, dataset.storage) == (None, None)
    assert (dataset.count, dataset.keys, len(dataset)) == (0, [], 0)
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = dataset[0]
    with pytest.raises(RuntimeError, match="not loaded"):
        dataset.take([0])
    with pytest.raises(RuntimeError, match="not loaded"):
        dataset.get_index(0)
    dataset.load(tmp_path / "a")
    assert dataset.storage is dataset.loaded
    assert (dataset.count, dataset.keys, len(dataset)) == (9, keys, 2)
    assert set(dataset[0]) >= set(keys) - {"sequence"}


def test_the_factory_loads_in_one_call_with_the_documented_arguments(tmp_path: Path) -> None:
    folder = astrai(tmp_path / "a", {"sequence": np.arange(30, dtype=np.int32)})
    dataset = DatasetFactory.load("seq", str(folder), 8, stride=None, storage_type=None)
    assert isinstance(dataset, SEQDataset)
    assert isinstance(dataset.store, MmapStore)
    named = DatasetFactory.load(
        train_type="seq", load_path=folder, window_size=8, stride=4, storage_type="bin"
    )
    assert (len(dataset), len(named)) == (3, 6)


def test_an_unknown_type_of_training_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"Unknown component 'ppo'.*'dpo', 'grpo', 'seq', 'sft'"):
        DatasetFactory.load("ppo", "anywhere", 8)


def test_an_unknown_storage_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unknown component 'parquet'"):
        DatasetFactory.load("seq", tmp_path, 8, storage_type="parquet")


def test_a_path_without_data_is_missing_data(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="No supported"):
        DatasetFactory.load("seq", tmp_path / "nowhere", 8)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("seq", "sequence"), ("dpo", "chosen_mask"), ("grpo", "rewards"), ("sft", "sequence")],
)
def test_missing_keys_are_named_with_those_there_are(
    tmp_path: Path, name: str, missing: str
) -> None:
    folder = astrai(tmp_path / "a", {"chosen": np.arange(9, dtype=np.int32)})
    with pytest.raises(DataError, match=rf"has \['chosen'\] and lacks .*'{missing}'"):
        DatasetFactory.load(name, folder, 4)


def test_fractions_are_no_tokens(tmp_path: Path) -> None:
    folder = astrai(tmp_path / "a", {"sequence": np.ones(9, "float32")})
    with pytest.raises(DataError, match=r"fractions in \['sequence'\], where tokens"):
        DatasetFactory.load("seq", folder, 4)


def test_records_of_other_keys_alone_give_no_positions(tmp_path: Path) -> None:
    keys = {"sequence": np.arange(9, dtype="int32"), "other": np.arange(9, dtype="int32")}
    folder = astrai(tmp_path / "a", keys, offsets=[{"other": [0, 4, 9]}])
    with pytest.raises(DataError, match="no record offsets for 'sequence'"):
        DatasetFactory.load("sft", folder, 4)
    assert len(DatasetFactory.load("seq", folder, 4)) == 2


def test_a_load_that_fails_leaves_what_was_loaded_before(tmp_path: Path) -> None:
    good = astrai(tmp_path / "a", {"sequence": np.arange(9, dtype=np.int32)})
    bad = astrai(tmp_path / "b", {"chosen": np.arange(9, dtype=np.int32)})
    dataset = DatasetFactory.load("seq", good, 4)
    with pytest.raises(DataError):
        dataset.load(bad)
    assert dataset[0]["input_ids"].tolist() == [0, 1, 2, 3]


def test_a_store_that_was_closed_is_not_loaded(tmp_path: Path) -> None:
    folder = astrai(tmp_path / "a", {"sequence": np.arange(9, dtype=np.int32)})
    dataset = DatasetFactory.load("seq", folder, 4)
    dataset.loaded.close()
    with pytest.raises(RuntimeError, match=r"not loaded .*closed"):
        _ = dataset[0]


@pytest.mark.parametrize("name", ["seq", "sft"])
@pytest.mark.parametrize(("window", "stride"), [(0, None), (-1, None), (4, 0), (4, -2)])
def test_windows_and_strides_of_nothing_are_refused(
    name: str, window: int, stride: int | None
) -> None:
    with pytest.raises(ConfigError, match=r"window_size must be >= 1 and stride >= 1"):
        DatasetFactory.create(name, window, stride)


# ----------------------------------------------------------------------------- window arithmetic


@given(st.integers(0, 40), st.integers(1, 12), st.none() | st.integers(1, 15))
def test_len_and_get_index_follow_the_documented_formula(
    tokens: int, window: int, stride: int | None
) -> None:
    dataset = of_tokens(tokens, window, stride)
    step = window if stride is None else stride
    expected = 0 if tokens <= window else (tokens - 1 - window) // step + 1
    assert len(dataset) == expected
    assert dataset.count == tokens
    for i in range(expected + 3) if expected else ():
        begin, end = dataset.get_index(i)
        assert begin == min(i * step, tokens - 1 - window)
        assert end == begin + window <= tokens - 1
        if i < expected:
            assert begin == i * step
            assert dataset[i]["input_ids"].tolist() == list(range(begin, end))
            assert dataset[i]["target_ids"].tolist() == list(range(begin + 1, end + 1))


def test_get_index_is_clamped_at_the_end_and_refused_before_the_start() -> None:
    dataset = of_tokens(30, 8)
    assert dataset.get_index(10**6) == (21, 29)
    assert dataset.get_index(np.int64(1)) == (8, 16)  # type: ignore[arg-type]  # numpy's integers
    with pytest.raises(IndexError, match="Index -1 out of range"):
        dataset.get_index(-1)


def test_get_index_over_too_few_tokens_says_so() -> None:
    with pytest.raises(ValueError, match="Data too short: 8 tokens <= window_size 8"):
        of_tokens(8, 8).get_index(0)


@pytest.mark.parametrize("index", [3, -1, np.int64(3), True, 0.0])
def test_an_index_outside_is_an_index_error_on_both_sides(index: Any) -> None:
    dataset = of_tokens(30, 8)
    assert len(dataset) == 3
    with pytest.raises(IndexError):
        _ = dataset[index]
    with pytest.raises(IndexError):
        dataset.take([index])


# -------------------------------------------------------------------------------------------- seq


def test_seq_has_the_documented_keys_and_dtypes(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("seq", npy(tmp_path, np.arange(10)), 4)
    assert as_lists(dataset[1]) == {"input_ids": [4, 5, 6, 7], "target_ids": [5, 6, 7, 8]}
    assert {value.dtype for value in dataset[1].values()} == {torch.int64}


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=7),
    window=st.integers(1, 5),
    stride=st.integers(1, 6),
)
def test_windows_cross_shards(lengths: list[int], window: int, stride: int) -> None:
    flat = np.arange(sum(lengths))
    dataset = in_memory(
        SEQDataset, window, stride, sequence=np.split(flat, np.cumsum(lengths)[:-1])
    )
    batch = dataset.take(range(len(dataset)))
    spans = [flat[i * stride : i * stride + window + 1] for i in range(len(dataset))]
    assert batch["input_ids"].tolist() == [span[:-1].tolist() for span in spans]
    assert batch["target_ids"].tolist() == [span[1:].tolist() for span in spans]


# -------------------------------------------------------------------------------------------- sft


def sft_records(seed: int, lengths: list[int]) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {"sequence": rng.integers(0, 60_000, n), "loss_mask": rng.random(n) < 0.5} for n in lengths
    ]


def test_sft_has_the_mask_of_the_targets_and_the_positions_of_the_inputs(tmp_path: Path) -> None:
    shard = {
        "sequence": np.arange(10, 20, dtype=np.int32),
        "loss_mask": np.array([0, 0, 1, 1, 0, 1, 0, 0, 1, 1], np.int32),
        "position_ids": np.array([0, 1, 2, 3, 0, 1, 2, 0, 1, 2], np.int32),
    }
    dataset = DatasetFactory.load("sft", astrai(tmp_path / "a", shard), 4, stride=3)
    assert as_lists(dataset[1]) == {
        "input_ids": [13, 14, 15, 16],
        "target_ids": [14, 15, 16, 17],
        "loss_mask": [False, True, False, False],
        "position_ids": [3, 0, 1, 2],
    }
    dtypes = {key: value.dtype for key, value in dataset[1].items()}
    assert dtypes.pop("loss_mask") == torch.bool
    assert set(dtypes.values()) == {torch.int64}


@settings(max_examples=30)  # each one writes a store
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda n: sum(n) > 6),
    window=st.integers(1, 5),
    stride=st.integers(1, 6),
    shard=st.integers(4, 30),
)
def test_missing_positions_are_places_in_the_records(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    window: int,
    stride: int,
    shard: int,
) -> None:
    records = sft_records(1, lengths)
    folder = penstock(tmp_path_factory.mktemp("s") / "s", records, SFT, shard=shard)
    dataset = DatasetFactory.load("sft", folder, window, stride)
    places = [place for n in lengths for place in range(n)]
    mask = [bool(m) for record in records for m in record["loss_mask"]]
    batch = dataset.take(range(len(dataset)))
    for i in range(len(dataset)):
        begin, end = dataset.get_index(i)
        assert batch["position_ids"][i].tolist() == places[begin:end]
        assert batch["loss_mask"][i].tolist() == mask[begin + 1 : end + 1]
        assert as_lists(dataset[i]) == as_lists({key: batch[key][i] for key in batch})


def test_positions_count_on_where_a_window_begins_inside_a_record(tmp_path: Path) -> None:
    folder = documents(tmp_path / "s", range(1, 8), range(11, 14), range(21, 26))
    dataset = DatasetFactory.load("sft", folder, 4, stride=5)
    assert dataset[0]["position_ids"].tolist() == [0, 1, 2, 3]
    assert dataset[1]["position_ids"].tolist() == [5, 6, 0, 1]
    assert dataset[2]["position_ids"].tolist() == [0, 1, 2, 3]


def test_positions_of_each_window_count_from_0_where_no_records_are_known(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("sft", npy(tmp_path, np.arange(10)), 3)
    assert dataset.take([0, 2])["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_store_without_loss_mask_trains_everything(tmp_path: Path) -> None:
    dataset = DatasetFactory.load("sft", npy(tmp_path, np.arange(10)), 3)
    batch = dataset.take([0, 1, 2])
    assert batch["loss_mask"].dtype == torch.bool
    assert batch["loss_mask"].all()
    assert batch["loss_mask"].shape == (3, 3)


def test_a_mask_in_more_shards_than_the_tokens_is_read_by_position() -> None:
    dataset = in_memory(
        SFTDataset,
        3,
        None,
        sequence=[np.arange(4), np.arange(4, 10)],
        loss_mask=[np.ones(7, np.bool_), np.zeros(3, np.bool_)],
    )
    masks = dataset.take([0, 1, 2])["loss_mask"]
    assert masks.tolist() == [[True] * 3, [True] * 3, [False] * 3]


# --------------------------------------------------------------------------------- batches, items


@pytest.fixture(params=["seq", "sft"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> BaseDataset:
    records = sft_records(2, [9, 1, 14, 30, 6])
    folder = penstock(tmp_path / "s", records, SFT, shard=25)
    return DatasetFactory.load(request.param, folder, 7, stride=5)


def test_take_is_the_items_collated(dataset: BaseDataset) -> None:
    indices = [5, 0, 3, 3]
    batch = dataset.take(indices)
    assert as_lists(batch) == as_lists(default_collate([dataset[i] for i in indices]))
    theirs = next(iter(DataLoader(dataset, batch_size=4, sampler=indices)))
    assert as_lists(theirs) == as_lists(batch)


def test_torchs_own_loader_fetches_a_batch_at_once(
    dataset: BaseDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = record_takes(monkeypatch, dataset)
    next(iter(DataLoader(dataset, batch_size=4)))
    assert taken == [[0, 1, 2, 3]]


@pytest.mark.parametrize("place", [None, CPU], ids=["here", "at a place"])
def test_a_batch_cut_from_a_group_is_the_batch_taken_alone(
    dataset: BaseDataset, place: Place | None
) -> None:
    indices = np.random.default_rng(0).permutation(len(dataset))
    group = dataset.gather(indices)
    for lo in range(0, len(indices), 3):
        hi = min(lo + 3, len(indices))
        assert as_lists(group.batch(lo, hi, place)) == as_lists(dataset.take(indices[lo:hi]))


@pytest.mark.parametrize("place", [None, CPU], ids=["here", "at a place"])
def test_every_batch_has_tensors_of_its_own(dataset: BaseDataset, place: Place | None) -> None:
    group = dataset.gather(np.arange(4))
    batches = [group.batch(lo, hi, place) for lo, hi in ((0, 1), (0, 1), (1, 4), (0, 4))]
    check_fresh(*batches, dataset.take([0]), dataset[0], dataset[0])


def test_take_of_nothing_is_an_empty_batch(dataset: BaseDataset) -> None:
    batch = dataset.take([])
    assert set(batch) == set(dataset[0])
    for key, value in batch.items():
        assert value.shape == (0, 7)
        assert value.dtype == dataset[0][key].dtype


def test_a_gathered_sample_takes_as_many_bytes_as_it_says(dataset: BaseDataset) -> None:
    assert dataset.sample_bytes == 8 * 2 + (7 * 5 if isinstance(dataset, SFTDataset) else 0)


def test_reading_ahead_and_pickling_change_nothing(dataset: BaseDataset) -> None:
    expected = as_lists(dataset.take([1, 2]))
    dataset.advise(np.arange(len(dataset)))
    dataset.advise(np.empty(0, np.int64))
    assert as_lists(pickle.loads(pickle.dumps(dataset)).take([1, 2])) == expected


def test_the_identity_is_json_and_tells_how_samples_are_cut(tmp_path: Path) -> None:
    folder = documents(tmp_path / "s", range(20))
    window = np.int64(4)
    identities = [
        json.dumps(DatasetFactory.load(*arguments).identity())  # type: ignore[arg-type]
        for arguments in [
            ("seq", folder, window),
            ("sft", folder, window),
            ("seq", folder, 5),
            ("seq", folder, 4, 3),
        ]
    ]
    assert len(set(identities)) == 4


# ------------------------------------------------------------------------------------- outsiders


def test_outsiders_may_register_datasets_and_stores_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DatasetFactory, "_kinds", dict(DatasetFactory._kinds))
    monkeypatch.setattr(StoreFactory, "_makers", dict(StoreFactory._makers))

    @StoreFactory.register("theirs")
    class Theirs(Store):
        def load(self, path: Any) -> None:  # type: ignore[override]  # as AstrAI's, it gives None
            self._normalize({"sequence": [torch.arange(30)]})

    @DatasetFactory.register("backwards")
    class Backwards(BaseDataset):
        @property
        def required_keys(self) -> list[str]:  # type: ignore[override]  # as AstrAI writes it
            return ["sequence"]

        def __getitem__(self, index: int) -> dict[str, Any]:
            begin, end = self.get_index(index)
            return {"input_ids": self.loaded.fetch(begin, end, "sequence").flip(0)}

    dataset = DatasetFactory.load("backwards", tmp_path, 4, storage_type="theirs")
    assert isinstance(dataset, Backwards)
    assert dataset[1]["input_ids"].tolist() == [7, 6, 5, 4]
    assert dataset.take([0, 1])["input_ids"].tolist() == [[3, 2, 1, 0], [7, 6, 5, 4]]
    with pytest.raises(IndexError):
        dataset.take([len(dataset)])


def test_hdf5_stores_are_read_across_datasets_and_files_in_numeric_order(tmp_path: Path) -> None:
    parts = np.split(np.arange(50), np.arange(4, 48, 4))
    hdf5(tmp_path / "data_0001.h5", {"sequence": parts[:11]})
    hdf5(tmp_path / "data_0002.h5", {"sequence": parts[11:]})
    dataset = DatasetFactory.load("seq", tmp_path, 7)
    assert dataset.count == 50
    assert dataset.take(range(7))["input_ids"].flatten().tolist() == list(range(49))
