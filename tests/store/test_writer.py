"""What comes in is checked, what goes out is committed as a whole or not at all."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise, product

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store.helpers import SEQUENCE, token_records, write

from penstock.errors import ConfigError, DataError
from penstock.store import Key, ShardWriter, commit, discard, open_store, verify


def tree(root):
    """Every file below a folder with its bytes."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


# ---------------------------------------------------------------------------- written = read

small = {
    "uint8": st.integers(0, 255),
    "uint16": st.integers(0, 65_535),
    "uint32": st.integers(0, 2**32 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "bool": st.booleans(),
    "float32": st.floats(width=32),
    "float64": st.floats(),
}


@st.composite
def schemas(draw):
    """Groups of aligned keys, some nested, some values; and records that fit them."""
    keys, groups = {}, []
    for group in range(draw(st.integers(1, 3))):
        nested = draw(st.booleans())
        names = [f"key_{group}_{i}" for i in range(draw(st.integers(1, 2)))]
        for name in names:
            keys[name] = Key(
                dtype=draw(st.sampled_from(sorted(small))), nested=nested, group=names[0]
            )
        if nested and draw(st.booleans()):
            keys[f"value_{group}"] = Key(dtype="float64", role="value", group=names[0])
        groups.append((names, nested))
    return keys, groups


@st.composite
def stores(draw):
    keys, groups = draw(schemas())
    records = []
    for _ in range(draw(st.integers(0, 12))):
        record = {}
        for group, (names, nested) in enumerate(groups):
            lengths = draw(st.lists(st.integers(0, 5), max_size=4 if nested else 1))
            for name in names:
                value = small[keys[name].dtype]
                lists = [draw(st.lists(value, min_size=n, max_size=n)) for n in lengths]
                record[name] = lists if nested else [v for found in lists for v in found]
            if f"value_{group}" in keys:
                n = len(lengths)
                record[f"value_{group}"] = draw(st.lists(st.floats(), min_size=n, max_size=n))
        records.append({name: record[name] for name in keys})
    return keys, records


@settings(max_examples=40)
@given(
    store=stores(), most=st.integers(1, 30), storage=st.sampled_from(["bin", "h5"]), data=st.data()
)
def test_whatever_is_written_is_read_back(tmp_path_factory, store, most, storage, data):
    root = tmp_path_factory.mktemp("store")
    keys, records = store
    write(root, records, keys, storage=storage, max_tokens_per_shard=most)
    assert verify(root).ok
    if data.draw(st.booleans()):
        (root / "manifest.json").unlink()
    with open_store(root) as opened:
        if data.draw(st.booleans()):
            opened.share_memory_()
        assert opened.keys == list(keys)
        assert opened.documents == len(records)
        for index, record in enumerate(records):
            for name, key in keys.items():
                found = opened.record(index, name)
                wanted = record[name] if key.nested else [record[name]]
                parts = found if key.nested else [found]
                assert [len(part) for part in parts] == [len(part) for part in wanted]
                for part, expected in zip(parts, wanted, strict=True):
                    np.testing.assert_array_equal(part, np.array(expected, key.dtype))
        for name, key in keys.items():
            flat = [
                v for r in records for part in (r[name] if key.nested else [r[name]]) for v in part
            ]
            assert opened.total(name) == len(flat)
            lengths = [sum(map(len, r[name])) if key.nested else len(r[name]) for r in records]
            assert opened.record_lengths(name).tolist() == lengths
            begins = np.cumsum([0, *lengths])[:-1].tolist()
            expected = sorted({begin for begin in begins if 0 < begin < len(flat)})
            assert opened.cuts([0], len(flat), name).tolist() == expected


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=25),
    most=st.integers(1, 40),
    storage=st.sampled_from(["bin", "h5"]),
    blocks=st.lists(st.integers(0, 25), max_size=3),
)
def test_one_at_a_time_and_many_at_once_give_the_same_bytes(
    tmp_path_factory, lengths, most, storage, blocks
):
    root = tmp_path_factory.mktemp("store")
    records = token_records(lengths)
    options = {"storage": storage, "max_tokens_per_shard": most, "metadata": {"eos_token_id": 0}}
    write(root / "one", records, **options)
    edges = [0, *sorted(min(block, len(records)) for block in blocks), len(records)]
    with ShardWriter(root / "many", SEQUENCE, **options) as writer:
        for begin, end in pairwise(edges):
            part = records[begin:end]
            empty = np.empty(0, np.uint16)
            values = {
                k: np.concatenate([empty, *[r[k] for r in part]]).astype(np.int64) for k in SEQUENCE
            }
            writer.extend(values, np.cumsum([0, *lengths[begin:end]]))
    assert tree(root / "one") == tree(root / "many")


def test_shards_end_on_record_boundaries_and_a_long_record_has_its_own(tmp_path):
    lengths = [4, 4, 4, 25, 0, 0, 3, 10, 1]
    store = open_store(write(tmp_path, token_records(lengths), max_tokens_per_shard=10))
    assert np.diff(store.bounds("sequence")).tolist() == [8, 4, 25, 3, 10, 1]
    assert store.record_lengths().tolist() == lengths


def test_no_records_are_an_empty_store(tmp_path):
    for storage in ("bin", "h5"):
        root = write(tmp_path / storage, [], storage=storage)
        store = open_store(root)
        assert (len(store), store.documents, store.keys) == (0, 0, ["sequence", "loss_mask"])
        assert store.record_lengths().tolist() == []
        assert store.gather([], 4, "sequence").shape == (0, 4)
        assert verify(root).ok


def test_nested_records_may_be_written_many_at_once(tmp_path):
    keys = {"responses": Key(dtype="uint16", nested=True), "rewards": "float32"}
    with ShardWriter(tmp_path, keys) as writer:
        writer.extend(
            {"responses": [1, 2, 3, 4], "rewards": [0.5, 1, 1.5]},
            {"responses": [0, 2, 2, 3], "responses.items": [0, 2, 2, 4]},
        )
    store = open_store(tmp_path)
    assert [part.tolist() for part in store.record(0, "responses")] == [[1, 2], []]
    assert store.record(1, "responses") == []
    assert store.record(2, "rewards").tolist() == [1.5]


def test_the_format_on_disk_is_the_one_the_design_describes(tmp_path):
    records = [{"sequence": [5, 6, 0], "loss_mask": [0, 1, 1]}, {"sequence": [7], "loss_mask": [1]}]
    write(tmp_path, records, vocab_size=8, metadata={"eos_token_id": 0})
    shard = tmp_path / "__default__/shard_0000"
    assert sorted(tree(tmp_path)) == [
        "__default__/shard_0000/loss_mask.bin",
        "__default__/shard_0000/meta.json",
        "__default__/shard_0000/offsets.bin",
        "__default__/shard_0000/sequence.bin",
        "manifest.json",
    ]
    assert (shard / "sequence.bin").read_bytes() == bytes([5, 0, 6, 0, 0, 0, 7, 0])
    assert (shard / "loss_mask.bin").read_bytes() == bytes([0, 1, 1, 1])
    assert np.fromfile(shard / "offsets.bin", "<i8").tolist() == [0, 3, 4]
    meta = json.loads((shard / "meta.json").read_text())
    assert meta["storage"] == "bin"
    assert meta["keys"]["sequence"] == {
        "dtype": "uint16", "shape": [4], "role": "ids", "offsets": ["sequence"],
    }  # fmt: skip
    assert (meta["tokens"], meta["documents"], meta["offsets"]) == (4, 2, {"sequence": [0, 3]})
    assert sorted(meta["checksums"]) == ["loss_mask.bin", "offsets.bin", "sequence.bin"]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["metadata"] == {"eos_token_id": 0, "vocab_size": 8}


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_a_table_of_sources_is_written_beside_the_records_it_describes(tmp_path, storage):
    with ShardWriter(tmp_path, SEQUENCE, max_tokens_per_shard=5, storage=storage) as writer:
        for row, record in enumerate(token_records([3, 3])):
            writer.append(record, source={"file": "a.jsonl", "row": row})
        rows = pa.table({"file": ["b.jsonl"] * 2, "row": [7, 8]})
        writer.extend({"sequence": [1, 2, 3], "loss_mask": [1, 1, 1]}, [0, 2, 3], source=rows)
    found = [pq.read_table(path)["row"].to_pylist() for path in sorted(tmp_path.rglob("*.parquet"))]
    assert found == [[0], [1, 7], [8]]
    assert verify(tmp_path).ok
    sorted(tmp_path.rglob("*.parquet"))[1].write_bytes(b"x")
    assert any(".parquet has the checksum" in problem for problem in verify(tmp_path).problems)


# ---------------------------------------------------------------------------- what is refused

BAD_RECORDS = {
    "an id past the dtype": ({"sequence": [70_000], "loss_mask": [1]}, "70000, which uint16"),
    "a negative id": ({"sequence": [1, -1], "loss_mask": [1, 1]}, "-1, which uint16 cannot"),
    "an id past the vocabulary": ({"sequence": [1, 100], "loss_mask": [1, 1]}, "id 100.* 100:"),
    "a mask of another length": ({"sequence": [1, 2], "loss_mask": [1]}, "lengths"),
    "a mask that is no mask": ({"sequence": [1], "loss_mask": [2]}, "2, which bool cannot"),
    "fractions": ({"sequence": [1.5], "loss_mask": [1]}, "float64 values"),
    "a nested list": ({"sequence": [[1]], "loss_mask": [1]}, "not a flat array"),
    "ragged lists": ({"sequence": [[1], [1, 2]], "loss_mask": [1]}, "not a flat array"),
    "a string": ({"sequence": "abc", "loss_mask": [1]}, "not a flat array"),
    "None": ({"sequence": [None], "loss_mask": [1]}, "not a flat array"),
    "an id past any integer": ({"sequence": [10**30], "loss_mask": [1]}, "not a flat array"),
    "a missing key": ({"sequence": [1]}, "the keys sequence, where sequence, loss_mask"),
    "another key": ({"sequence": [], "loss_mask": [], "x": []}, "keys sequence, loss_mask, x"),
}  # fmt: skip


@pytest.mark.parametrize(("record", "words"), BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_a_bad_record_is_refused_by_number_and_nothing_is_left(tmp_path, record, words):
    good = {"sequence": [1, 2], "loss_mask": [1, 0]}
    with pytest.raises(DataError, match=words) as caught:
        write(tmp_path, [good, good, record], vocab_size=100, max_tokens_per_shard=2)
    assert str(caught.value).startswith("Record 2")
    assert tree(tmp_path) == {}


def test_many_records_at_once_are_checked_alike_and_the_bad_one_is_named(tmp_path):
    keys = {"sequence": "uint16", "responses": Key(dtype="uint16", nested=True)}
    edges = {"sequence": [0, 1, 3], "responses": [0, 1, 3], "responses.items": [0, 1, 1, 3]}
    good = {"sequence": [1, 2, 3], "responses": [1, 2, 3]}
    with ShardWriter(tmp_path, keys) as writer:
        writer.extend(good, edges)
        for values, offsets, words in (
            ({**good, "sequence": [1, 2, 65_536]}, edges, "Record 3: 'sequence' holds 65536"),
            ({**good, "responses": [1, -2, 3]}, edges, "Record 3: 'responses' holds -2"),
            (
                {**good, "sequence": [1, 2]},
                edges,
                "'sequence' has 2 values where its offsets end at 3",
            ),
            (good, [0, 1, 3], "offsets were given for all keys at once"),
            (good, {**edges, "sequence": [0, 3, 1]}, "'sequence' are not whole numbers that rise"),
            (good, {**edges, "sequence": [1, 2, 3]}, "'sequence' are not whole numbers that rise"),
            (
                good,
                {**edges, "sequence": [0.0, 1, 3]},
                "'sequence' are not whole numbers that rise",
            ),
            (good, {**edges, "sequence": [0, 3]}, "'responses' are of 2 entries, not 1"),
            (
                good,
                {**edges, "responses.items": [0, 3]},
                "'responses.items' are of 1 entries, not 3",
            ),
            (good, {"sequence": [0, 1, 3]}, "offsets were given for sequence, where"),
        ):
            with pytest.raises(DataError, match=words):
                writer.extend(values, offsets)
        with pytest.raises(DataError, match="source has 1 rows for 2 records"):
            writer.extend(good, edges, source=pa.table({"a": [1]}))
        with pytest.raises(DataError, match="nested, so a list"):
            writer.append({"sequence": [1], "responses": np.arange(3)})
    assert open_store(tmp_path).documents == 2


def test_floats_keep_nan_and_infinity_and_refuse_what_overflows(tmp_path):
    keys = {"sequence": "uint16", "weights": Key(dtype="float16", role="value")}
    with ShardWriter(tmp_path, keys) as writer:
        writer.append({"sequence": [1], "weights": [np.nan, np.inf, -1.5]})
        with pytest.raises(DataError, match="'weights' holds 70000"):
            writer.append({"sequence": [1], "weights": [70_000]})
    np.testing.assert_array_equal(open_store(tmp_path).record(0, "weights"), [np.nan, np.inf, -1.5])


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        ({}, {}, "No keys"),
        ({"sequence": None}, {}, "dtype of 'sequence' is unknown"),
        ({"sequence": "object"}, {}, "object cannot be stored"),
        ({"sequence": "U5"}, {}, "cannot be stored"),
        ({"../x": "uint16"}, {}, "cannot be a key"),
        ({"offsets": "uint16"}, {}, "cannot be a key"),
        ({"a": Key(dtype="uint16", group="b")}, {}, "aligned with 'b', which is not a key"),
        ({"sequence": "uint16"}, {"domain": "../x"}, "domain '../x'"),
        ({"sequence": "uint16"}, {"domain": ""}, "domain ''"),
        ({"sequence": "uint16"}, {"prefix": "a/b"}, "prefix 'a/b'"),
        ({"sequence": "uint16"}, {"storage": "zarr"}, "storage is 'zarr'"),
        ({"sequence": "uint16"}, {"max_tokens_per_shard": 0}, "max_tokens_per_shard is 0"),
        (
            {"sequence": "uint16"},
            {"metadata": {"x": object()}},
            "metadata cannot be written as JSON",
        ),
        (
            {"sequence": "uint16"},
            {"ledger": {"x": float("nan")}},
            "ledger cannot be written as JSON",
        ),
        ({"sequence": "uint16"}, {"vocab_size": 5, "metadata": {"vocab_size": 6}}, "which is it"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, keys, options, words):
    with pytest.raises(ConfigError, match=words):
        ShardWriter(tmp_path / "out", keys, **options)
    assert not (tmp_path / "out").exists()


def test_dtype_follows_the_vocabulary(tmp_path):
    for size, dtype in ((65_536, np.uint16), (65_537, np.uint32)):
        root = write(tmp_path / str(size), [{"sequence": [1]}], {"sequence": None}, vocab_size=size)
        assert open_store(root).dtype("sequence") == dtype


# ---------------------------------------------------------------------------- commits


class OopsError(Exception):
    """What goes wrong in the middle of a `with`."""


def write_and_fail(path, records, **options):
    with ShardWriter(path, SEQUENCE, **options) as writer:
        for record in records:
            writer.append(record)
        raise OopsError


def test_an_exception_leaves_no_store_and_an_old_one_untouched(tmp_path):
    records = token_records([2, 2, 2])
    for storage in ("bin", "h5"):
        with pytest.raises(OopsError):
            write_and_fail(tmp_path, records, max_tokens_per_shard=3, storage=storage)
        assert list(tmp_path.iterdir()) == []
    write(tmp_path, token_records([4]))
    before = tree(tmp_path)
    with pytest.raises(OopsError):
        write_and_fail(tmp_path, records, overwrite=True)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, storage):
    program = f"""
import resource, signal
import numpy as np
from penstock.store import ShardWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))  # writes beyond it fail
try:
    with ShardWriter({str(tmp_path)!r}, {{"sequence": "uint16"}}, storage={storage!r}) as writer:
        for _ in range(20):
            writer.append({{"sequence": np.zeros(100_000, np.uint16)}})
except OSError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    assert "File too large" in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_replaced_only_when_that_is_asked_for(tmp_path):
    write(tmp_path, token_records([4, 4]), max_tokens_per_shard=4)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds a store already.*overwrite=True"):
        ShardWriter(tmp_path, SEQUENCE)
    write(tmp_path, token_records([5]), overwrite=True, domain="new")
    assert len(open_store(tmp_path)) == 5
    assert verify(tmp_path).ok
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "__default__").exists()


def test_a_closed_writer_takes_nothing_more(tmp_path):
    writer = ShardWriter(tmp_path, SEQUENCE)
    writer.close()
    writer.close()
    with pytest.raises(RuntimeError, match="writer is closed"):
        writer.append(token_records([1])[0])


def test_several_writers_make_one_store_and_the_manifest_comes_last(tmp_path):
    records = token_records([3, 4, 5])
    for domain, record in zip(["wiki", "code", "code2"], records, strict=True):
        write(tmp_path, [record], domain=domain, commit=False)
        with pytest.raises(DataError, match=r"is not finished: its writer left no manifest\.json"):
            open_store(tmp_path)
    assert len(open_store(tmp_path, partial=True)) == 12
    commit(tmp_path, metadata={"eos_token_id": 0}, ledger={"kept": 12})
    store = open_store(tmp_path)
    assert [store.record(i, "sequence").tolist() for i in range(3)] == [
        records[i]["sequence"].tolist() for i in (1, 2, 0)
    ]
    assert store.metadata["ledger"] == {"kept": 12}
    assert verify(tmp_path).ok
    before = tree(tmp_path)
    commit(tmp_path, metadata={"eos_token_id": 0}, ledger={"kept": 12})
    assert tree(tmp_path) == before


def test_a_commit_over_hdf5_gives_the_manifest_the_writer_would(tmp_path):
    records = token_records([3, 4, 5])
    write(tmp_path / "a", records, storage="h5", max_tokens_per_shard=5)
    write(tmp_path / "b", records, storage="h5", max_tokens_per_shard=5, commit=False)
    commit(tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_a_commit_refuses_shards_that_are_not_whole(tmp_path):
    with pytest.raises(DataError, match="holds no shard"):
        commit(tmp_path)
    write(tmp_path, token_records([3]), commit=False)
    path = tmp_path / "__default__/shard_0000/sequence.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"sequence\.bin holds 5 bytes, where 6"):
        commit(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"sequence\.bin is missing"):
        commit(tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_a_shard_that_stands_is_not_replaced_unasked(tmp_path):
    write(tmp_path, token_records([3]), commit=False)
    with pytest.raises(DataError, match="exists already"):
        write(tmp_path, token_records([4]), commit=False)
    write(tmp_path, token_records([4]), commit=False, overwrite=True)
    assert len(open_store(tmp_path, partial=True)) == 4


def test_a_writer_of_a_whole_store_does_not_touch_the_parts_of_others(tmp_path):
    write(tmp_path, token_records([3]), domain="a", commit=False)
    with pytest.raises(ConfigError, match=r"not committed yet: commit\(\) them"):
        write(tmp_path, token_records([4]), domain="b")
    write(tmp_path, token_records([4]), domain="b", commit=False)
    commit(tmp_path)
    assert open_store(tmp_path).documents == 2


def test_an_unfinished_store_may_be_replaced_by_a_whole_one(tmp_path):
    write(tmp_path, token_records([4]), domain="a", commit=False)
    write(tmp_path, token_records([5]), overwrite=True)
    assert open_store(tmp_path).record_lengths().tolist() == [5]
    assert verify(tmp_path).ok


def test_a_part_that_is_replaced_takes_the_manifest_down_first(tmp_path):
    write(tmp_path, token_records([3]), domain="a", commit=False)
    commit(tmp_path)
    write(tmp_path, token_records([5]), domain="a", commit=False, overwrite=True)
    with pytest.raises(DataError, match="not finished"):
        open_store(tmp_path)
    commit(tmp_path)
    assert len(open_store(tmp_path)) == 5


def test_discard_removes_the_store_and_nothing_else(tmp_path):
    for storage, committed in product(("bin", "h5"), (True, False)):
        with ShardWriter(
            tmp_path, SEQUENCE, max_tokens_per_shard=3, storage=storage, commit=committed
        ) as writer:
            for record in token_records([3, 3]):
                writer.append(record, source={"file": "a"})
        (tmp_path / "__default__/notes.txt").write_text("mine")
        discard(tmp_path)
        assert sorted(tree(tmp_path)) == ["__default__/notes.txt"]
        discard(tmp_path / "nowhere")


# ---------------------------------------------------------------------------- sudden death

WRITER = """
import sys, os, time
import numpy as np
from penstock.store import ShardWriter
out, storage, delay = sys.argv[1], sys.argv[2], float(sys.argv[3])
os.fsync_was = os.fsync
def slow(descriptor):
    time.sleep(delay)  # so that a kill falls between any two steps
    os.fsync_was(descriptor)
os.fsync = slow
print("ready", flush=True)
with ShardWriter(out, {"sequence": "uint16"}, storage=storage, max_tokens_per_shard=300) as writer:
    for length in range(100):
        writer.append({"sequence": np.arange(length)})
print("done", flush=True)
"""


def start_writer(out, storage, delay):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(out), storage, str(delay)],
        stdout=subprocess.PIPE,
        text=True,
    )


def kill_writers(tmp_path, kills, seed):
    """Kill a writer at random moments; then the next must end as one that was never killed."""
    random_moment = random.Random(seed)
    for storage in ("bin", "h5"):
        whole = tmp_path / f"whole_{storage}"
        with start_writer(whole, storage, 0) as process:
            process.communicate()
        expected = tree(whole)
        out = tmp_path / storage
        for _ in range(kills):
            with start_writer(out, storage, 0.003) as process:
                assert process.stdout.readline() == "ready\n"
                time.sleep(random_moment.uniform(0, 0.45))
                process.send_signal(signal.SIGKILL)
                rest = process.stdout.read()
            if rest == "done\n" or (out / "manifest.json").exists():
                assert verify(out).ok
                discard(out)
                continue
            with pytest.raises((DataError, FileNotFoundError), match=r"not finished|No supported"):
                open_store(out)
        with start_writer(out, storage, 0) as process:
            process.communicate()
        assert tree(out) == expected
        assert verify(out).ok


def test_a_kill_at_any_moment_leaves_nothing_that_passes_for_a_whole_store(tmp_path):
    kill_writers(tmp_path, kills=3, seed=1)


@pytest.mark.long
def test_many_kills_leave_nothing_that_passes_for_a_whole_store(tmp_path):
    kill_writers(tmp_path, kills=60, seed=2)


def test_a_living_writers_folder_is_left_alone_and_a_dead_ones_removed(tmp_path):
    out = tmp_path / "out"
    program = WRITER.replace('print("done", flush=True)', "") + "\n"
    program = program.replace("with ShardWriter", "writer = ShardWriter").replace(
        " as writer:\n", "\n"
    )
    program = program.replace("    for length", "for length").replace(
        "        writer", "    writer"
    )
    program += 'print("waiting", flush=True)\ntime.sleep(60)\n'
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(out), "bin", "0"], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "waiting\n"]
        [living] = out.glob(".tmp-*[!k]")
        write(out, token_records([3]), commit=False)
        assert living.is_dir()
        process.kill()
    write(out, token_records([3]), commit=False, domain="other")
    assert list(out.glob(".tmp-*")) == []
    assert [path.name for path in (out / "other").iterdir()] == ["shard_0000"]


def test_a_key_may_be_given_by_its_numpy_dtype_or_type(tmp_path):
    keys = {"a": np.uint16, "b": np.dtype(">u4"), "c": Key(dtype=np.float32), "d": bool}
    with ShardWriter(tmp_path / "s", keys) as writer:
        writer.append({"a": [1], "b": [70_000], "c": [0.5], "d": [1]})
    store = open_store(tmp_path / "s")
    assert [store.dtype(key).name for key in "abcd"] == ["uint16", "uint32", "float32", "bool"]
    for wrong in (object, {"names": 3}, [3]):
        with pytest.raises(ConfigError, match="cannot be stored"):
            ShardWriter(tmp_path / "t", {"a": wrong})
