"""Stores that other tools wrote: AstrAI's folders, .npy files, raw .bin files."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.helpers import edit_json, write_flat

from penstock.errors import ConfigError, DataError, MissingData
from penstock.store import MmapStore, open_store, verify

ids = st.lists(st.integers(0, 30_000), max_size=20)


@settings(max_examples=50)
@given(
    shards=st.dictionaries(st.sampled_from(["b", "a", "a/x", "c", "a/y"]), ids, min_size=1),
    dtypes=st.lists(st.sampled_from(["uint16", "int32", "int64"]), min_size=5, max_size=5),
    data=st.data(),
)
def test_astrai_folders_are_one_sequence_sorted_by_path(tmp_path_factory, shards, dtypes, data):
    root = tmp_path_factory.mktemp("flat")
    for (name, values), dtype in zip(shards.items(), dtypes, strict=False):
        write_flat(root / name, {"sequence": np.array(values, dtype)})
    expected = [
        value for name in sorted(shards, key=lambda n: n.split("/")) for value in shards[name]
    ]
    with open_store(root) as store:
        assert store.keys == ["sequence"]
        assert len(store) == len(expected)
        assert store.documents == 0
        assert store._data["sequence"][0].flags.writeable is False
        if expected:
            begin = data.draw(st.integers(0, len(expected) - 1))
            end = data.draw(st.integers(begin, len(expected)))
            assert store.fetch(begin, end, "sequence").tolist() == expected[begin:end]
            length = data.draw(st.integers(1, len(expected)))
            starts = data.draw(st.lists(st.integers(0, len(expected) - length), max_size=5))
            rows = [expected[start : start + length] for start in starts]
            assert store.gather(starts, length, "sequence").tolist() == rows
        assert verify(root).ok


@settings(max_examples=50)
@given(
    lengths=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=4)
)
def test_astrai_offsets_give_records_over_any_number_of_shards(tmp_path_factory, lengths):
    root = tmp_path_factory.mktemp("flat")
    records = []
    for shard, counts in enumerate(lengths):
        values = np.arange(sum(counts)) + 100 * shard
        edges = np.cumsum([0, *counts]).tolist()
        # The final total may be left out, unless that would leave out an empty last record.
        stated = edges[:-1] if shard % 2 and counts[-1] else edges
        write_flat(root / f"shard_{shard}", {"chosen": values, "rejected": values}, stated)
        records += [values[a:b].tolist() for a, b in pairwise(edges)]
    store = open_store(root)
    assert store.documents == len(records)
    assert [store.record(i, "rejected").tolist() for i in range(len(records))] == records
    assert store.record_lengths("chosen").tolist() == [len(record) for record in records]


def test_astrai_keys_of_different_lengths_have_the_least_as_length(tmp_path):
    store = open_store(write_flat(tmp_path, {"chosen": np.arange(9), "rejected": np.arange(7)}))
    assert len(store) == 7
    assert store.total("chosen") == 9
    with pytest.raises(ValueError, match="out of bounds"):
        store.fetch(0, 8, "chosen")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ([], "shape"),
        (None, "shape"),
        ({"dtype": "int32"}, "shape"),
        ({"shape": [-1], "dtype": "int32"}, "shape"),
        ({"shape": [10**40], "dtype": "int32"}, "shape"),
        ({"shape": [2, 2], "dtype": "int32"}, "shape"),
        ({"shape": [True], "dtype": "int32"}, "shape"),
        ({"shape": ["4"], "dtype": "int32"}, "shape"),
        ({"shape": [4]}, "dtype None"),
        ({"shape": [4], "dtype": "object"}, "dtype 'object'"),
        ({"shape": [4], "dtype": "bfloat16"}, "dtype 'bfloat16'"),
        ({"shape": [4], "dtype": ["i4"]}, "dtype"),
        ({"shape": [4], "dtype": "int32", "offsets": 3}, "offsets"),
        ({"shape": [4], "dtype": "int32", "offsets": [0, "2"]}, "offsets"),
        ({"shape": [4], "dtype": "int32", "offsets": [0, 3, 2]}, "offsets"),
        ({"shape": [4], "dtype": "int32", "offsets": [1, 2]}, "offsets"),
        ({"shape": [4], "dtype": "int32", "offsets": [0, 5]}, "offsets"),
        ({"shape": [4], "dtype": "int32", "offsets": [[0], [1, 2]]}, "offsets"),
        ({"shape": [4], "dtype": "int32", "offsets": [0, 10**30]}, "offsets"),
    ],
)
def test_a_hostile_flat_meta_is_one_sentence(tmp_path, entry, words):
    write_flat(tmp_path, {"sequence": np.arange(4, dtype=np.int32)})
    good = {"shape": [4], "dtype": "int32"}
    (tmp_path / "meta.json").write_text(json.dumps({"first": good, "sequence": entry}))
    with pytest.raises(DataError, match=words) as caught:
        open_store(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "key", ["../x", "/etc/passwd", "a/../../x", "a\\b", "a\0b", "", ".", "..", "a/b"]
)
def test_a_flat_meta_cannot_name_a_file_outside_its_folder(tmp_path, key):
    write_flat(tmp_path, {"sequence": np.arange(4)})
    meta = {"sequence": {"shape": [4], "dtype": "int64"}, key: {"shape": [1], "dtype": "int8"}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match="not the name of a file beside it"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"x"', "\ud800".encode("utf-8", "surrogatepass"), "[" * 100_000]
)
def test_a_meta_that_is_not_an_object_is_one_sentence(tmp_path, text):
    write_flat(tmp_path, {"sequence": np.arange(4)})
    (tmp_path / "meta.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=r"meta\.json"):
        open_store(tmp_path)


def test_a_link_that_leaves_the_folder_is_refused_and_one_inside_is_not(tmp_path):
    (tmp_path / "secret.bin").write_bytes(bytes(32))
    store = write_flat(tmp_path / "store", {"sequence": np.arange(4)})
    (store / "inner.bin").symlink_to(store / "sequence.bin")
    (store / "outer.bin").symlink_to(tmp_path / "secret.bin")

    def add(meta):
        meta["inner"] = meta["outer"] = meta["sequence"]

    edit_json(store / "meta.json", add)
    with pytest.raises(DataError, match=r"outer\.bin is a symbolic link that leaves"):
        open_store(store)
    (store / "outer.bin").unlink()
    edit_json(store / "meta.json", lambda meta: meta.pop("outer"))
    assert open_store(store).read(0, 4, "inner").tolist() == [0, 1, 2, 3]


def test_a_file_of_another_size_than_its_shape_is_named_when_it_is_read(tmp_path):
    store = write_flat(tmp_path, {"sequence": np.arange(4), "extra": np.arange(4)})
    (store / "sequence.bin").write_bytes(bytes(31))
    (store / "extra.bin").write_bytes(bytes(40))
    opened = open_store(store)
    with pytest.raises(DataError, match=r"sequence\.bin holds 31 bytes where 32 .*cut short"):
        opened.read(0, 1, "sequence")
    with pytest.raises(DataError, match=r"extra\.bin holds 40 bytes where 32 .*too long"):
        opened.gather([0], 2, "extra")
    (store / "extra.bin").unlink()
    with pytest.raises(MissingData, match=r"extra\.bin is missing"):
        opened.read(0, 1, "extra")


def test_mixed_dtypes_that_no_integer_holds_are_refused(tmp_path):
    write_flat(tmp_path / "a", {"sequence": np.arange(4, dtype=np.uint64)})
    write_flat(tmp_path / "b", {"sequence": np.arange(4, dtype=np.int64)})
    with pytest.raises(DataError, match="mixes int64, uint64"):
        open_store(tmp_path)


def test_mixed_dtypes_widen_alike_within_and_across_shards(tmp_path):
    write_flat(tmp_path / "a", {"sequence": np.arange(4, dtype=np.uint16)})
    write_flat(tmp_path / "b", {"sequence": np.arange(4, dtype=np.int32) - 2})
    store = open_store(tmp_path)
    assert store.dtype("sequence") == np.int32
    for begin, end in ((0, 2), (2, 6), (5, 8)):
        assert store.read(begin, end, "sequence").dtype == np.int32
    assert store.gather([0, 3], 2, "sequence").tolist() == [[0, 1], [3, -2]]
    store.advise([0, 3], 2, "sequence")
    assert store.share_memory_().gather([0, 3], 2, "sequence").tolist() == [[0, 1], [3, -2]]


# ---------------------------------------------------------------------------- aligned keys


def refused(path, words):
    """By open_store, in a sentence that verify reports too."""
    with pytest.raises(DataError, match=words) as caught:
        open_store(path)
    assert "\n" not in str(caught.value)
    assert verify(path).problems == [str(caught.value)]


@pytest.mark.parametrize(
    ("lead", "key"),
    [
        ("sequence", "loss_mask"),
        ("sequence", "position_ids"),
        ("chosen", "chosen_mask"),
        ("rejected", "rejected_mask"),
        ("responses", "masks"),
    ],
)
def test_aligned_keys_are_in_every_folder_with_equal_lengths(tmp_path, lead, key):
    write_flat(tmp_path / "a", {lead: np.arange(10)})
    write_flat(tmp_path / "b", {lead: np.arange(5), key: np.ones(5)})
    refused(tmp_path, rf"a/meta\.json: '{lead}' has lengths \[10\] and '{key}' none")
    write_flat(tmp_path / "a", {lead: np.arange(10), key: np.ones(5)})
    write_flat(tmp_path / "b", {lead: np.arange(5), key: np.ones(10)})
    refused(tmp_path, rf"a/meta\.json: '{lead}' has lengths \[10\] and '{key}' \[5\]")
    write_flat(tmp_path / "a", {lead: np.arange(10), key: np.ones(10)})
    write_flat(tmp_path / "b", {key: np.ones(10)})
    refused(tmp_path, rf"b/meta\.json: '{lead}' has lengths none and '{key}' \[10\]")


def test_keys_of_one_record_have_as_many_records_in_every_folder(tmp_path):
    write_flat(tmp_path / "a", {"chosen": np.arange(4), "chosen_mask": np.ones(4)}, [0, 2])
    write_flat(tmp_path / "b", {"rejected": np.arange(4)}, [0, 2])
    refused(tmp_path, r"a/meta\.json: 'chosen' has records: 2 and 'rejected' 0")

    def other_offsets(meta):
        meta["chosen_mask"]["offsets"] = [0, 3]

    edit_json(tmp_path / "a/meta.json", other_offsets)
    refused(tmp_path, r"'chosen' has records of sizes \[2, 2\] and 'chosen_mask' \[3, 1\]")


def test_keys_that_do_not_belong_together_may_have_any_lengths(tmp_path):
    arrays = {"chosen": np.arange(9), "rejected": np.arange(7), "other": np.arange(3)}
    write_flat(tmp_path / "a", arrays)
    write_flat(tmp_path / "b", {"other": np.arange(2), "prompts": np.arange(4)})
    assert open_store(tmp_path).keys == ["chosen", "rejected", "other", "prompts"]
    assert verify(tmp_path).ok


# ---------------------------------------------------------------------------- folder by folder


def test_the_folders_own_token_files_come_before_a_store_further_below(tmp_path):
    np.save(tmp_path / "train.npy", np.arange(5))
    write_flat(tmp_path / "val", {"sequence": np.arange(90, 94)})
    assert open_store(tmp_path).read(0, 5, "sequence").tolist() == [0, 1, 2, 3, 4]
    (tmp_path / "train.npy").unlink()
    assert open_store(tmp_path).read(0, 4, "sequence").tolist() == [90, 91, 92, 93]


def test_a_store_in_the_folder_itself_comes_before_hdf5_further_below(tmp_path):
    write_flat(tmp_path, {"sequence": np.arange(5)})
    (tmp_path / "val").mkdir()
    with h5py.File(tmp_path / "val/v.h5", "w") as file:
        file["sequence/data_0"] = np.arange(90, 94)
    assert open_store(tmp_path).read(0, 5, "sequence").tolist() == [0, 1, 2, 3, 4]


def test_a_pattern_chooses_files_whatever_stores_lie_below(tmp_path):
    np.save(tmp_path / "train.npy", np.arange(5))
    (tmp_path / "val").mkdir()
    with h5py.File(tmp_path / "val/v.h5", "w") as file:
        file["sequence/data_0"] = np.arange(90, 94)
    assert len(open_store(tmp_path, file_pattern="*.npy")) == 5
    assert len(open_store(tmp_path, file_pattern="*.nothing")) == 4


def test_a_pattern_that_matches_parts_of_stores_opens_the_stores_and_mixes_no_others_in(tmp_path):
    for name in "ab":
        write_flat(tmp_path / name, {"sequence": np.arange(3), "loss_mask": np.ones(3, bool)})
    store = open_store(tmp_path, file_pattern="**/*.bin")
    assert store.keys == ["sequence", "loss_mask"]
    assert len(store) == 6
    np.arange(4, dtype=np.uint16).tofile(tmp_path / "x.bin")
    with pytest.raises(ConfigError, match=r"x\.bin and also .*narrow the pattern"):
        open_store(tmp_path, file_pattern="**/*.bin", dtype="uint16")
    assert len(open_store(tmp_path, file_pattern="*.bin", dtype="uint16")) == 4


def test_a_first_meta_that_states_just_a_dtype_does_not_make_raw_files_of_stores(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/meta.json").write_text(json.dumps({"dtype": "uint16"}))
    write_flat(tmp_path / "b", {"sequence": np.arange(3), "loss_mask": np.ones(3, bool)})
    with pytest.raises(DataError, match=r"a/meta\.json describes 'dtype'"):
        open_store(tmp_path)


# ---------------------------------------------------------------------------- .npy


def test_npy_files_are_shards_in_the_order_of_their_paths(tmp_path):
    for name, values in (("b", [4, 5]), ("a", [1, 2, 3]), ("empty", [])):
        np.save(tmp_path / f"{name}.npy", np.array(values, np.uint16))
    (tmp_path / ".hidden.npy").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    store = open_store(tmp_path)
    assert store.read(0, 5, "sequence").tolist() == [1, 2, 3, 4, 5]
    assert store.bounds("sequence").tolist() == [0, 3, 5, 5]
    assert store.gather([2, 0], 3, "sequence").tolist() == [[3, 4, 5], [1, 2, 3]]
    assert open_store(tmp_path, file_pattern="b*.npy").read(0, 2, "sequence").tolist() == [4, 5]
    assert open_store(tmp_path / "a.npy").read(0, 3, "sequence").tolist() == [1, 2, 3]
    with pytest.raises(MissingData, match=r"nothing matches z\*"):
        open_store(tmp_path, file_pattern="z*")
    with pytest.raises(DataError, match=r"Unsupported file format: \.txt"):
        open_store(tmp_path, file_pattern="*.txt")
    with pytest.raises(ConfigError, match="file_pattern"):
        open_store(tmp_path, file_pattern="/etc/*")
    assert verify(tmp_path).notes == [
        f"{tmp_path} has no manifest.json, so there are no checksums to compare with."
    ]


@pytest.mark.parametrize("dtype", [">u2", "<u2", "u1", ">i8", "<i4"])
def test_npy_files_of_any_integer_type_and_byte_order_are_read(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.arange(5).astype(dtype))
    np.save(tmp_path / "b.npy", np.arange(5, 9).astype(dtype))
    store = open_store(tmp_path)
    assert store.read(3, 7, "sequence").tolist() == [3, 4, 5, 6]
    assert store.gather([0, 4], 4, "sequence").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert store.fetch(1, 3, "sequence").tolist() == [1, 2]
    assert open_store(tmp_path / "a.npy").gather([1], 2, "sequence").tolist() == [[1, 2]]


def test_npy_files_that_hold_no_tokens_are_refused(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"x\.npy holds object values"):
        open_store(path)
    np.save(path, np.zeros((2, 3), np.int32))
    with pytest.raises(DataError, match=r"shape \(2, 3\).*reshape"):
        open_store(path)
    np.save(path, np.zeros(3))
    with pytest.raises(DataError, match="float64 values, where integer tokens"):
        open_store(path)
    np.save(path, np.arange(100))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"x\.npy holds .* announces 100 of int64: it was cut"):
        open_store(path)
    for raw in (
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\xff\xff",
        b"\x93NUMPY\x09\x00",
        b"PK\x03\x04",
    ):
        path.write_bytes(raw)
        with pytest.raises(DataError, match=r"x\.npy is not a \.npy file"):
            open_store(path)
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999999999999,), }\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(DataError, match=r"x\.npy"):
        open_store(path)


# ---------------------------------------------------------------------------- raw .bin


def test_a_raw_bin_of_unknown_dtype_is_an_error_that_says_how_to_state_it(tmp_path):
    np.arange(6, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    for path in (tmp_path, tmp_path / "tokens.bin"):
        with pytest.raises(ConfigError, match=r"tokens\.bin has no meta\.json.*dtype='uint16'"):
            open_store(path)
        assert open_store(path, dtype="uint16").read(0, 6, "sequence").tolist() == list(range(6))
        assert len(open_store(path, dtype=np.uint8)) == 12
    one, other = (open_store(tmp_path, dtype=dtype).fingerprint for dtype in ("uint16", "int16"))
    assert one != other


def test_a_meta_beside_a_raw_bin_states_its_dtype(tmp_path):
    np.arange(6, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    for meta in ({"dtype": "uint16"}, {"tokens": {"dtype": "uint16"}}):
        (tmp_path / "meta.json").write_text(json.dumps(meta))
        for path in (tmp_path, tmp_path / "tokens.bin"):
            assert open_store(path).read(0, 6, "sequence").tolist() == list(range(6))


def test_each_raw_file_has_the_dtype_that_its_own_meta_states(tmp_path):
    for name, dtype in (("a", "uint16"), ("b", "uint32")):
        np.array([1, 2, 3], dtype).tofile(tmp_path / f"{name}.bin")
    (tmp_path / "c").mkdir()
    np.array([7, 70_000], np.int64).tofile(tmp_path / "c/x.bin")
    (tmp_path / "c/meta.json").write_text(json.dumps({"dtype": "int64"}))
    entries = {"a": {"dtype": "uint16"}, "b": {"dtype": "uint32"}}
    (tmp_path / "meta.json").write_text(json.dumps(entries))
    store = open_store(tmp_path, file_pattern="**/*.bin")
    assert store.dtype("sequence") == np.int64
    assert store.read(0, 8, "sequence").tolist() == [1, 2, 3, 1, 2, 3, 7, 70_000]
    assert store.fingerprint == open_store(tmp_path, file_pattern="**/*.bin").fingerprint
    assert open_store(tmp_path).read(0, 6, "sequence").tolist() == [1, 2, 3, 1, 2, 3]


def test_a_default_dtype_is_for_files_of_which_nothing_states_one(tmp_path):
    np.array([1, 2], np.uint32).tofile(tmp_path / "a.bin")
    np.array([3, 4], np.uint16).tofile(tmp_path / "b.bin")
    (tmp_path / "meta.json").write_text(json.dumps({"a": {"dtype": "uint32"}}))
    store = MmapStore(default_dtype="uint16").load(tmp_path)
    assert store.read(0, 4, "sequence").tolist() == [1, 2, 3, 4]
    assert len(MmapStore(dtype="uint16", default_dtype="uint32").load(tmp_path)) == 6


def test_a_meta_beside_a_raw_bin_that_states_no_dtype_is_said(tmp_path):
    np.arange(6, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    for meta in ({}, {"other": {"dtype": "uint16"}}, {"dtype": None}):
        (tmp_path / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(
            ConfigError, match=r"a meta\.json beside it which states no dtype for it"
        ):
            open_store(tmp_path)


def test_a_raw_bin_holds_a_whole_number_of_tokens(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(7))
    with pytest.raises(DataError, match=r"x\.bin holds 7 bytes, which is not a whole number"):
        MmapStore(dtype="uint32").load(tmp_path)
    for wrong in ("float32", "object", "nonsense"):
        with pytest.raises(ConfigError, match="dtype"):
            MmapStore(dtype=wrong).load(tmp_path)
    with pytest.raises(MissingData):
        MmapStore(dtype="uint16").load(tmp_path / "y.bin")


def test_empty_files_are_empty_stores(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"")
    store = open_store(tmp_path, dtype="uint16")
    assert len(store) == 0
    assert store.gather([], 5, "sequence").shape == (0, 5)
    store.advise([], 5, "sequence")
    assert store.share_memory_().total("sequence") == 0


@pytest.mark.skipif(sys.byteorder != "little", reason="compares native views")
def test_nothing_is_copied_to_map_a_file(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "x.bin")
    store = open_store(tmp_path, dtype="uint16")
    first, second = store.read(0, 1000, "sequence"), store.read(500, 1000, "sequence")
    assert np.shares_memory(first, second)
    raw = (500).to_bytes(2, "little")
    with (tmp_path / "x.bin").open("r+b") as file:
        file.write(raw)
    assert first[0] == 500, "the file itself is what is read"
