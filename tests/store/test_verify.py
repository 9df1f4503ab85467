"""`verify` finds what is wrong with a store and names the file."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.helpers import edit_json, token_records, write, write_flat

from penstock.store import Key, verify

NESTED = {"prompts": "uint16", "responses": Key(dtype="uint16", nested=True), "rewards": "float32"}


@pytest.fixture(params=["bin", "h5"])
def storage(request):
    return request.param


@pytest.fixture
def store(tmp_path, storage):
    return write(
        tmp_path / "store",
        token_records([4, 5, 8, 0, 3]),
        max_tokens_per_shard=9,
        storage=storage,
        vocab_size=60_000,
    )


def test_a_whole_store_is_well_and_its_counts_are_told(store):
    seen = []
    report = verify(store, progress=lambda done, count: seen.append((done, count)))
    assert report.ok
    assert report.problems == report.notes == []
    assert (report.shards, report.tokens, report.documents) == (3, 20, 5)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_nested_records_and_fractions_and_nan_are_well(tmp_path, storage):
    records = [
        {"prompts": [1], "responses": [[2, 3], []], "rewards": [np.nan, -1.5]},
        {"prompts": [], "responses": [], "rewards": []},
    ]
    report = verify(write(tmp_path, records, NESTED, storage=storage, vocab_size=10))
    assert report.ok, report.problems
    assert (report.tokens, report.documents) == (1, 2)


@settings(max_examples=50)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found_and_named(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("store")
    storage = data.draw(st.sampled_from(["bin", "h5"]))
    write(root, token_records([4, 5, 8]), max_tokens_per_shard=9, storage=storage)
    files = sorted(p for p in root.rglob("*") if p.is_file())
    path = data.draw(st.sampled_from(files))
    raw = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    report = verify(root)
    assert not report.ok
    assert any(str(path) in problem for problem in report.problems), report.problems
    assert all("\n" not in problem for problem in report.problems)


def test_a_truncation_is_named_with_its_sizes(store):
    for path in sorted(p for p in store.rglob("*") if p.suffix in {".bin", ".h5"}):
        raw = path.read_bytes()
        path.write_bytes(raw[:-1])
        report = verify(store)
        expected = f"{path} holds {len(raw) - 1:,} bytes where {len(raw):,} were expected"
        assert any(problem.startswith(expected) for problem in report.problems), report.problems
        path.write_bytes(raw)
    assert verify(store).ok


def test_a_missing_file_or_shard_is_named(store, storage):
    for path in sorted(p for p in store.rglob("*") if p.is_file() and p.name != "manifest.json"):
        raw = path.read_bytes()
        path.unlink()
        report = verify(store)
        assert any(str(path) in p and "missing" in p for p in report.problems), report.problems
        path.write_bytes(raw)
    shard = store / "__default__" / ("data_0001.h5" if storage == "h5" else "shard_0001")
    shard.rename(store.parent / "gone")
    assert any(str(shard) in problem for problem in verify(store).problems)


def test_a_shard_that_is_not_in_the_manifest_is_named(store, storage, tmp_path):
    other = write(tmp_path / "other", token_records([2]), storage=storage, domain="stray")
    (other / "stray").rename(store / "stray")
    report = verify(store)
    assert len(report.problems) == 1
    assert str(store / "stray") in report.problems[0]
    assert "is not in" in report.problems[0]


def test_a_file_that_does_not_belong_to_a_shard_is_named(tmp_path):
    store = write(tmp_path, token_records([4]))
    extra = store / "__default__/shard_0000/notes.txt"
    extra.write_text("x")
    assert verify(store).problems == [f"{extra} is not a file of this shard: remove it."]


def test_ids_past_the_vocabulary_are_named(tmp_path, storage):
    store = write(tmp_path, [{"sequence": [70], "loss_mask": [1]}], storage=storage)
    edit_json(store / "manifest.json", lambda value: value["metadata"].update(vocab_size=70))
    [problem] = verify(store).problems
    assert "holds the id 70, which is not below the vocabulary's size of 70" in problem
    assert str(tmp_path) in problem


def test_wrong_counts_in_the_manifest_are_named(store):
    def change(value):
        value["shards"]["documents"][0] += 1
        value["documents"] += 1

    edit_json(store / "manifest.json", change)
    report = verify(store)
    assert any("counts 2 documents" in problem for problem in report.problems), report.problems


def test_offsets_that_fall_and_masks_of_other_bytes_are_named_under_right_checksums(tmp_path):
    """Damage that was there before the checksums were."""
    store = write(tmp_path, token_records([2, 2, 2]))
    shard = store / "__default__/shard_0000"
    np.array([0, 5, 3, 6], "<i8").tofile(shard / "offsets.bin")
    (shard / "loss_mask.bin").write_bytes(bytes([0, 1, 7, 0, 0, 0]))

    def rehash(meta):
        for name in meta["checksums"]:
            digest = xxhash.xxh3_64_hexdigest((shard / name).read_bytes())
            meta["checksums"][name] = digest

    edit_json(shard / "meta.json", rehash)
    digest = xxhash.xxh3_64_hexdigest((shard / "meta.json").read_bytes())
    edit_json(
        store / "manifest.json", lambda value: value["shards"].__setitem__("checksum", [digest])
    )
    report = verify(store)
    assert report.problems == [
        f"{shard / 'loss_mask.bin'} holds bytes that are neither 0 nor 1, as bool: restore it.",
        f"{shard / 'offsets.bin'} has offsets that fall after record 1: restore it.",
    ]


def test_a_foreign_store_is_checked_for_sizes_and_a_note_says_there_are_no_checksums(tmp_path):
    store = write_flat(tmp_path / "a", {"chosen": np.arange(4), "rejected": np.arange(4)}, [0, 3])
    report = verify(store)
    assert report.ok
    assert "no checksums" in report.notes[0]
    assert (report.shards, report.tokens, report.documents) == (1, 4, 2)
    (store / "rejected.bin").write_bytes(bytes(9))
    [problem] = verify(store).problems
    assert "rejected.bin holds 9 bytes" in problem


def test_without_the_manifest_the_shards_own_checksums_are_compared(tmp_path):
    store = write(tmp_path, token_records([4, 5, 8]), max_tokens_per_shard=9, vocab_size=60_000)
    (store / "manifest.json").unlink()
    report = verify(store)
    assert report.ok
    assert (report.shards, report.tokens, report.documents) == (2, 17, 3)
    [note] = report.notes
    assert "has no manifest.json, so there is no tokenizer, no end-of-text id" in note
    for name in ("sequence.bin", "loss_mask.bin", "offsets.bin"):
        path = store / "__default__/shard_0001" / name
        raw = path.read_bytes()
        path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
        problems = verify(store).problems
        assert any(f"{path} has the checksum" in problem for problem in problems), problems
        path.write_bytes(raw)
    shard = verify(store / "__default__/shard_0001")
    assert shard.ok
    assert shard.tokens == 8


def test_without_the_manifest_hdf5_files_have_no_checksums_and_a_note_says_so(tmp_path):
    store = write(tmp_path, token_records([4, 5]), storage="h5")
    (store / "manifest.json").unlink()
    report = verify(store)
    assert report.ok
    assert "nor checksums of its files" in report.notes[0]


def test_an_unfinished_store_and_no_store_are_problems_too(tmp_path):
    assert "No supported data files" in verify(tmp_path).problems[0]
    store = write(tmp_path / "a", token_records([3]))
    (store / "manifest.json").unlink()
    (store / ".incomplete").touch()
    [problem] = verify(store).problems
    assert "is not finished" in problem
