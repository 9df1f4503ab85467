"""`MixtureDataset`: datasets end to end, whatever they are."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.dataset.stores import as_lists, check_fresh, documents, npy, penstock, record_takes
from torch.utils.data import DataLoader, Dataset, default_collate

from penstock.batch import Place
from penstock.dataset import (
    DatasetFactory,
    MemoryMappedDataset,
    MixtureDataset,
    WindowDataset,
)
from penstock.dataset.mixture import identity_of, takes_batches
from penstock.errors import ConfigError
from penstock.store import Store, open_store

SEQ = 4


class Foreign(Dataset[dict[str, Any]]):
    """A plain map-style dataset of torch's: n items, and whatever `take` it likes."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.items = [
            {"input_ids": torch.full((SEQ,), first + i), "labels": torch.full((SEQ,), i)}
            for i in range(n)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]

    def take(self, n: int) -> list[dict[str, Any]]:
        """The first n, as in Hugging Face's datasets."""
        return self.items[:n]


def numbers(path: Path, first: int, count: int, dtype: str = "uint16") -> MemoryMappedDataset:
    """`count` samples over first, first + 1, ..."""
    tokens = np.arange(first, first + count * (SEQ + 1))
    return MemoryMappedDataset(npy(path, tokens, dtype=dtype), SEQ + 1)


@pytest.fixture
def mixture(tmp_path: Path) -> MixtureDataset:
    """3 samples of uint16 and 2 of uint32, with nothing between."""
    parts = [
        numbers(tmp_path / "a", 0, 3),
        numbers(tmp_path / "none", 0, 0),
        numbers(tmp_path / "b", 70_000, 2, "uint32"),
    ]
    return MixtureDataset(parts, ["a", "none", "b"])


# ------------------------------------------------------------------------------- end to end


def test_sizes_and_names(mixture: MixtureDataset) -> None:
    assert len(mixture) == 5
    assert mixture.cumulative_sizes == [0, 3, 3, 5]
    assert mixture.dataset_names == ["a", "none", "b"]


def test_a_sample_is_its_datasets_own_and_says_which(mixture: MixtureDataset) -> None:
    for i, (k, local) in enumerate([(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]):
        assert as_lists(mixture[i]) == as_lists(mixture.datasets[k][local]) | {"dataset_idx": k}


def test_the_sources_own_dict_is_left_as_it_was() -> None:
    one, two = Foreign(2), Foreign(2)
    mixture = MixtureDataset([one, two], ["one", "two"])
    assert mixture[3]["dataset_idx"] == 1
    assert mixture.take([0, 3])["dataset_idx"].tolist() == [0, 1]
    assert all(set(item) == {"input_ids", "labels"} for item in one.items + two.items)


@pytest.mark.parametrize("index", [5, -1, np.int64(5), True, 1.5])
def test_an_index_outside_is_an_index_error_on_both_sides(
    mixture: MixtureDataset, index: Any
) -> None:
    foreign = MixtureDataset([Foreign(3), Foreign(2)], ["a", "b"])
    for each in (mixture, foreign):
        with pytest.raises(IndexError):
            _ = each[index]
        with pytest.raises(IndexError):
            each.take([index])


# ----------------------------------------------------------------------------------------- batches


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, MixtureDataset]:
    """Twelve samples, plain and packed: uint16 with a mask, uint32 without, in several shards."""
    rng = np.random.default_rng(5)
    root = tmp_path_factory.mktemp("mixture")
    records = [
        {"sequence": rng.integers(0, 9, n), "loss_mask": rng.random(n) < 0.5} for n in (9, 3, 13)
    ]
    keys = {"sequence": "uint16", "loss_mask": "bool"}
    masked = open_store(penstock(root / "m", records, keys, shard=12))
    texts = [rng.integers(70_000, 70_009, n).tolist() for n in (8, 1, 16)]
    plain = open_store(documents(root / "p", *texts, dtype="uint32", shard=9))
    return {
        pack: MixtureDataset(
            [WindowDataset(masked, SEQ, pack), WindowDataset(plain, SEQ, pack)], ["masked", "plain"]
        )
        for pack in (False, True)
    }


@given(indices=st.lists(st.integers(0, 11), max_size=12), pack=st.booleans())
def test_take_is_the_items_collated_in_any_order(
    mixtures: dict[bool, MixtureDataset], indices: list[int], pack: bool
) -> None:
    mixture = mixtures[pack]
    batch = mixture.take(indices)
    if not indices:
        assert batch["input_ids"].shape == (0, SEQ)
        assert batch["dataset_idx"].dtype == torch.int64
        assert mixture.__getitems__(indices) == []
        return
    one_by_one = default_collate([mixture[i] for i in indices])
    at_once = default_collate(mixture.__getitems__(indices))
    assert as_lists(at_once) == as_lists(one_by_one)
    assert as_lists({key: batch[key] for key in one_by_one}) == as_lists(one_by_one)


@pytest.mark.parametrize("pack", [False, True])
def test_a_batch_cut_from_a_group_is_the_batch_taken_alone_here_or_at_a_place(
    mixtures: dict[bool, MixtureDataset], pack: bool
) -> None:
    mixture = mixtures[pack]
    indices = np.random.default_rng(1).integers(0, len(mixture), 20)
    group = mixture.gather(indices)
    for lo in range(0, 20, 6):
        hi = min(lo + 6, 20)
        expected = as_lists(mixture.take(indices[lo:hi]))
        assert as_lists(group.batch(lo, hi, None)) == expected
        assert as_lists(group.batch(lo, hi, Place(torch.device("cpu")))) == expected


@pytest.mark.parametrize("pack", [False, True])
def test_packed_masks_are_those_of_each_source_alone(
    mixtures: dict[bool, MixtureDataset], pack: bool
) -> None:
    mixture = mixtures[pack]
    indices = [11, 0, 7, 3, 8]
    batch = mixture.take(indices)
    assert batch["dataset_idx"].tolist() == [1, 0, 1, 0, 1]
    for row, index in enumerate(indices):
        k = int(index >= mixture.cumulative_sizes[1])
        alone = mixture.datasets[k].take([index - mixture.cumulative_sizes[k]])
        for key in ("input_ids", "labels", *(["doc_ids", "position_ids"] if pack else [])):
            assert batch[key][row].tolist() == alone[key][0].tolist()


def test_every_batch_has_tensors_of_its_own(mixtures: dict[bool, MixtureDataset]) -> None:
    mixture = mixtures[True]
    group = mixture.gather(np.arange(12))
    batches = [group.batch(lo, hi, None) for lo, hi in ((0, 1), (0, 1), (1, 12))]
    check_fresh(*batches, mixture.take([0]), mixture.take([0, 11]))


def test_torchs_own_loader_gives_the_same_batches(mixture: MixtureDataset) -> None:
    for at, batch in enumerate(DataLoader(mixture, batch_size=2)):
        expected = mixture.take(range(at * 2, min(at * 2 + 2, 5)))
        assert as_lists(batch) == as_lists(expected)


def test_items_are_fetched_source_by_source(
    mixture: MixtureDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = record_takes(monkeypatch, *mixture.datasets)
    items = mixture.__getitems__([4, 0, 3, 2])
    assert asked == [[0, 2], [1, 0]]
    assert [item["dataset_idx"] for item in items] == [2, 0, 2, 0]
    assert [item["input_ids"][0].item() for item in items] == [70_005, 0, 70_000, 10]


# ------------------------------------------------------------------------------ whatever they are


def test_foreign_datasets_are_collated_as_torch_does() -> None:
    mixture = MixtureDataset([Foreign(3), Foreign(2, first=100)], ["a", "b"])
    assert mixture.sample_bytes == 0
    batch = mixture.take([4, 0])
    assert batch["input_ids"].tolist() == [[101] * SEQ, [0] * SEQ]
    assert batch["dataset_idx"].tolist() == [1, 0]
    at_a_place = mixture.gather(np.array([4, 0])).batch(0, 2, Place(torch.device("cpu")))
    assert as_lists(at_a_place) == as_lists(batch)


def test_a_foreign_take_is_not_taken_for_ours(mixture: MixtureDataset, tmp_path: Path) -> None:
    ours = numbers(tmp_path / "ours", 0, 3)
    assert takes_batches(ours)
    assert takes_batches(mixture)
    assert not takes_batches(Foreign(3))
    assert not takes_batches(MixtureDataset([ours, Foreign(3)], ["a", "b"]))


def test_ours_and_foreign_ones_mix(tmp_path: Path) -> None:
    for order in (1, -1):
        parts = [numbers(tmp_path / "ours", 50, 3), Foreign(2)][::order]
        mixture = MixtureDataset(parts, ["a", "b"])
        batch = mixture.take([0, 4])
        assert batch["input_ids"].shape == (2, SEQ)
        assert batch["dataset_idx"].tolist() == [0, 1]


def test_dpo_datasets_mix_and_are_padded_together(tmp_path: Path) -> None:
    keys = {
        "chosen": "uint16",
        "chosen_mask": "bool",
        "rejected": "uint16",
        "rejected_mask": "bool",
    }
    parts = []
    for name, size in (("a", 2), ("b", 4)):
        record = {key: [1] * size for key in keys}
        parts.append(DatasetFactory.load("dpo", penstock(tmp_path / name, [record] * 2, keys), 0))
    mixture = MixtureDataset(parts, ["a", "b"])
    batch = mixture.take([3, 0])
    assert batch["chosen"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["dataset_idx"].tolist() == [1, 0]
    assert mixture.take([])["dataset_idx"].dtype == torch.int64
    assert as_lists(mixture.gather(np.array([3, 0])).batch(0, 2, None)) == as_lists(batch)


@pytest.mark.parametrize("name", ["seq", "sft"])
def test_seq_and_sft_datasets_mix(tmp_path: Path, name: str) -> None:
    parts = [
        DatasetFactory.load(name, npy(tmp_path / each, np.arange(first, first + 13)), SEQ)
        for each, first in (("a", 0), ("b", 100))
    ]
    mixture = MixtureDataset(parts, ["a", "b"])
    batch = mixture.take([5, 0])
    assert batch["target_ids"].tolist() == [[109, 110, 111, 112], [1, 2, 3, 4]]
    assert as_lists(batch) == as_lists(default_collate([mixture[5], mixture[0]]))


def test_a_mixture_of_mixtures_names_the_outer_source(mixture: MixtureDataset) -> None:
    nested = MixtureDataset([mixture, MixtureDataset([Foreign(1)], ["x"])], ["inner", "other"])
    assert nested[4]["dataset_idx"] == 0
    assert nested.take([4, 5])["dataset_idx"].tolist() == [0, 1]
    ours = MixtureDataset([mixture, mixture], ["one", "two"])
    batch = ours.take([9, 0])
    assert batch["dataset_idx"].tolist() == [1, 0]
    assert batch["input_ids"][:, 0].tolist() == [70_005, 0]


def test_reading_ahead_reaches_every_dataset_that_can(mixture: MixtureDataset) -> None:
    mixture.advise(np.arange(5))
    mixture.advise(np.empty(0, np.int64))
    MixtureDataset([Foreign(2)], ["a"]).advise(np.arange(2))


def test_a_gathered_sample_takes_as_much_as_the_largest(mixture: MixtureDataset) -> None:
    assert mixture.sample_bytes == (SEQ + 1) * 4


# --------------------------------------------------------------------------------------- refusals


def test_no_dataset_or_a_name_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="At least one dataset"):
        MixtureDataset([], [])
    with pytest.raises(ValueError, match="same length"):
        MixtureDataset([Foreign(1)], ["a", "b"])
    with pytest.raises(ValueError, match="different names"):
        MixtureDataset([Foreign(1), Foreign(1)], ["a", "a"])


def test_samples_that_do_not_fit_together_are_refused_at_once(tmp_path: Path) -> None:
    tokens = npy(tmp_path / "t", np.arange(40))
    longer = MemoryMappedDataset(tokens, SEQ + 2)
    packed = MemoryMappedDataset(tokens, SEQ + 1, pack_sequences=True, eos_token_id=0)
    plain = MemoryMappedDataset(tokens, SEQ + 1)
    seq = DatasetFactory.load("seq", tokens, SEQ)
    sft = DatasetFactory.load("sft", tokens, SEQ)
    for one, other in ((plain, longer), (plain, packed), (plain, seq), (seq, sft)):
        with pytest.raises(ConfigError, match=r"look the same.*'a' has .*, 'c' has "):
            MixtureDataset([one, Foreign(1), other], ["a", "b", "c"])
        nested = MixtureDataset([Foreign(1), other], ["x", "y"])
        with pytest.raises(ConfigError, match="look the same"):
            MixtureDataset([one, nested], ["a", "b"])
    assert len(MixtureDataset([plain, WindowDataset(open_store(tokens), SEQ)], ["a", "b"])) == 17


# ------------------------------------------------------------------------------- state, identity


def test_the_state_is_each_datasets_own(mixture: MixtureDataset) -> None:
    mixture.datasets[2].load_state_dict({"epoch": 4})
    state = mixture.state_dict()
    assert state == {
        "dataset_0": {"epoch": 0, "total_samples": 3},
        "dataset_1": {"epoch": 0, "total_samples": 0},
        "dataset_2": {"epoch": 4, "total_samples": 2},
    }
    mixture.datasets[2].load_state_dict({"epoch": 0})
    mixture.load_state_dict(state)
    assert mixture.state_dict() == state


def test_datasets_without_a_state_have_none(tmp_path: Path) -> None:
    mixture = MixtureDataset([Foreign(2), numbers(tmp_path / "a", 0, 2)], ["f", "a"])
    state = mixture.state_dict()
    assert list(state) == ["dataset_1"]
    mixture.load_state_dict(state)
    mixture.load_state_dict({"dataset_0": {"epoch": 1}})


def test_the_identity_is_json_and_by_name(mixture: MixtureDataset) -> None:
    sources = json.loads(json.dumps(mixture.identity()))["sources"]
    assert list(sources) == ["a", "none", "b"]
    assert sources["a"] == mixture.datasets[0].identity()


def test_a_foreign_dataset_is_known_by_type_length_and_what_the_user_says() -> None:
    assert identity_of(Foreign(3)) == {"data": None, "type": "Foreign", "samples": 3}
    assert identity_of(Foreign(3), "v1")["data"] == "v1"


def test_a_pickled_mixture_gives_the_same(mixture: MixtureDataset) -> None:
    copy = pickle.loads(pickle.dumps(mixture))
    assert as_lists(copy.take([4, 0])) == as_lists(mixture.take([4, 0]))


def test_datasets_in_memory_mix() -> None:
    store = Store()
    store._normalize({"sequence": [np.arange(9)]})
    mixture = MixtureDataset([WindowDataset(store, SEQ)], ["a"])
    assert mixture.take([1])["labels"].tolist() == [[5, 6, 7, 8]]


def test_names_that_are_one_string_are_refused(tmp_path: Path) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, np.arange(12)), 4)
    with pytest.raises(ConfigError, match="names are a list, one a dataset, not the string 'a'"):
        MixtureDataset([dataset], "a")
