"""What is read is what was written, wherever the shards end."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.helpers import (
    flat_tokens,
    naive_cuts,
    record_lengths,
    three_shards,
    token_records,
    write,
    write_flat,
)

from penstock.errors import ConfigError, DataError, OutOfBounds
from penstock.store import H5Store, MmapStore, Store, StoreFactory, detect_format, open_store


def stores(path: Path, lengths: list[int], most: int) -> list[Store]:
    """The same records mapped, as HDF5, and in shared memory."""
    records = token_records(lengths)
    mapped = write(path / "bin", records, max_tokens_per_shard=most)
    hdf5 = write(path / "h5", records, max_tokens_per_shard=most, storage="h5")
    return [open_store(mapped), open_store(hdf5), open_store(mapped).share_memory_()]


@settings(max_examples=40)
@given(
    lengths=record_lengths,
    most=st.integers(1, 60),
    length=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_gather_and_cuts_agree_with_a_plain_concatenation(
    tmp_path_factory, lengths, most, length, seed
):
    path = tmp_path_factory.mktemp("store")
    tokens = flat_tokens(token_records(lengths))
    length = min(length, max(len(tokens), 1))
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, max(len(tokens) - length, 0) + 1, 20)
    if not len(tokens):
        starts, length = starts[:0], 0
    begins = np.cumsum([0, *lengths])[:-1].tolist()
    expected = [tokens[start : start + length] for start in starts.tolist()]
    for store in stores(path, lengths, most):
        with store:
            rows = store.gather(starts, length, "sequence")
            assert rows.shape == (len(starts), length)
            assert rows.dtype == np.uint16
            assert rows.flags.c_contiguous
            assert rows.tolist() == [row.tolist() for row in expected]
            assert store.cuts(starts, length).tolist() == naive_cuts(
                begins, starts.tolist(), length
            )


@settings(max_examples=40)
@given(lengths=record_lengths, most=st.integers(1, 60), data=st.data())
def test_slices_and_records_agree_with_a_plain_concatenation(tmp_path_factory, lengths, most, data):
    path = tmp_path_factory.mktemp("store")
    records = token_records(lengths)
    tokens, masks = flat_tokens(records), flat_tokens(records, "loss_mask")
    edges = np.cumsum([0, *lengths])
    for store in stores(path, lengths, most):
        with store:
            assert len(store) == len(tokens) == store.total("sequence")
            assert store.documents == len(lengths)
            assert store.record_lengths().tolist() == lengths
            first = data.draw(st.integers(0, len(lengths)))
            assert store.record_lengths(begin=first).tolist() == lengths[first:]
            everything = np.arange(len(lengths))
            starts, ends = store.document_spans(everything[::-1])
            assert starts.tolist() == edges[:-1][::-1].tolist()
            assert ends.tolist() == edges[1:][::-1].tolist()
            owners = store.document_of(np.arange(len(tokens)))
            assert owners.tolist() == np.repeat(everything, lengths).tolist()
            for index in data.draw(st.lists(st.sampled_from(range(len(lengths))), max_size=4)):
                found = store.record(index, ["sequence", "loss_mask"])
                assert found["sequence"].tolist() == records[index]["sequence"].tolist()
                assert found["loss_mask"].tolist() == records[index]["loss_mask"].tolist()
            if len(tokens):
                begin = data.draw(st.integers(0, len(tokens) - 1))
                end = data.draw(st.integers(begin, len(tokens)))
                read = store.read(begin, end, ["sequence", "loss_mask"])
                assert read["sequence"].tolist() == tokens[begin:end].tolist()
                assert read["loss_mask"].tolist() == masks[begin:end].tolist()
                fetched = store.fetch(begin, end, ["sequence", "loss_mask"])
                assert fetched["sequence"].tolist() == tokens[begin:end].tolist()
                assert fetched["loss_mask"].tolist() == masks[begin:end].tolist()


def test_fetch_gives_int64_bool_for_masks_and_floats_as_they_are(tmp_path):
    keys = {"sequence": "uint32", "loss_mask": "uint8", "weights": "float32"}
    path = write(tmp_path, [{"sequence": [7, 8], "loss_mask": [0, 1], "weights": [0.5, 2]}], keys)
    store = open_store(path)
    found = store.fetch(0, 2, ["sequence", "loss_mask", "weights"])
    assert found["sequence"].dtype == torch.int64
    assert found["loss_mask"].dtype == torch.bool
    assert found["weights"].tolist() == [0.5, 2.0]
    assert store.fetch(0, 2, "sequence", dtype=torch.int32).dtype == torch.int32
    assert store.is_mask("loss_mask")
    assert not store.is_mask("weights")


def test_fetched_tensors_are_fresh_and_writable_and_read_views_are_not(tmp_path):
    store = three_shards(tmp_path)
    tensor = store.fetch(0, 5, "sequence")
    tensor.zero_()
    assert store.fetch(0, 5, "sequence").tolist() != [0] * 5
    view = store.read(0, 5, "sequence")
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_slice_within_one_shard_is_a_view_and_across_shards_one_copy(tmp_path):
    store = three_shards(tmp_path)
    edge = int(store.bounds("sequence")[1])
    assert store.read(0, edge, "sequence").base is not None
    assert np.shares_memory(store.read(0, 3, "sequence"), store.read(1, 2, "sequence"))
    assert store.read(edge - 1, edge + 1, "sequence").base is None


@pytest.mark.parametrize(
    ("begin", "end"), [(-1, 3), (100, 100), (101, 101), (5, 4), (0, 101), (99, 200), (3, -1)]
)
def test_a_range_out_of_bounds_is_refused_with_its_numbers(tmp_path, begin, end):
    store = three_shards(tmp_path)
    for ask in (store.read, store.fetch):
        with pytest.raises(
            OutOfBounds, match=rf"out of bounds: begin={begin}, end={end}, length=100"
        ):
            ask(begin, end, "sequence")
    with pytest.raises(IndexError):
        store.fetch(begin, end, "sequence")
    with pytest.raises(ValueError, match="out of bounds"):
        store.fetch(begin, end, ["sequence"])


def test_an_empty_range_is_empty_if_it_begins_inside(tmp_path):
    store = three_shards(tmp_path)
    assert store.fetch(10, 10, "sequence").shape == (0,)
    assert store.fetch(99, 100, "sequence").shape == (1,)


def test_rows_out_of_bounds_are_refused_whatever_the_integer_type(tmp_path):
    store = three_shards(tmp_path)
    for starts in ([-1], [98], np.array([2**63], np.uint64), np.array([-5], np.int8)):
        with pytest.raises(OutOfBounds, match="out of bounds"):
            store.gather(starts, 3, "sequence")
        with pytest.raises(OutOfBounds):
            store.cuts(starts, 3)
        with pytest.raises(OutOfBounds):
            store.advise(starts, 3, "sequence")
    with pytest.raises(OutOfBounds):
        store.gather([0], 101, "sequence")
    with pytest.raises(OutOfBounds):
        store.gather([0], -1, "sequence")
    with pytest.raises(ConfigError, match="float64, where integers"):
        store.gather([0.5], 1, "sequence")
    with pytest.raises(ConfigError, match="one dimension"):
        store.gather([[1]], 1, "sequence")


def test_starts_may_be_of_any_integer_type_in_any_order_and_repeated(tmp_path):
    store = three_shards(tmp_path)
    tokens = store.read(0, 100, "sequence")
    for dtype in (np.int8, np.uint8, np.int32, np.uint64):
        starts = np.array([90, 3, 3, 0, 22], dtype)
        rows = store.gather(starts, 7, "sequence")
        assert rows.tolist() == [tokens[s : s + 7].tolist() for s in starts.tolist()]
    assert store.gather([], 7, "sequence").shape == (0, 7)
    assert store.gather(np.array([97, 1])[::-1], 3, "sequence")[0].tolist() == tokens[1:4].tolist()
    assert store.gather([5, 100], 0, "sequence").shape == (2, 0)


def test_gather_into_a_given_array_wants_the_right_one(tmp_path):
    store = three_shards(tmp_path)
    out = np.empty((2, 7), np.uint16)
    assert store.gather([20, 0], 7, "sequence", out=out) is out
    assert out.tolist() == store.gather([20, 0], 7, "sequence").tolist()
    for wrong in (
        np.empty((2, 7), np.int64),
        np.empty((7, 2), np.uint16).T,
        np.empty((3, 7), "u2"),
    ):
        with pytest.raises(ConfigError, match="out is"):
            store.gather([20, 0], 7, "sequence", out=wrong)


def test_an_unknown_key_is_an_error_that_names_the_keys_there_are(tmp_path):
    store = three_shards(tmp_path)
    for ask in (
        lambda: store.fetch(0, 1, "tokens"),
        lambda: store.gather([0], 1, "tokens"),
        lambda: store.record(0, "tokens"),
        lambda: store.total("tokens"),
        lambda: store.document_spans([0], "tokens"),
    ):
        with pytest.raises(DataError, match=r"no key 'tokens'; its keys are: sequence, loss_mask"):
            ask()


def test_a_record_out_of_bounds_is_refused(tmp_path):
    store = three_shards(tmp_path)
    for index in (-1, 17, 10**9):
        with pytest.raises(OutOfBounds, match=f"Record {index} is out of bounds: there are 17"):
            store.record(index, "sequence")
        with pytest.raises(OutOfBounds):
            store.document_spans([index])
    with pytest.raises(OutOfBounds, match="Position 100 is out of bounds"):
        store.document_of([100])
    with pytest.raises(OutOfBounds):
        store.record_lengths(begin=3, end=18)


@pytest.mark.parametrize("kind", [Store, MmapStore, H5Store])
def test_a_store_that_is_not_loaded_says_so(kind):
    store = kind()
    assert store.keys == []
    assert len(store) == 0
    assert store.documents == 0
    assert store.path is None
    assert store.metadata == {}
    for ask in (
        lambda: store.read(0, 1, "sequence"),
        lambda: store.fetch(0, 1, "sequence"),
        lambda: store.record(0, "sequence"),
        lambda: store.gather([0], 1, "sequence"),
        lambda: store.cuts([0], 1),
        lambda: store.fingerprint,
        store.share_memory_,
    ):
        with pytest.raises(RuntimeError, match="Store not loaded"):
            ask()
    store.close()
    with pytest.raises(RuntimeError, match="Store not loaded"):
        store.read(0, 1, "sequence")


def test_a_closed_store_says_so_and_closing_twice_is_fine(tmp_path):
    with three_shards(tmp_path) as store:
        view = store.read(0, 3, "sequence")
        values = view.tolist()
        column = store.contents.columns["sequence"]
    store.close()
    assert view.tolist() == values, "a view outlives the store"
    for ask in (
        lambda: store.read(0, 1, "sequence"),
        lambda: store.gather([0], 1, "sequence"),
        lambda: store.record(0, "sequence"),
        lambda: column.read(0, 1),
    ):
        with pytest.raises(RuntimeError, match="Store is closed"):
            ask()
    assert store.load(tmp_path).read(0, 3, "sequence").tolist() == values


def test_loading_what_is_not_there_leaves_the_store_as_it_was(tmp_path):
    store = three_shards(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        store.load(tmp_path / "b")
    assert len(store) == 100


def test_the_base_store_reads_no_format(tmp_path):
    with pytest.raises(ConfigError, match="open_store"):
        Store().load(tmp_path)


def test_factory_makes_the_known_stores_and_takes_new_ones():
    assert isinstance(StoreFactory.create("bin", dtype="uint16"), MmapStore)
    assert isinstance(StoreFactory.create("npy"), MmapStore)
    assert isinstance(StoreFactory.create("h5", share_memory=False), H5Store)
    with pytest.raises(ConfigError, match=r"Unknown component 'zarr'.*bin, h5, npy"):
        StoreFactory.create("zarr")

    @StoreFactory.register("test-only")
    class Mine(Store):
        pass

    try:
        assert isinstance(StoreFactory.create("test-only"), Mine)
    finally:
        del StoreFactory._makers["test-only"]


def test_detect_format_knows_each_kind(tmp_path):
    records = token_records([3])
    assert detect_format(write(tmp_path / "a", records)) == "bin"
    assert detect_format(write(tmp_path / "b", records, storage="h5")) == "h5"
    (tmp_path / "c").mkdir()
    np.save(tmp_path / "c/x.npy", np.arange(3))
    assert detect_format(tmp_path / "c") == "npy"
    assert detect_format(tmp_path / "c/x.npy") == "npy"
    (tmp_path / "c/notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"Unsupported file format: \.txt"):
        detect_format(tmp_path / "c/notes.txt")
    (tmp_path / "d").mkdir()
    for nothing in (tmp_path / "d", tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="No supported data files found at"):
            detect_format(nothing)
    (tmp_path / "c/meta.json").write_text("{}")
    (tmp_path / "c/sub.bin").write_bytes(b"")
    assert detect_format(tmp_path / "c") == "bin"
    (tmp_path / "c/deep").mkdir()
    (tmp_path / "c/deep/x.h5").write_bytes(b"")
    assert detect_format(tmp_path / "c") == "h5", "HDF5 wins where a folder holds both"


def test_astrai_names_answer_in_memory_and_mapped(tmp_path):
    store = Store()
    store._normalize({"sequence": []})
    assert len(store) == 0
    assert store.keys == ["sequence"]
    with pytest.raises(OutOfBounds):
        store.fetch(0, 0, "sequence")
    store._normalize({"sequence": [torch.arange(3), torch.arange(4)], "masks": [np.ones(5, bool)]})
    assert len(store) == 5
    assert [part.tolist() for part in store._data["sequence"]] == [[0, 1, 2], [0, 1, 2, 3]]
    assert store._cum == {"sequence": [3, 7], "masks": [5]}
    assert store.fetch(1, 5, ["sequence", "masks"])["sequence"].tolist() == [1, 2, 0, 1]
    with pytest.raises(DataError, match="no record offsets for 'sequence'"):
        store.record(0, "sequence")
    mapped = three_shards(tmp_path)
    assert sum(map(len, mapped._data["sequence"])) == 100
    assert mapped._cum["sequence"] == mapped.bounds("sequence")[1:].tolist()
    assert not mapped._data["sequence"][0].flags.writeable


def test_segments_of_an_hdf5_store_in_memory_are_records():
    store = H5Store()
    store._normalize(
        {
            "chosen": [np.arange(3), np.arange(2)],
            "responses": [[np.arange(2), np.arange(0)], [np.arange(4)]],
        }
    )
    assert store.documents == 2
    assert store.record(1, "chosen").tolist() == [0, 1]
    assert [part.tolist() for part in store.record(0, "responses")] == [[0, 1], []]
    assert store.record_lengths("responses").tolist() == [2, 4]


def test_metadata_says_what_the_writer_was_told(tmp_path):
    metadata = {"tokenizer": "gpt2", "eos_token_id": 0, "recipe": {"version": 1}}
    path = write(
        tmp_path, token_records([2]), metadata=metadata, vocab_size=60_000, ledger={"kept": 2}
    )
    store = open_store(path)
    assert store.metadata == {**metadata, "vocab_size": 60_000, "ledger": {"kept": 2}}
    assert store.eos_token_id == 0
    assert open_store(write(tmp_path / "b", token_records([2]))).eos_token_id is None


def test_the_fingerprint_follows_the_manifest_or_the_files(tmp_path):
    records = token_records([5, 6, 7])
    first = open_store(write(tmp_path / "a", records)).fingerprint
    assert first == open_store(write(tmp_path / "b", records)).fingerprint
    assert first != open_store(write(tmp_path / "c", token_records([5, 6, 7], seed=1))).fingerprint
    (tmp_path / "a/manifest.json").unlink()
    bare = open_store(tmp_path / "a").fingerprint
    assert bare == open_store(tmp_path / "a").fingerprint != first
    (tmp_path / "a").rename(tmp_path / "moved")
    assert open_store(tmp_path / "moved").fingerprint == bare
    file = tmp_path / "moved/__default__/shard_0000/sequence.bin"
    raw = bytearray(file.read_bytes())
    raw[7] ^= 1
    file.write_bytes(raw)
    assert open_store(tmp_path / "moved").fingerprint != bare


def test_rows_longer_than_the_fast_path_takes_and_unaligned_ones_are_exact():
    values = np.arange(60_000, dtype=np.int32)
    raw = bytearray(values.nbytes + 1)
    raw[1:] = values.tobytes()
    unaligned = np.frombuffer(raw, np.int32, offset=1)
    assert not unaligned.flags.aligned
    strided = np.repeat(values, 2)[::2]
    for whole in (values, unaligned, strided):
        store = Store()
        store._normalize({"sequence": [whole[:20_000], whole[20_000:20_003], whole[20_003:]]})
        for length in (1, 7, 16_384, 16_385, 30_000):
            starts = np.array([19_999, 0, 20_001, 60_000 - length])
            rows = store.gather(np.minimum(starts, 60_000 - length), length, "sequence")
            expected = np.minimum(starts, 60_000 - length)[:, None] + np.arange(length)
            assert (rows == expected).all()


@pytest.mark.parametrize("kind", ["bin", "h5", "flat", "npy"])
def test_a_store_named_by_a_relative_path_outlives_a_chdir(tmp_path, monkeypatch, kind):
    there = tmp_path / "there"
    if kind in {"bin", "h5"}:
        write(there, token_records([3, 4]), max_tokens_per_shard=4, storage=kind)
    elif kind == "flat":
        write_flat(there, {"sequence": np.arange(7)})
    else:
        there.mkdir()
        np.save(there / "x.npy", np.arange(7))
    expected = open_store(there).read(0, 7, "sequence").tolist()
    monkeypatch.chdir(tmp_path)
    store = open_store("there")
    assert store.path == there
    monkeypatch.chdir("/")
    assert store.read(0, 7, "sequence").tolist() == expected
    assert pickle.loads(pickle.dumps(store)).read(0, 7, "sequence").tolist() == expected


def test_fetch_refuses_tokens_that_int64_would_turn_negative():
    store = Store()
    store._normalize({"sequence": [np.array([1, 2**63 - 1, 2**63], np.uint64)]})
    assert store.fetch(0, 2, "sequence").tolist() == [1, 2**63 - 1]
    with pytest.raises(DataError, match="'sequence' holds the token 9223372036854775808"):
        store.fetch(0, 3, "sequence")


def test_rewards_and_fractions_do_not_count_as_tokens():
    store = Store()
    store._normalize({"responses": [np.arange(9)], "rewards": [np.array([1, 0])]})
    assert len(store) == 9
    with pytest.raises(OutOfBounds, match="length=2"):
        store.read(0, 3, ["responses", "rewards"])
    store._normalize({"scores": [np.ones(3, np.float32)]})
    assert len(store) == 9
    alone = Store()
    alone._normalize({"scores": [np.ones(3, np.float32)]})
    assert len(alone) == 3
