"""HDF5 files: AstrAI's and our own, read lazily, in numeric order, and never through a link."""

from __future__ import annotations

import multiprocessing
import os

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.helpers import edit_json, token_records, write

from penstock.errors import DataError, MissingData
from penstock.store import H5Store, Key, MmapStore, open_store, verify


def write_groups(path, groups, **options):
    with h5py.File(path, "w") as file:
        for key, arrays in groups.items():
            group = file.create_group(key)
            for index, values in enumerate(arrays):
                group.create_dataset(f"data_{index}", data=np.asarray(values), **options)
    return path


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"chunks": (1,)}])
def test_datasets_come_in_numeric_order_data_0_to_data_10(tmp_path, options):
    arrays = [[i] * (i + 1) for i in range(11)]
    path = write_groups(tmp_path / "x.h5", {"sequence": arrays}, **options)
    store = open_store(path)
    expected = [i for i in range(11) for _ in range(i + 1)]
    assert store.read(0, 66, "sequence").tolist() == expected
    assert store.gather([0, 40, 60], 6, "sequence").tolist() == [
        expected[start : start + 6] for start in (0, 40, 60)
    ]
    assert store.documents == 11
    assert store.record(10, "sequence").tolist() == [10] * 11
    store.advise([0, 40], 6, "sequence")
    assert verify(path).ok


def test_files_of_a_folder_are_sorted_by_path(tmp_path):
    (tmp_path / "a").mkdir()
    write_groups(tmp_path / "b.h5", {"sequence": [[3], [4]]})
    write_groups(tmp_path / "a/z.hdf5", {"sequence": [[1, 2]]})
    write_groups(tmp_path / "a/c.h5", {"sequence": [[0]]})
    store = H5Store().load(tmp_path)
    assert store.read(0, 5, "sequence").tolist() == [0, 1, 2, 3, 4]
    assert store.fingerprint == open_store(tmp_path).fingerprint


def test_a_dataset_without_a_group_is_a_stretch_of_values(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["sequence"] = np.arange(5)
    store = open_store(tmp_path)
    assert store.read(1, 4, "sequence").tolist() == [1, 2, 3]
    assert store.documents == 0


def test_preference_files_are_read_record_by_record(tmp_path):
    write_groups(tmp_path / "a.h5", {"chosen": [[1, 2], [3]], "rejected": [[4], [5, 6, 7]]})
    write_groups(tmp_path / "b.h5", {"chosen": [[8]], "rejected": [[9, 10]]})
    with h5py.File(tmp_path / "b.h5", "a") as file:
        file["rewards/data_0"] = np.array([0.25, np.nan], np.float32)
    store = open_store(tmp_path)
    found = [store.record(i, ["chosen", "rejected"]) for i in range(3)]
    assert [r["chosen"].tolist() for r in found] == [[1, 2], [3], [8]]
    assert [r["rejected"].tolist() for r in found] == [[4], [5, 6, 7], [9, 10]]
    assert store.record(0, "rewards")[0] == np.float32(0.25)


def test_a_group_in_place_of_a_dataset_is_a_nested_record(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for record, lengths in enumerate([[2, 0], [], [1]]):
            group = file.create_group(f"responses/data_{record}")
            for item, length in enumerate(lengths):
                group[f"data_{item}"] = np.full(length, 10 * record + item)
    store = open_store(tmp_path)
    assert store.documents == 3
    found = [[part.tolist() for part in store.record(i, "responses")] for i in range(3)]
    assert found == [[[0, 0], []], [], [[20]]]


def test_aligned_keys_are_in_every_file_with_equal_lengths(tmp_path):
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    write_groups(a, {"sequence": [[1, 2]]})
    write_groups(b, {"sequence": [[3]], "loss_mask": [[1]]})
    with pytest.raises(DataError, match=r"a\.h5: 'sequence' has lengths \[2\] and .* none"):
        open_store(tmp_path)
    write_groups(a, {"sequence": [np.arange(10), np.arange(5)], "loss_mask": [[1] * 5, [1] * 10]})
    with pytest.raises(DataError, match=r"'sequence' has lengths \[10, 5\] and .* \[5, 10\]"):
        open_store(tmp_path)
    assert "[10, 5]" in verify(tmp_path).problems[0]
    with h5py.File(a, "w") as file:
        file["sequence"] = np.arange(3)
        file["loss_mask/data_0"] = np.ones(3, np.int64)
    assert open_store(tmp_path).total("loss_mask") == 4


def test_preference_files_have_as_many_records_of_each_key(tmp_path):
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    write_groups(a, {"chosen": [[1], [2]], "rejected": [[3]]})
    write_groups(b, {"chosen": [[4]], "rejected": [[5], [6]]})
    for there in (a, tmp_path):
        with pytest.raises(DataError, match=r"a\.h5: 'chosen' has records: 2 and 'rejected' 1"):
            open_store(there)
    with h5py.File(a, "w") as file:
        file["chosen/data_0"] = np.arange(3)
        file.create_group("rejected")
    with pytest.raises(DataError, match=r"a\.h5: 'chosen' has records: 1 and 'rejected' 0"):
        open_store(tmp_path)


def test_groups_of_responses_and_their_masks_have_the_same_items(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, split in (("responses", [[2], [2]]), ("masks", [[2, 2], []])):
            for record, lengths in enumerate(split):
                file.create_group(f"{name}/data_{record}")
                for item, length in enumerate(lengths):
                    file[f"{name}/data_{record}/data_{item}"] = np.ones(length)
    with pytest.raises(DataError, match=r"records of sizes \[1, 1\] and 'masks' \[2, 0\]"):
        open_store(tmp_path)


def test_a_key_whose_records_are_known_in_one_file_alone_has_none(tmp_path):
    write_groups(tmp_path / "a.h5", {"sequence": [[1], [2]]})
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["sequence"] = np.arange(3)
    store = open_store(tmp_path)
    assert store.documents == 0
    assert len(store) == 5


def test_contiguous_datasets_are_mapped_and_not_read_by_h5py(tmp_path, monkeypatch):
    path = write_groups(tmp_path / "x.h5", {"sequence": [np.arange(1000, dtype=np.uint16)] * 3})
    store = open_store(path)
    monkeypatch.setattr(h5py.Dataset, "__getitem__", lambda *_: pytest.fail("h5py read a slice"))
    assert np.shares_memory(store.read(5, 9, "sequence"), store.read(0, 1000, "sequence"))
    assert store.gather([0, 999, 2500], 500, "sequence").shape == (3, 500)


def test_slices_of_compressed_datasets_are_read_lazily(tmp_path, monkeypatch):
    path = write_groups(tmp_path / "x.h5", {"sequence": [np.arange(1000)]}, compression="gzip")
    asked = []
    plain = h5py.Dataset.__getitem__

    def count(dataset, span, *rest):
        asked.append(span)
        return plain(dataset, span, *rest)

    monkeypatch.setattr(h5py.Dataset, "__getitem__", count)
    store = open_store(path)
    assert asked == []
    assert store.read(5, 9, "sequence").tolist() == [5, 6, 7, 8]
    assert asked == [slice(5, 9)]


def test_every_number_type_and_byte_order_is_read(tmp_path):
    for dtype in ("bool", "uint8", ">u2", "int32", ">i8", "uint64", "float16", ">f4", "float64"):
        path = tmp_path / "x.h5"
        write_groups(path, {"sequence": [np.arange(2).astype(dtype), np.arange(3).astype(dtype)]})
        store = open_store(path)
        assert (
            store.read(1, 5, "sequence").tolist() == np.array([1, 0, 1, 2]).astype(dtype).tolist()
        )
        assert (
            store.gather([1, 2], 2, "sequence")[0].tolist()
            == np.array([1, 0]).astype(dtype).tolist()
        )
        assert store.fetch(0, 2, "sequence").tolist() == np.arange(2).astype(dtype).tolist()


def refuse(path, words):
    with pytest.raises(DataError, match=words) as caught:
        open_store(path)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_links_and_data_outside_the_file_are_refused(tmp_path):
    other = write_groups(tmp_path / "other.bin", {"sequence": [[1, 2, 3]]})
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["sequence"] = h5py.ExternalLink(str(other), "/sequence")
    refuse(path, "soft or external link")
    with h5py.File(path, "w") as file:
        file.create_group("sequence")["data_0"] = h5py.ExternalLink(str(other), "/sequence/data_0")
    refuse(path, "soft or external link")
    with h5py.File(path, "w") as file:
        file.create_group("sequence")["data_0"] = h5py.SoftLink("/elsewhere")
    refuse(path, "soft or external link")
    with h5py.File(path, "w") as file:
        group = file.create_group("sequence")
        group.create_dataset("data_0", (4,), "i4", external=[("/etc/hostname", 0, 16)])
    refuse(path, "outside the file")
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((3,), "i8")
        layout[:] = h5py.VirtualSource(str(other), "sequence/data_0", (3,))
        file.create_group("sequence").create_virtual_dataset("data_0", layout)
    refuse(path, "outside the file")


def test_what_holds_no_numbers_is_refused(tmp_path):
    path = tmp_path / "x.h5"
    for values, words in (
        (np.array([b"abc"]), "values, where numbers were expected"),
        (np.zeros(2, [("a", "i4")]), "values, where numbers were expected"),
        (np.zeros((2, 3)), r"shape \(2, 3\)"),
        (np.int64(3), r"shape \(\)"),
    ):
        write_groups(path, {"sequence": [values]})
        refuse(path, words)
    with h5py.File(path, "w") as file:
        group = file.create_group("sequence")
        group.create_dataset("data_0", (2,), h5py.string_dtype())
    refuse(path, "object values")
    with h5py.File(path, "w") as file:
        file.create_group("sequence")["data_0"] = np.dtype("i4")
    refuse(path, "not a dataset")
    path.write_bytes(b"not an HDF5 file")
    refuse(path, "not an HDF5 file")
    write_groups(path, {"sequence": [np.arange(10_000)]})
    path.write_bytes(path.read_bytes()[:5000])
    refuse(path, "not an HDF5 file that can be read")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(MissingData, match=r"No supported data files found.*no \.h5"):
        H5Store().load(empty)


def test_share_memory_copies_everything_when_loaded(tmp_path):
    path = write_groups(tmp_path / "x.h5", {"chosen": [[1, 2], [3]], "rejected": [[4], [5, 6]]})
    store = H5Store(share_memory=True).load(tmp_path)
    path.unlink()
    assert store.read(0, 3, "chosen").tolist() == [1, 2, 3]
    assert store.record(1, "rejected").tolist() == [5, 6]
    assert len(store) == 3


def read_in_child(store, pipe):
    pipe.send(store.read(5, 9, "sequence").tolist())


def test_a_forked_process_reads_compressed_data_through_its_own_handle(tmp_path):
    path = write_groups(tmp_path / "x.h5", {"sequence": [np.arange(1000)]}, compression="gzip")
    store = open_store(path)
    assert store.read(0, 2, "sequence").tolist() == [0, 1]  # a handle is open now
    here, there = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        try:
            read_in_child(store, there)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert here.recv() == [5, 6, 7, 8]
    assert store.read(1, 3, "sequence").tolist() == [1, 2]


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    most=st.integers(1, 40),
    committed=st.booleans(),
)
def test_our_own_files_open_with_and_without_their_manifest(
    tmp_path_factory, lengths, most, committed
):
    root = tmp_path_factory.mktemp("h5")
    records = token_records(lengths)
    write(root, records, max_tokens_per_shard=most, storage="h5")
    if not committed:
        (root / "manifest.json").unlink()
    store = open_store(root)
    assert isinstance(store, H5Store)
    assert store.record_lengths().tolist() == lengths
    for index, record in enumerate(records):
        assert store.record(index, "sequence").tolist() == record["sequence"].tolist()
    assert verify(root).ok


def test_one_file_of_ours_opens_alone(tmp_path):
    records = token_records([4, 5])
    write(tmp_path, records, storage="h5")
    store = open_store(tmp_path / "__default__/data_0000.h5")
    assert store.record(1, "loss_mask").tolist() == records[1]["loss_mask"].tolist()


def test_our_files_beside_foreign_ones_are_refused(tmp_path):
    write(tmp_path, token_records([4]), storage="h5")
    (tmp_path / "manifest.json").unlink()
    write_groups(tmp_path / "x.h5", {"sequence": [[1]]})
    with pytest.raises(DataError, match="mixes HDF5 files"):
        open_store(tmp_path)


def test_a_store_of_the_other_storage_says_which_opens_it(tmp_path):
    write(tmp_path / "h5", token_records([4]), storage="h5")
    write(tmp_path / "bin", token_records([4]))
    with pytest.raises(DataError, match="open it with H5Store"):
        MmapStore().load(tmp_path / "h5")
    with pytest.raises(DataError, match="open it with MmapStore"):
        H5Store().load(tmp_path / "bin")


def test_a_shard_that_changed_is_named_when_it_is_read(tmp_path):
    write(tmp_path, token_records([4, 5]), storage="h5")
    file = tmp_path / "__default__/data_0000.h5"
    raw = file.read_bytes()
    store = open_store(tmp_path)
    file.write_bytes(raw + b"\0")
    with pytest.raises(DataError, match=r"data_0000\.h5 holds .* bytes where"):
        store.read(0, 2, "sequence")
    with h5py.File(file, "w") as other:
        other["sequence/data_0"] = np.arange(3, dtype=np.uint16)
    store = open_store(tmp_path)
    with pytest.raises(DataError, match=r"data_0000\.h5 has no dataset loss_mask/data_0"):
        store.read(0, 2, "sequence")
    file.unlink()
    with pytest.raises(MissingData, match=r"data_0000\.h5 is missing"):
        store.read(0, 2, "sequence")


def test_offsets_that_fall_are_named_with_their_file(tmp_path):
    write(tmp_path, token_records([4, 5]), storage="h5")
    with h5py.File(tmp_path / "__default__/data_0000.h5", "r+") as file:
        file["__offsets__/sequence"][1] = 10
    with pytest.raises(DataError, match=r"data_0000\.h5 has offsets that fall after record 1"):
        open_store(tmp_path).cuts([0], 9)


def test_folders_of_bin_shards_that_a_manifest_calls_hdf5_are_one_sentence(tmp_path):
    write(tmp_path, token_records([4]))
    edit_json(tmp_path / "manifest.json", lambda value: value.update(storage="h5"))
    with pytest.raises(DataError, match=r"shard_0000 is not an HDF5 file") as caught:
        open_store(tmp_path).read(0, 1, "sequence")
    assert "\n" not in str(caught.value)


def test_nested_records_are_written_to_hdf5_and_read_back(tmp_path):
    keys = {
        "prompts": "uint16",
        "responses": Key(dtype="uint16", nested=True),
        "rewards": "float32",
    }
    records = [
        {"prompts": [1], "responses": [[2, 3], []], "rewards": [0.5, -1.25]},
        {"prompts": [], "responses": [], "rewards": []},
        {"prompts": [4, 5], "responses": [[6]], "rewards": [3]},
    ]
    store = open_store(write(tmp_path, records, keys, storage="h5", max_tokens_per_shard=4))
    assert len(store.bounds("prompts")) == 3
    for index, record in enumerate(records):
        found = store.record(index, list(keys))
        assert found["prompts"].tolist() == record["prompts"]
        assert [part.tolist() for part in found["responses"]] == record["responses"]
        assert found["rewards"].tolist() == record["rewards"]
