"""Opening a store reads its manifest and nothing else, whatever the manifest says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.store.helpers import edit_json, token_records, write

from penstock.errors import DataError, MissingData
from penstock.store import FORMAT_VERSION, ShardWriter, open_store, verify
from penstock.store.manifest import read_manifest, sealed


@pytest.fixture
def store(tmp_path):
    """Two shards, of 9 and 8 tokens."""
    return write(tmp_path / "store", token_records([4, 5, 8]), max_tokens_per_shard=9)


def many_shards(path: Path, count: int) -> None:
    """A manifest of `count` shards of 9 tokens, of which only the first exists."""
    write(path, token_records([4, 5]))
    edit_json(path / "manifest.json", lambda value: repeat(value, count))


def repeat(value, count):
    shards = value["shards"]
    columns = (shards["documents"], shards["checksum"], shards["bytes"], *shards["totals"].values())
    for column in columns:
        column.extend(column * (count - 1))
    shards["path"] = [f"domain_{i // 1000:03d}/shard_{i:06d}" for i in range(count)]
    shards["path"][0] = "__default__/shard_0000"
    value["tokens"] *= count
    value["documents"] *= count


def test_a_hundred_thousand_shards_open_without_a_look_at_any(tmp_path):
    many_shards(tmp_path, 100_000)
    program = f"""
import sys
opened = []
def watch(event, args):
    if event == "open" and str(args[0]).startswith({str(tmp_path)!r}):
        opened.append(str(args[0]))
sys.addaudithook(watch)
import numpy
from penstock.store import open_store
def memory():
    with open("/proc/self/status") as status:
        return int(status.read().partition("VmHWM:")[2].split()[0])
before = memory()
store = open_store({str(tmp_path)!r})
assert len(store) == 900_000, len(store)
assert store.documents == 200_000
print(sorted(set(opened)), memory() - before)
rows = store.gather([0, 5], 4, "sequence")
store.advise([0], 9, "sequence")
assert store.cuts([0], 9).tolist() == [4]
print(len(set(opened)))
assert "torch" not in sys.modules and "h5py" not in sys.modules and "pyarrow" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"['{tmp_path}/manifest.json']")
    kilobytes = int(first.rpartition(" ")[2])
    assert kilobytes < 100 * 1024
    assert second == "3", "the manifest, one sequence.bin and one offsets.bin"


def test_a_shard_that_was_never_read_may_be_missing_and_is_named_when_it_is(tmp_path):
    many_shards(tmp_path, 10)
    store = open_store(tmp_path)
    assert store.read(0, 9, "sequence").shape == (9,)
    with pytest.raises(MissingData, match=r"domain_000/shard_000001/sequence\.bin is missing"):
        store.read(9, 10, "sequence")
    with pytest.raises(FileNotFoundError):
        store.gather([3], 40, "sequence")


def test_reading_ahead_leaves_it_to_gather_to_say_what_is_wrong(tmp_path):
    many_shards(tmp_path, 10)
    store = open_store(tmp_path)
    store.advise([0, 12], 4, "sequence")
    with pytest.raises(MissingData):
        store.gather([0, 12], 4, "sequence")


def test_a_part_of_a_store_opens_too(store):
    tokens = open_store(store).read(9, 17, "sequence").tolist()
    (store / "manifest.json").unlink()
    assert len(open_store(store / "__default__")) == 17
    shard = store / "__default__/shard_0001"
    assert open_store(shard).record(0, "sequence").tolist() == tokens
    assert open_store(shard / "sequence.bin").read(0, 8, "sequence").tolist() == tokens


def test_a_truncated_file_is_named_when_it_is_read(store):
    path = store / "__default__/shard_0001/sequence.bin"
    path.write_bytes(path.read_bytes()[:-1])
    opened = open_store(store)
    assert opened.read(0, 9, "sequence").shape == (9,)
    with pytest.raises(DataError, match=r"shard_0001/sequence\.bin holds 15 bytes where 16"):
        opened.read(9, 17, "sequence")
    offsets = store / "__default__/shard_0000/offsets.bin"
    offsets.write_bytes(bytes(24))
    with pytest.raises(DataError, match=r"shard_0000/offsets\.bin has record offsets from 0 to 0"):
        opened.record(0, "sequence")


@pytest.mark.parametrize("middle", [2**60, 10, -1])
def test_offsets_that_fall_are_an_error_that_names_the_file_however_they_are_used(store, middle):
    path = store / "__default__/shard_0000/offsets.bin"
    np.array([0, middle, 9], "<i8").tofile(path)
    for use in (
        lambda opened: opened.record(0, "sequence"),
        lambda opened: opened.document_spans([0, 1]),
        lambda opened: opened.cuts([0, 1], 9),
        lambda opened: opened.document_of([3]),
        lambda opened: opened.record_lengths(),
    ):
        opened = open_store(store)
        assert len(opened.read(0, 17, "sequence")) == 17
        with pytest.raises(DataError, match=r"shard_0000/offsets\.bin has offsets that fall after"):
            use(opened)


def test_without_the_manifest_the_shards_describe_themselves(store):
    whole = open_store(store)
    (store / "manifest.json").unlink()
    bare = open_store(store)
    assert bare.keys == whole.keys
    assert bare.read(0, 17, "sequence").tolist() == whole.read(0, 17, "sequence").tolist()
    assert bare.record(2, "loss_mask").tolist() == whole.record(2, "loss_mask").tolist()
    assert bare.metadata == {}


def test_more_than_ten_thousand_shards_keep_their_numeric_order(tmp_path):
    write(tmp_path, token_records([3, 3, 3]), max_tokens_per_shard=3)
    folder = tmp_path / "__default__"
    values = [open_store(tmp_path).record(i, "sequence").tolist() for i in range(3)]
    (folder / "shard_0000").rename(folder / "shard_9999")
    (folder / "shard_0001").rename(folder / "shard_10000")
    (folder / "shard_0002").rename(folder / "shard_0002x")
    (folder / "shard_0002x").rename(folder / "shard_0002")
    (tmp_path / "manifest.json").unlink()
    store = open_store(tmp_path)
    assert [store.record(i, "sequence").tolist() for i in range(3)] == [
        values[2], values[0], values[1],
    ]  # fmt: skip


def sets(key, value):
    return lambda manifest: manifest.__setitem__(key, value)


def shards(key, value):
    return lambda manifest: manifest["shards"].__setitem__(key, value)


def in_key(key, value):
    return lambda manifest: manifest["keys"]["sequence"].__setitem__(key, value)


GOOD = ["__default__/shard_0000", "__default__/shard_0001"]
HOSTILE = {
    "no format": lambda m: m.pop("format"),
    "another format": sets("format", "zip"),
    "a format that is no string": sets("format", {}),
    "no version": lambda m: m.pop("version"),
    "a later version": sets("version", FORMAT_VERSION + 1),
    "version 0": sets("version", 0),
    "a version that is a string": sets("version", "1"),
    "a version that is true": sets("version", True),
    "no storage": lambda m: m.pop("storage"),
    "another storage": sets("storage", "zarr"),
    "a storage that is a list": sets("storage", ["bin"]),
    "no keys": lambda m: m.pop("keys"),
    "empty keys": sets("keys", {}),
    "keys that are a list": sets("keys", ["sequence"]),
    "a key that is a string": lambda m: m["keys"].__setitem__("sequence", "uint16"),
    "a key with a path": lambda m: m["keys"].__setitem__("../x", m["keys"]["sequence"]),
    "a key with NUL": lambda m: m["keys"].__setitem__("a\0", m["keys"]["sequence"]),
    "an object dtype": in_key("dtype", "object"),
    "a structured dtype": in_key("dtype", "i4,i4"),
    "a dtype that is a list": in_key("dtype", [["a", "i4"]]),
    "no dtype": lambda m: m["keys"]["sequence"].pop("dtype"),
    "offsets that are a string": in_key("offsets", "sequence"),
    "no offsets": in_key("offsets", []),
    "three levels of offsets": in_key("offsets", ["a", "b", "c"]),
    "offsets that hold themselves": in_key("offsets", ["sequence", "sequence"]),
    "offsets that contradict": in_key("offsets", ["other", "sequence"]),
    "offsets without totals": in_key("offsets", ["other"]),
    "another role": in_key("role", "boss"),
    "a role that is a list": in_key("role", []),
    "no shards": lambda m: m.pop("shards"),
    "shards that are a list": sets("shards", []),
    "no paths": lambda m: m["shards"].pop("path"),
    "paths that are a string": shards("path", "ab"),
    "a path that is a number": shards("path", [GOOD[0], 3]),
    "an absolute path": shards("path", [GOOD[0], "/etc"]),
    "a path upwards": shards("path", [GOOD[0], "../store/__default__/shard_0001"]),
    "a path upwards in the middle": shards("path", [GOOD[0], "__default__/../../x"]),
    "a path with a backslash": shards("path", [GOOD[0], "..\\x"]),
    "a path with NUL": shards("path", [GOOD[0], "a\0b"]),
    "an empty path": shards("path", [GOOD[0], ""]),
    "a path that ends in a slash": shards("path", [GOOD[0], "a/"]),
    "a hidden path": shards("path", [GOOD[0], ".git/x"]),
    "a giant path": shards("path", [GOOD[0], "a" * 5000]),
    "the same path twice": shards("path", [GOOD[0], GOOD[0]]),
    "too few documents": shards("documents", [2]),
    "negative documents": shards("documents", [4, -1]),
    "documents that are floats": shards("documents", [2.0, 1.0]),
    "documents that are strings": shards("documents", ["2", "1"]),
    "documents that are null": shards("documents", None),
    "documents that are nested": shards("documents", [[2], [1, 2]]),
    "huge documents": shards("documents", [2**62, 2**62]),
    "documents beyond any integer": shards("documents", [10**40, 1]),
    "documents that are true": shards("documents", [True, True]),
    "no totals": lambda m: m["shards"].pop("totals"),
    "totals of another key": shards("totals", {"other": [9, 8]}),
    "totals that are negative": shards("totals", {"sequence": [-9, 26]}),
    "totals that are an object": shards("totals", {"sequence": {"0": 9}}),
    "totals that do not add up": shards("totals", {"sequence": [9, 9]}),
    "no checksums": shards("checksum", []),
    "checksums that are numbers": shards("checksum", [1, 2]),
    "no sizes": lambda m: m["shards"].pop("bytes"),
    "other tokens": sets("tokens", 18),
    "other documents": sets("documents", 4),
    "tokens that are a string": sets("tokens", "17"),
    "metadata that is a list": sets("metadata", []),
    "a ledger that is a number": sets("ledger", 3),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_manifest_is_one_sentence_that_names_it(store, change):
    edit_json(store / "manifest.json", change)
    with pytest.raises(DataError, match=r"manifest\.json") as caught:
        open_store(store)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    report = verify(store)
    assert not report.ok
    assert len(report.problems) == 1


def test_a_flipped_bit_anywhere_in_the_manifest_is_refused(tmp_path):
    write(tmp_path, token_records([4]), metadata={"lr": 1e-05}, ledger={"kept": 4})
    path = tmp_path / "manifest.json"
    raw = path.read_bytes()
    assert read_manifest(tmp_path).sealed
    for place in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(DataError, match=r"manifest\.json"):
            read_manifest(tmp_path)


def test_a_manifest_that_was_changed_is_refused_by_readers_and_named_by_verify(store):
    path = store / "manifest.json"
    path.write_text(path.read_text().replace('"ledger": {}', '"ledger": {"kept": 3}'))
    with pytest.raises(DataError, match=r"manifest\.json .* was changed after it was written"):
        open_store(store)
    [problem] = verify(store).problems
    assert "was changed after it was written" in problem


def test_a_manifest_without_a_digest_opens_and_verify_says_what_that_means(tmp_path):
    """A store that was written before manifests had one."""
    old = shutil.copytree(Path(__file__).parent / "store_v1", tmp_path / "old")
    store = open_store(old)
    assert store.metadata == {
        "eos_token_id": 0, "tokenizer": "abc", "vocab_size": 50, "ledger": {"trained": 5},
    }  # fmt: skip
    records = [[1, 2, 3, 0], [4, 0], [5, 6, 7, 8, 0]]
    assert [store.record(i, "sequence").tolist() for i in range(3)] == records
    report = verify(old)
    assert report.ok
    [note] = report.notes
    assert note.startswith(f"{old / 'manifest.json'} has no digest of itself")
    with ShardWriter(
        tmp_path / "new",
        {"sequence": "uint16", "loss_mask": "bool"},
        max_tokens_per_shard=6,
        vocab_size=50,
        metadata={"eos_token_id": 0, "tokenizer": "abc"},
        ledger={"trained": 5},
    ) as writer:
        for ids in records:
            writer.append({"sequence": ids, "loss_mask": [i % 2 for i in ids]})
    raw = (old / "manifest.json").read_bytes()
    assert sealed(raw) == (tmp_path / "new/manifest.json").read_bytes()


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": 1} x'])
def test_a_manifest_that_is_no_object_is_one_sentence(store, raw):
    (store / "manifest.json").write_bytes(raw)
    with pytest.raises(DataError, match=r"manifest\.json"):
        open_store(store)


META_CHANGES = {
    "no format": lambda m: m.__setitem__("format", "other"),
    "no keys": lambda m: m.pop("keys"),
    "a shape that is negative": lambda m: m["keys"]["sequence"].__setitem__("shape", [-1]),
    "a shape that is missing": lambda m: m["keys"]["sequence"].pop("shape"),
    "two shapes in one group": lambda m: m["keys"]["loss_mask"].__setitem__("shape", [3]),
    "no documents": lambda m: m.pop("documents"),
    "no offsets": lambda m: m.pop("offsets"),
    "offsets elsewhere": lambda m: m["offsets"].__setitem__("sequence", [3, 3]),
    "offsets of another count": lambda m: m["offsets"].__setitem__("sequence", [0, 9]),
    "offsets that are one number": lambda m: m["offsets"].__setitem__("sequence", [0]),
    "offsets that are strings": lambda m: m["offsets"].__setitem__("sequence", ["0", "3"]),
    "checksums that lead away": lambda m: m.__setitem__("checksums", {"../x": "00"}),
    "checksums that are numbers": lambda m: m.__setitem__("checksums", {"sequence.bin": 0}),
    "checksums that are a list": lambda m: m.__setitem__("checksums", ["sequence.bin"]),
}


@pytest.mark.parametrize("change", META_CHANGES.values(), ids=META_CHANGES.keys())
def test_a_hostile_meta_is_one_sentence_with_and_without_the_manifest(store, change):
    edit_json(store / "__default__/shard_0000/meta.json", change)
    report = verify(store)
    assert not report.ok
    assert any("shard_0000/meta.json" in problem for problem in report.problems)
    (store / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"shard_0000"):
        open_store(store)


def test_shards_of_different_keys_are_not_one_store(store, tmp_path):
    other = write(tmp_path / "b", [{"sequence": [1]}], {"sequence": "uint32"}, domain="other")
    (other / "other").rename(store / "other")
    (store / "manifest.json").unlink()
    with pytest.raises(DataError, match="holds other keys or dtypes"):
        open_store(store)


def test_a_shard_that_is_a_link_out_of_the_store_is_refused(store, tmp_path):
    shard = store / "__default__/shard_0000"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="symbolic link that leaves"):
        open_store(store).read(0, 1, "sequence")
    assert not verify(store).ok
    shard.unlink()
    (tmp_path / "elsewhere").rename(shard)
    (tmp_path / "link").symlink_to(store)
    assert open_store(tmp_path / "link").read(0, 1, "sequence").shape == (1,)
    (shard / "sequence.bin").rename(tmp_path / "out.bin")
    (shard / "sequence.bin").symlink_to("../../../out.bin")
    with pytest.raises(DataError, match="symbolic link that leaves"):
        open_store(store).read(0, 1, "sequence")


def test_a_manifest_is_readable_json_with_a_line_a_field(store):
    text = (store / "manifest.json").read_text()
    assert json.loads(text)["tokens"] == 17
    assert len(text.splitlines()) == len(json.loads(text)) + 2
