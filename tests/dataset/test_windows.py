"""`WindowDataset`: every token of a store but the first is a label once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.dataset.stores import as_lists, astrai, check_fresh, documents, hdf5, npy, penstock
from tests.pack.naive import after_eos, naive
from torch.utils.data import DataLoader, default_collate

from penstock.dataset import WindowDataset
from penstock.errors import ConfigError, DataError
from penstock.store import Store, open_store

EOS = 0
TEXTS = [[1, 2, 3, EOS], [4, EOS], [5, 6, 7, 8, 9, EOS], [EOS], [10, 11, 12, 13, EOS]]
FLAT = [token for text in TEXTS for token in text]
BEGINS = [at == 0 for text in TEXTS for at in range(len(text))]


def memory(*texts: list[int]) -> Store:
    """A store in memory, a shard for each text; its records are unknown."""
    store = Store()
    store._normalize({"sequence": [np.array(text, np.uint16) for text in texts]})
    return store


def astrai_store(path: Path) -> Store:
    half = 2
    shards = [[t for text in part for t in text] for part in (TEXTS[:half], TEXTS[half:])]
    offsets = [np.cumsum([0, *map(len, part)]).tolist() for part in (TEXTS[:half], TEXTS[half:])]
    astrai(
        path,
        *[{"sequence": np.array(shard, np.int32)} for shard in shards],
        offsets=[{"sequence": each} for each in offsets],
    )
    return open_store(path)


FORMATS: dict[str, Callable[[Path], Store]] = {
    "penstock": lambda path: open_store(documents(path, *TEXTS)),
    "penstock, small shards": lambda path: open_store(documents(path, *TEXTS, shard=5)),
    "penstock, hdf5": lambda path: open_store(documents(path, *TEXTS, shard=5, storage="h5")),
    "astrai": astrai_store,
    "hdf5": lambda path: open_store(
        hdf5(path / "a.h5", {"sequence": [np.array(text, np.int64) for text in TEXTS]})
    ),
    "npy": lambda path: open_store(npy(path, *TEXTS)),
}


@pytest.fixture(params=FORMATS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return FORMATS[request.param](tmp_path / "store")


# ----------------------------------------------------------------------------------------- spans


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 17, 18])
def test_windows_follow_one_another_across_shards_in_every_format(
    store: Store, seq_len: int
) -> None:
    assert len(store) == len(FLAT) == 18
    dataset = WindowDataset(store, seq_len)
    assert len(dataset) == 17 // seq_len
    batch = dataset.take(range(len(dataset)))
    used = len(dataset) * seq_len
    assert batch["input_ids"].shape == batch["labels"].shape == (len(dataset), seq_len)
    assert batch["input_ids"].flatten().tolist() == FLAT[:used]
    assert batch["labels"].flatten().tolist() == FLAT[1 : used + 1]


@given(lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8), seq_len=st.integers(1, 5))
def test_every_token_but_the_first_is_a_label_once(lengths: list[int], seq_len: int) -> None:
    ends: list[int] = np.cumsum([0, *lengths]).tolist()
    texts: list[list[int]] = [list(range(a, b)) for a, b in pairwise(ends)]
    dataset = WindowDataset(memory(*texts), seq_len)
    labels = [t for i in range(len(dataset)) for t in dataset[i]["labels"].tolist()]
    assert labels == list(range(1, 1 + len(labels)))
    assert 0 <= max(ends[-1] - 1, 0) - len(labels) < seq_len


def test_a_store_of_less_than_two_tokens_has_no_sample() -> None:
    too_little: list[list[list[int]]] = [[[]], [[1]], [[], [1], []]]
    for texts in too_little:
        dataset = WindowDataset(memory(*texts), 1)
        assert len(dataset) == 0
        assert dataset.take([])["input_ids"].shape == (0, 1)
    assert len(WindowDataset(memory([1, 2]), 1)) == 1


def test_seq_len_has_to_be_at_least_one() -> None:
    with pytest.raises(ConfigError, match="at least two tokens"):
        WindowDataset(memory([1, 2, 3]), 0)


def test_an_index_outside_is_an_index_error_on_both_sides() -> None:
    dataset = WindowDataset(memory(FLAT), 4)
    for indices in ([-1], [0, 4], np.array([4])):
        with pytest.raises(IndexError, match=r"out of range \[0, 4\)"):
            dataset.take(indices)


# ----------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64"])
def test_tokens_that_are_not_trained_are_labels_of_minus_100(tmp_path: Path, dtype: str) -> None:
    mask = [1, 0, 0, 1, 1, 0, 1, 1, 0]
    half = np.array(mask[:4], dtype), np.array(mask[4:], dtype)
    tokens = np.arange(9, dtype=np.uint16)
    astrai(
        tmp_path / "a",
        {"sequence": tokens[:4], "loss_mask": half[0]},
        {"sequence": tokens[4:], "loss_mask": half[1]},
    )
    batch = WindowDataset(open_store(tmp_path / "a"), 4).take([0, 1])
    expected = [t if trained else -100 for t, trained in zip(range(9), mask, strict=True)]
    assert batch["labels"].flatten().tolist() == expected[1:]
    assert batch["input_ids"].flatten().tolist() == list(range(8))


def test_a_mask_of_another_length_is_refused(tmp_path: Path) -> None:
    arrays = {"sequence": np.arange(9, dtype=np.uint16), "loss_mask": np.ones(8, np.bool_)}
    with pytest.raises(DataError, match=r"'sequence' has lengths \[9\] and 'loss_mask' \[8\]"):
        WindowDataset(open_store(astrai(tmp_path / "a", arrays)), 4)
    store = Store()
    store._normalize({key: [values] for key, values in arrays.items()})
    with pytest.raises(DataError, match="9 tokens but a loss_mask of 8"):
        WindowDataset(store, 4)


def test_a_store_without_tokens_says_what_reads_it(tmp_path: Path) -> None:
    record = {"chosen": [1], "rejected": [2]}
    folder = penstock(tmp_path / "p", [record], {"chosen": "uint16", "rejected": "uint16"})
    with pytest.raises(DataError, match=r"no 'sequence', only \['chosen', 'rejected'\].*dpo"):
        WindowDataset(open_store(folder), 4)


def test_fractions_are_no_tokens(tmp_path: Path) -> None:
    astrai(tmp_path / "a", {"sequence": np.ones(9, np.float32)})
    with pytest.raises(DataError, match="float32 values where integer tokens were expected"):
        WindowDataset(open_store(tmp_path / "a"), 4)


# --------------------------------------------------------------------------------------- packing


def packed(seq_len: int, begins: list[bool]) -> dict[str, Any]:
    """A whole packed batch of TEXTS, token by token."""
    count = (len(FLAT) - 1) // seq_len
    spans = [slice(i * seq_len, i * seq_len + seq_len + 1) for i in range(count)]
    found = naive([begins[span] for span in spans])
    labels = [t for span in spans for t in FLAT[span][1:]]
    for at in found.ignored:
        labels[at] = -100
    return {
        "input_ids": [FLAT[span][:-1] for span in spans],
        "labels": np.reshape(labels, (count, seq_len)).tolist(),
        "doc_ids": found.doc_ids,
        "position_ids": found.position_ids,
        "cu_seqlens": found.cu_seqlens,
        "max_seqlen": found.max_seqlen,
    }


@pytest.mark.parametrize("seq_len", [1, 2, 3, 4, 8, 17])
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"npy"}))
def test_packing_keeps_records_apart_in_every_format_that_knows_them(
    tmp_path: Path, name: str, seq_len: int
) -> None:
    store = FORMATS[name](tmp_path / "store")
    dataset = WindowDataset(store, seq_len, pack_sequences=True)
    assert as_lists(dataset.take(range(len(dataset)))) == packed(seq_len, BEGINS)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 4, 8, 17])
def test_packing_by_eos_where_no_records_are_known(seq_len: int) -> None:
    dataset = WindowDataset(memory(FLAT), seq_len, pack_sequences=True, eos_token_id=EOS)
    begins = after_eos([FLAT], EOS)[0]
    assert begins == BEGINS
    assert as_lists(dataset.take(range(len(dataset)))) == packed(seq_len, begins)


def test_records_that_end_without_an_eos_are_kept_apart_too(tmp_path: Path) -> None:
    store = open_store(documents(tmp_path / "s", [1, 2], [3, 4, 5], [], [6]))
    sample = WindowDataset(store, 5, pack_sequences=True)[0]
    assert as_lists(sample) == {
        "input_ids": [1, 2, 3, 4, 5],
        "labels": [2, -100, 4, 5, -100],
        "doc_ids": [0, 0, 1, 1, 1],
    }


def test_records_are_what_counts_where_an_eos_is_given_too(tmp_path: Path) -> None:
    store = open_store(documents(tmp_path / "s", [1, EOS, 2], [3, 4, 5]))
    dataset = WindowDataset(store, 5, pack_sequences=True, eos_token_id=EOS)
    assert dataset[0]["doc_ids"].tolist() == [0, 0, 0, 1, 1]
    assert dataset.identity() == WindowDataset(store, 5, pack_sequences=True).identity()


def test_packing_without_records_or_eos_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no record boundaries, so eos_token_id is required"):
        WindowDataset(open_store(npy(tmp_path, FLAT)), 4, pack_sequences=True)


def test_records_of_other_keys_alone_are_refused(tmp_path: Path) -> None:
    keys = {"sequence": np.arange(9, dtype=np.int32), "other": np.arange(9, dtype=np.int32)}
    folder = astrai(tmp_path / "a", keys, offsets=[{"other": [0, 4, 9]}])
    with pytest.raises(DataError, match="no record offsets for 'sequence'"):
        WindowDataset(open_store(folder), 4, pack_sequences=True)


def test_masks_and_packing_both_mask_labels(tmp_path: Path) -> None:
    records = [
        {"sequence": [1, 2, 3], "loss_mask": [0, 0, 1]},
        {"sequence": [4, 5, 6], "loss_mask": [1, 0, 1]},
    ]
    folder = penstock(tmp_path / "s", records, {"sequence": "uint16", "loss_mask": "bool"})
    sample = WindowDataset(open_store(folder), 5, pack_sequences=True)[0]
    assert sample["labels"].tolist() == [-100, 3, -100, -100, 6]


# ------------------------------------------------------------------------------ batches and items


@pytest.mark.parametrize("pack", [False, True])
def test_take_is_the_items_collated(tmp_path: Path, pack: bool) -> None:
    dataset = WindowDataset(open_store(documents(tmp_path / "s", *TEXTS, shard=7)), 3, pack)
    indices = [4, 0, 0, 2]
    batch = dataset.take(indices)
    items = default_collate([dataset[i] for i in indices])
    assert list(items) == ["input_ids", "labels", "doc_ids"][: 2 + pack]
    assert as_lists({key: batch[key] for key in items}) == as_lists(items)
    theirs = next(iter(DataLoader(dataset, batch_size=4, sampler=indices)))
    assert as_lists(theirs) == as_lists(items)


@pytest.mark.parametrize("pack", [False, True])
def test_every_batch_has_tensors_of_its_own(tmp_path: Path, pack: bool) -> None:
    record = {"sequence": list(range(40)), "loss_mask": [i % 3 for i in range(40)]}
    keys = {"sequence": "int64", "loss_mask": "uint8"}
    record["loss_mask"] = [min(m, 1) for m in record["loss_mask"]]
    dataset = WindowDataset(open_store(penstock(tmp_path / "s", [record], keys)), 4, pack)
    group = dataset.gather(np.arange(6))
    check_fresh(
        group.batch(0, 1),
        group.batch(0, 1),
        group.batch(0, 6),
        dataset.take([1]),
        dataset[1],
        {"group": torch.from_numpy(group.tokens)},
    )


def test_tokens_a_sample_are_its_labels() -> None:
    assert WindowDataset(memory(FLAT), 4).tokens_a_sample == 4


def test_the_length_of_a_closed_dataset_stays(tmp_path: Path) -> None:
    dataset = WindowDataset(open_store(npy(tmp_path, FLAT)), 4)
    dataset.close()
    dataset.close()
    assert len(dataset) == 4
    with pytest.raises(RuntimeError, match="closed"):
        dataset.take([0])
