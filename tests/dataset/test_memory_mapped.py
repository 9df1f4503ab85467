"""`MemoryMappedDataset`: token files in a folder, as KempnerForge documents it."""

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
from tests.dataset.stores import as_lists, astrai, check_fresh, documents, npy, record_takes
from tests.pack.naive import after_eos, naive
from torch.utils.data import DataLoader, default_collate

from penstock.dataset import MemoryMappedDataset, WindowDataset
from penstock.errors import ConfigError, DataError, MissingData
from penstock.store import open_store

EOS = 0
DOCUMENTED = ("input_ids", "labels", "doc_ids")


def tokens_of(sample: dict[str, Any]) -> list[int]:
    """The span of tokens that a plain sample was made from."""
    inputs, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
    assert inputs[1:] == labels[:-1]
    return [*inputs, labels[-1]]


# ----------------------------------------------------------------------------------------- spans


def test_sample_i_is_the_ith_span_of_seq_len_tokens(tmp_path: Path) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, np.arange(12)), 4)
    assert [tokens_of(dataset[i]) for i in range(len(dataset))] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_a_sample_of_seq_len_tokens_has_one_input_less(tmp_path: Path) -> None:
    sample = MemoryMappedDataset(npy(tmp_path, np.arange(12)), 4)[0]
    assert as_lists(sample) == {"input_ids": [0, 1, 2], "labels": [1, 2, 3]}
    assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64


def test_the_tail_of_each_file_is_dropped_and_no_sample_crosses_files(tmp_path: Path) -> None:
    folder = npy(tmp_path, np.arange(7), np.arange(100, 102), np.arange(200, 206))
    dataset = MemoryMappedDataset(folder, 3)
    assert [tokens_of(dataset[i]) for i in range(len(dataset))] == [
        [0, 1, 2],
        [3, 4, 5],
        [200, 201, 202],
        [203, 204, 205],
    ]


@given(sizes=st.lists(st.integers(0, 13), min_size=1, max_size=6), seq_len=st.integers(2, 5))
def test_any_files_give_the_spans_that_slicing_each_gives(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seq_len: int
) -> None:
    files = [np.arange(100 * i, 100 * i + size) for i, size in enumerate(sizes)]
    expected = [
        file[at : at + seq_len].tolist()
        for file in files
        for at in range(0, len(file) - seq_len + 1, seq_len)
    ]
    dataset = MemoryMappedDataset(npy(tmp_path_factory.mktemp("tokens"), *files), seq_len)
    batch = dataset.take(range(len(dataset)))
    assert torch.cat([batch["input_ids"], batch["labels"][:, -1:]], 1).tolist() == expected


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        np.save(tmp_path / f"{name}.npy", np.full(2, ord(name), np.uint16))
    found = MemoryMappedDataset(tmp_path, 2).take([0, 1, 2])["labels"]
    assert found.flatten().tolist() == [ord("a"), ord("b"), ord("c")]


def test_the_pattern_chooses_files_whatever_else_lies_beside_them(tmp_path: Path) -> None:
    np.save(tmp_path / "train_0.npy", np.arange(4, dtype=np.uint16))
    np.save(tmp_path / "val_0.npy", np.arange(10, 14, dtype=np.uint16))
    (tmp_path / "notes.h5").write_text("not tokens")
    assert len(MemoryMappedDataset(tmp_path, 2)) == 4
    dataset = MemoryMappedDataset(tmp_path, 2, "val_*.npy")
    assert [tokens_of(dataset[i]) for i in range(2)] == [[10, 11], [12, 13]]


def test_the_pattern_chooses_files_whatever_stores_lie_below(tmp_path: Path) -> None:
    folder = npy(tmp_path, np.arange(40))
    astrai(folder / "val", {"sequence": np.arange(90, 130)})
    documents(folder / "test", range(200, 260))
    assert tokens_of(MemoryMappedDataset(folder, 10)[0]) == list(range(10))


def test_data_dir_may_be_a_string(tmp_path: Path) -> None:
    assert len(MemoryMappedDataset(str(npy(tmp_path, np.arange(4))), 2)) == 2


# ---------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64", ">u2"])
def test_npy_files_state_their_dtype_and_the_highest_id_comes_back(
    tmp_path: Path, dtype: str
) -> None:
    top = int(np.iinfo(dtype).max)
    dataset = MemoryMappedDataset(npy(tmp_path, [1, top, 2, top], dtype=dtype), 4)
    assert tokens_of(dataset[0]) == [1, top, 2, top]


def test_files_of_different_widths_are_one_dataset(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 65_535], np.uint16))
    np.save(tmp_path / "b.npy", np.array([70_000, 2], np.uint32))
    dataset = MemoryMappedDataset(tmp_path, 2)
    assert [tokens_of(dataset[i]) for i in range(2)] == [[1, 65_535], [70_000, 2]]


def test_a_raw_bin_file_has_the_dtype_that_is_passed(tmp_path: Path) -> None:
    np.arange(8, dtype=np.uint32).tofile(tmp_path / "a.bin")
    dataset = MemoryMappedDataset(tmp_path, 4, "*.bin", dtype="uint32")
    assert [tokens_of(dataset[i]) for i in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_raw_bin_file_has_the_dtype_of_the_meta_json_beside_it(tmp_path: Path) -> None:
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "a.bin")
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": "uint16"}))
    assert tokens_of(MemoryMappedDataset(tmp_path, 8, "*.bin")[0]) == list(range(8))


def test_a_raw_bin_file_whose_dtype_nothing_states_says_how_to_state_it(tmp_path: Path) -> None:
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"a\.bin has no meta\.json .* pass dtype='uint16'"):
        MemoryMappedDataset(tmp_path, 4, "*.bin")


def test_a_raw_bin_file_of_an_odd_size_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(7))
    with pytest.raises(DataError, match="not a whole number of uint16 tokens"):
        MemoryMappedDataset(tmp_path, 2, "*.bin", dtype="uint16")


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros((2, 8), np.uint16), r"shape \(2, 8\)"),
        (np.zeros(8, np.float32), "float32 values"),
        (np.array(3, np.uint16), r"shape \(\)"),
        (np.zeros(8, bool), "bool values"),
    ],
)
def test_npy_files_of_anything_but_a_row_of_integers_are_refused(
    tmp_path: Path, array: Any, found: str
) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=found):
        MemoryMappedDataset(tmp_path, 2)


def test_a_pickled_npy_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(DataError, match="object values"):
        MemoryMappedDataset(tmp_path, 2)


# --------------------------------------------------------------------------- nothing, too little


def test_a_folder_without_a_matching_file_is_missing_data(tmp_path: Path) -> None:
    for folder, pattern in ((tmp_path, "*.npy"), (tmp_path / "nowhere", "*.bin")):
        with pytest.raises(MissingData, match=rf"^No files match .*{pattern[1:]}.* in .*correct"):
            MemoryMappedDataset(folder, 4, pattern)
    assert issubclass(MissingData, FileNotFoundError)


def test_empty_files_give_no_samples(tmp_path: Path) -> None:
    folder = npy(tmp_path, [], np.arange(4), [])
    dataset = MemoryMappedDataset(folder, 2)
    assert [tokens_of(dataset[i]) for i in range(len(dataset))] == [[0, 1], [2, 3]]
    assert dataset.take([])["input_ids"].shape == (0, 1)
    (folder / "001.npy").unlink()
    empty = MemoryMappedDataset(folder, 2)
    assert len(empty) == 0
    assert empty.take([])["labels"].shape == (0, 1)
    with pytest.raises(IndexError):
        _ = empty[0]


def test_an_empty_raw_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    assert len(MemoryMappedDataset(tmp_path, 2, "*.bin", dtype="uint16")) == 0


@pytest.mark.parametrize("seq_len", [1, 0, -3])
def test_a_sample_without_an_input_and_a_label_is_refused(tmp_path: Path, seq_len: int) -> None:
    with pytest.raises(ConfigError, match="at least two tokens"):
        MemoryMappedDataset(npy(tmp_path, np.arange(8)), seq_len)


# --------------------------------------------------------------------------------------- indices


@pytest.mark.parametrize("index", [3, -1, 10**20, -(10**20), np.int64(3), np.int8(-1)])
def test_an_index_outside_is_an_index_error_on_both_sides(tmp_path: Path, index: Any) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, np.arange(12)), 4)
    with pytest.raises(IndexError):
        _ = dataset[index]
    with pytest.raises(IndexError):
        dataset.take([0, index])


def test_an_error_names_the_index_and_the_range(tmp_path: Path) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, np.arange(12)), 4)
    with pytest.raises(IndexError, match=r"Index 7 out of range \[0, 3\)"):
        dataset.take([0, 7, 9])


@pytest.mark.parametrize("index", [True, 1.0, "1", None, slice(2), [0, 1]])
def test_an_index_that_is_no_whole_number_is_refused(tmp_path: Path, index: Any) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, np.arange(12)), 4)
    with pytest.raises(IndexError, match="one whole number each"):
        _ = dataset[index]


@pytest.mark.parametrize("index", [np.int64(2), np.uint16(2), np.uint64(2), torch.tensor(2)])
def test_any_integer_is_an_index(tmp_path: Path, index: Any) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, np.arange(12)), 4)
    assert tokens_of(dataset[index]) == [8, 9, 10, 11]
    assert dataset.take(np.array([index]))["labels"].tolist() == [[9, 10, 11]]


def test_a_for_loop_over_the_dataset_ends(tmp_path: Path) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, np.arange(12)), 4)
    assert len(list(dataset)) == 3  # type: ignore[call-overload]  # by Python's old protocol


# --------------------------------------------------------------------------------------- packing


PACKED = [7, EOS, 8, 9, EOS, EOS, 4, 5, 6, 1, 2, 3, 4, 5, 6, EOS]


def test_packing_masks_labels_across_an_eos_and_counts_documents(tmp_path: Path) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, PACKED), 8, pack_sequences=True, eos_token_id=EOS)
    assert [as_lists(dataset[i]) for i in range(2)] == [
        {
            "input_ids": [7, 0, 8, 9, 0, 0, 4],
            "labels": [0, -100, 9, 0, -100, -100, 5],
            "doc_ids": [0, 0, 1, 1, 1, 2, 3],
        },
        {
            "input_ids": [6, 1, 2, 3, 4, 5, 6],
            "labels": [1, 2, 3, 4, 5, 6, 0],
            "doc_ids": [0] * 7,
        },
    ]


def test_a_packed_batch_has_what_attention_by_documents_needs(tmp_path: Path) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, PACKED), 8, pack_sequences=True, eos_token_id=EOS)
    batch = dataset.take([0, 1])
    expected = naive(after_eos([PACKED[:8], PACKED[8:]], EOS))
    assert batch["doc_ids"].tolist() == expected.doc_ids
    assert batch["position_ids"].tolist() == expected.position_ids
    assert batch["cu_seqlens"].tolist() == expected.cu_seqlens
    assert batch["max_seqlen"] == expected.max_seqlen
    assert (batch["labels"].reshape(-1) == -100).nonzero()[:, 0].tolist() == expected.ignored
    for key in ("doc_ids", "position_ids", "cu_seqlens"):
        assert batch[key].dtype == torch.int32


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=6),
    eos=st.integers(0, 3),
)
def test_packed_samples_are_those_of_a_loop_over_the_tokens(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], eos: int
) -> None:
    folder = npy(tmp_path_factory.mktemp("tokens"), np.concatenate(rows))
    dataset = MemoryMappedDataset(folder, 5, pack_sequences=True, eos_token_id=eos)
    for i, row in enumerate(rows):
        expected = naive(after_eos([row], eos))
        labels = [-100 if at in expected.ignored else t for at, t in enumerate(row[1:])]
        assert as_lists(dataset[i]) == {
            "input_ids": row[:-1],
            "labels": labels,
            "doc_ids": expected.doc_ids[0],
        }


def test_packing_without_an_eos_token_id_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eos_token_id is required"):
        MemoryMappedDataset(npy(tmp_path, np.arange(8)), 4, pack_sequences=True)


@pytest.mark.parametrize(("dtype", "eos"), [("uint8", 256), ("uint16", 65_536), ("uint16", -1)])
def test_an_eos_that_the_dtype_cannot_hold_is_refused(tmp_path: Path, dtype: str, eos: int) -> None:
    with pytest.raises(ConfigError, match=f"eos_token_id {eos} cannot be found among {dtype}"):
        MemoryMappedDataset(
            npy(tmp_path, np.arange(8), dtype=dtype), 4, pack_sequences=True, eos_token_id=eos
        )


def test_an_eos_without_packing_changes_nothing(tmp_path: Path) -> None:
    dataset = MemoryMappedDataset(npy(tmp_path, PACKED), 8, eos_token_id=EOS)
    assert list(dataset[0]) == ["input_ids", "labels"]
    assert (dataset[0]["labels"] != -100).all()


# -------------------------------------------------------------------- batches and torch's loader


@pytest.fixture(params=[False, True], ids=["plain", "packed"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> MemoryMappedDataset:
    rng = np.random.default_rng(3)
    files = [rng.integers(0, 6, size) for size in (50, 41, 7, 90)]
    return MemoryMappedDataset(
        npy(tmp_path, *files), 8, pack_sequences=request.param, eos_token_id=EOS
    )


def test_take_is_the_items_collated(dataset: MemoryMappedDataset) -> None:
    indices = [3, 0, 21, 3, 7]
    batch = dataset.take(indices)
    items = default_collate([dataset[i] for i in indices])
    assert as_lists({key: batch[key] for key in DOCUMENTED if key in batch}) == as_lists(items)


def test_a_batch_cut_from_a_group_is_the_batch_taken_alone(dataset: MemoryMappedDataset) -> None:
    indices = np.random.default_rng(0).permutation(len(dataset))
    group = dataset.gather(indices)
    for lo in range(0, len(indices), 5):
        hi = min(lo + 5, len(indices))
        assert as_lists(group.batch(lo, hi)) == as_lists(dataset.take(indices[lo:hi]))


@pytest.mark.parametrize("workers", [0, 1])
def test_torchs_own_loader_gives_the_same_batches(
    dataset: MemoryMappedDataset, workers: int
) -> None:
    loader = DataLoader(dataset, batch_size=4, num_workers=workers)
    batches = list(loader)
    assert len(batches) == -(-len(dataset) // 4)
    for at, batch in enumerate(batches):
        ours = dataset.take(range(at * 4, min(at * 4 + 4, len(dataset))))
        assert as_lists(batch) == as_lists({key: ours[key] for key in batch})


def test_torchs_own_loader_fetches_a_batch_at_once(
    dataset: MemoryMappedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = record_takes(monkeypatch, dataset)
    next(iter(DataLoader(dataset, batch_size=4)))
    assert taken == [[0, 1, 2, 3]]


def test_every_batch_has_tensors_of_its_own(dataset: MemoryMappedDataset) -> None:
    group = dataset.gather(np.arange(6))
    check_fresh(
        group.batch(0, 1),
        group.batch(0, 1),
        group.batch(1, 6),
        dataset.take([0]),
        dataset.take([0, 1]),
        dataset[0],
        dataset[0],
        {"group": torch.from_numpy(group.tokens)},
    )


def test_writing_into_a_batch_changes_no_file_and_no_other_batch(
    dataset: MemoryMappedDataset,
) -> None:
    expected = as_lists(dataset.take([0, 1]))
    for tensor in dataset.take([0, 1]).values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(9)
    assert as_lists(dataset.take([0, 1])) == expected


def test_take_of_nothing_is_an_empty_batch(dataset: MemoryMappedDataset) -> None:
    batch = dataset.take([])
    assert batch["input_ids"].shape == batch["labels"].shape == (0, 7)
    assert batch["labels"].dtype == torch.int64
    if dataset.pack_sequences:
        assert batch["cu_seqlens"].tolist() == [0]
        assert batch["max_seqlen"] == 0
    assert dataset.__getitems__([]) == []


def test_a_pickled_dataset_opens_its_files_again(dataset: MemoryMappedDataset) -> None:
    copy = pickle.loads(pickle.dumps(dataset))
    assert as_lists(copy.take([0, 5])) == as_lists(dataset.take([0, 5]))
    assert len(pickle.dumps(dataset)) < 4_000


def test_reading_ahead_of_any_sample_is_harmless(dataset: MemoryMappedDataset) -> None:
    dataset.advise(np.arange(len(dataset)))
    dataset.advise(np.empty(0, np.int64))


# --------------------------------------------------------------------------- state and identity


def test_the_state_has_the_documented_keys(dataset: MemoryMappedDataset) -> None:
    assert dataset.state_dict() == {"epoch": 0, "total_samples": len(dataset)}


def test_only_the_epoch_is_restored(dataset: MemoryMappedDataset) -> None:
    dataset.load_state_dict({"epoch": 5, "total_samples": 10**6})
    assert dataset.state_dict() == {"epoch": 5, "total_samples": len(dataset)}


def test_the_identity_is_json_and_tells_how_samples_are_cut(tmp_path: Path) -> None:
    folder = npy(tmp_path, np.arange(18))
    nine: Any = np.int64(9)
    three: Any = np.uint16(3)
    numpys = MemoryMappedDataset(folder, nine, pack_sequences=True, eos_token_id=three)
    plain = MemoryMappedDataset(folder, 9)
    sliding = WindowDataset(open_store(folder), 8)
    identities = [json.dumps(each.identity()) for each in (numpys, plain, sliding)]
    assert len(set(identities)) == 3
    assert plain.identity()["data"] == sliding.identity()["data"]


def test_the_identity_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    for folder, last in ((one, 7), (two, 7), (three, 8)):
        npy(folder, [1, 2, 3, last])
    a, b, c = (MemoryMappedDataset(folder, 2).identity() for folder in (one, two, three))
    assert a == b
    assert a != c


# -------------------------------------------------------------------------------- over real stores


def test_the_shards_of_a_store_are_its_files(tmp_path: Path) -> None:
    folder = documents(tmp_path / "s", [1, 2, 3, 4, 0], [5, 6, 7, 0], [8, 9, 0], shard=7)
    dataset = MemoryMappedDataset(folder, 2)
    assert [tokens_of(dataset[i]) for i in range(len(dataset))] == [
        [1, 2],
        [3, 4],
        [5, 6],
        [7, 0],
        [8, 9],
    ]


def test_a_loss_mask_beside_the_tokens_masks_labels(tmp_path: Path) -> None:
    folder = astrai(
        tmp_path / "a",
        {"sequence": np.arange(6, dtype=np.int32), "loss_mask": np.array([1, 0, 1, 1, 1, 0])},
    )
    dataset = MemoryMappedDataset(folder, 3, "*.bin")
    assert dataset.take([0, 1])["labels"].tolist() == [[-100, 2], [4, -100]]
