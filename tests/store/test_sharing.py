"""One store for many threads and processes: the shard cache, its cap, shared memory, pickling."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.store.helpers import flat_tokens, three_shards, token_records, write

from penstock.errors import DataError
from penstock.store import Store, advice, mapping, open_store, segments

LENGTHS = [7, 0, 5, 9, 3, 8, 8, 1, 0, 6] * 6


@pytest.fixture
def many(tmp_path):
    """A store of about 40 shards, and its tokens."""
    records = token_records(LENGTHS)
    return write(tmp_path / "many", records, max_tokens_per_shard=9), flat_tokens(records)


@pytest.fixture
def small_cap(monkeypatch):
    monkeypatch.setattr(mapping.POOL, "cap", 5)
    mapping.POOL.evict(len(mapping.POOL))
    return mapping.POOL


def open_slots(store):
    columns = [*store.contents.columns.values()]
    columns += [level.offsets for levels in store.contents.levels.values() for level in levels]
    unique = {id(column): column for column in columns}.values()
    return sum(slot is not None for column in unique for slot in column._slots)


# ---------------------------------------------------------------------------- the cap


def test_no_more_shards_are_mapped_than_the_cap_allows(many, small_cap):
    path, tokens = many
    store = open_store(path)
    for begin in range(len(tokens) - 1):
        assert (
            store.read(begin, begin + 2, "sequence").tolist() == tokens[begin : begin + 2].tolist()
        )
        assert open_slots(store) <= small_cap.cap
    rng = np.random.default_rng(0)
    for _ in range(50):
        starts = rng.integers(0, len(tokens) - 20, 16)
        rows = store.gather(starts, 20, "sequence")
        assert rows.tolist() == [tokens[start : start + 20].tolist() for start in starts]
        store.cuts(starts, 20)
        store.advise(starts, 20, "loss_mask")
        assert open_slots(store) <= small_cap.cap


def test_the_cap_is_one_for_all_stores_and_closing_gives_back(many, small_cap):
    path, _ = many
    stores = [open_store(path) for _ in range(4)]
    for store in stores:
        store.read(0, 30, "sequence")
    assert sum(map(open_slots, stores)) <= small_cap.cap
    for store in stores:
        store.close()
    assert len(small_cap) == 0


def test_a_shard_read_again_survives_one_read_once(many, small_cap):
    path, _ = many
    store = open_store(path)
    bounds = store.bounds("sequence")
    column = store.contents.columns["sequence"]
    for shard in range(20):
        store.read(0, 1, "sequence")
        store.read(int(bounds[shard]), int(bounds[shard]) + 1, "sequence")
        assert column._slots[0] is not None


def test_a_view_outlives_the_mapping_it_came_from(many, small_cap):
    path, tokens = many
    store = open_store(path)
    views = [store.read(begin, begin + 1, "sequence") for begin in range(len(tokens))]
    store.close()
    assert np.concatenate(views).tolist() == tokens.tolist()


def test_descriptors_are_never_exhausted(many):
    path, _ = many
    program = f"""
import os, resource
import numpy as np
from penstock.store import open_store
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
store = open_store({str(path)!r})
bounds = store.bounds("sequence")
assert len(bounds) > 30
kept = [store.read(int(b), int(b) + 1, "sequence") for b in bounds[:-1]]
assert store.gather([0, 50, 100], 150, "sequence").shape == (3, 150)
assert len(os.listdir("/proc/self/fd")) < 10
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_libc_pythons_own_mappings_stay_under_the_cap_too(many, small_cap, monkeypatch):
    monkeypatch.setattr(mapping, "LIBC", None)
    path, tokens = many
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    store = open_store(path)
    for begin in range(0, len(tokens) - 20, 5):
        assert (
            store.gather([begin], 20, "sequence")[0].tolist() == tokens[begin : begin + 20].tolist()
        )
        assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before + small_cap.cap + 1
    assert store.share_memory_().read(3, 9, "sequence").tolist() == tokens[3:9].tolist()


def test_running_out_of_descriptors_makes_room_and_tries_again(many, monkeypatch):
    path, tokens = many
    real, failures = os.open, [24, 23, 12]

    def sometimes(name, *rest, **options):
        if str(name).endswith("sequence.bin") and failures:
            raise OSError(failures.pop(), "too many")
        return real(name, *rest, **options)

    monkeypatch.setattr(os, "open", sometimes)
    store = open_store(path)
    with pytest.raises(DataError, match=r"sequence\.bin cannot be opened \(too many\)"):
        store.read(0, 1, "sequence")
    assert store.read(0, 1, "sequence").tolist() == tokens[:1].tolist()


# ---------------------------------------------------------------------------- threads


@pytest.mark.parametrize("cap", [3, 10_000])
def test_many_threads_read_one_store_exactly_while_shards_come_and_go(many, monkeypatch, cap):
    monkeypatch.setattr(mapping.POOL, "cap", cap)
    path, tokens = many
    store = open_store(path)
    wrong: list[str] = []
    before = sys.getswitchinterval()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(150):
            starts = rng.integers(0, len(tokens) - 15, 8)
            store.advise(starts, 15, "sequence")
            rows = store.gather(starts, 15, "sequence")
            if rows.tolist() != [tokens[start : start + 15].tolist() for start in starts]:
                wrong.append(f"gather {starts}")
            store.cuts(starts, 15)
            index = int(rng.integers(0, len(LENGTHS)))
            if len(store.record(index, "sequence")) != LENGTHS[index]:
                wrong.append(f"record {index}")

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []


def test_a_mapped_shard_is_found_without_the_lock(many):
    path, _ = many
    store = open_store(path)
    store.gather([0, 30], 15, "sequence")
    done = threading.Event()

    def read() -> None:
        store.gather([0, 30], 15, "sequence")
        store.read(0, 5, "sequence")
        store.advise([0, 30], 15, "sequence")
        done.set()

    with mapping.POOL.lock:
        threading.Thread(target=read).start()
        assert done.wait(10)


def test_a_gather_keeps_what_it_reads_mapped_while_another_thread_evicts(many, monkeypatch):
    """Evict at the worst moment: between finding the rows and copying them."""
    path, tokens = many
    store = open_store(path)
    starts = np.arange(0, 200, 11)
    store.gather(starts, 6, "sequence")
    real = segments.Column._pieces

    def evict_after(column, starts, length):
        pieces = real(column, starts, length)
        mapping.POOL.evict(len(mapping.POOL))
        return pieces

    monkeypatch.setattr(segments.Column, "_pieces", evict_after)
    rows = store.gather(starts, 6, "sequence")
    assert rows.tolist() == [tokens[start : start + 6].tolist() for start in starts.tolist()]


def test_rows_are_expected_at_random_in_shards_open_already_and_in_those_opened_later(
    many, monkeypatch
):
    path, tokens = many
    store = open_store(path)
    column = store.contents.columns["sequence"]
    column.segment(0)
    told = []
    monkeypatch.setattr(segments, "expect_random", lambda at, size: told.append((at, size)))
    store.expect_random("sequence")
    column.segment(1)
    slots = [column._slots[shard] for shard in (0, 1)]
    assert told == [(slot.__array_interface__["data"][0], slot.nbytes) for slot in slots]
    assert store.read(0, len(tokens), "sequence").tolist() == tokens.tolist()


# ---------------------------------------------------------------------------- reading ahead


def test_reading_ahead_is_one_call_for_many_ranges(many, monkeypatch):
    path, tokens = many
    store = open_store(path)
    calls = []
    monkeypatch.setattr(advice, "_advise_block", lambda block: calls.append(block) or True)
    store.advise(np.arange(0, len(tokens) - 5), 5, "sequence")
    assert len(calls) == 1
    addresses, lengths = calls[0].T.astype(np.int64)
    assert (addresses % advice.PAGE == 0).all()
    assert (lengths % advice.PAGE == 0).all()
    assert (addresses[1:] > addresses[:-1] + lengths[:-1]).all()
    column = store.contents.columns["sequence"]
    for shard, slot in enumerate(column._slots):
        address = slot.__array_interface__["data"][0]
        inside = (addresses <= address) & (address + slot.nbytes <= addresses + lengths)
        assert inside.any(), shard


def test_more_ranges_than_one_call_takes_are_several_calls(monkeypatch):
    calls = []
    monkeypatch.setattr(advice, "_advise_block", lambda block: calls.append(len(block)) or True)
    begin = np.arange(1, 2502) * (2 * advice.PAGE)
    advice.will_need(begin, begin + 1)
    assert calls == [1024, 1024, 453]


def test_where_the_kernel_refuses_each_range_is_one_madvise_and_it_is_not_asked_again(
    many, monkeypatch
):
    path, _ = many
    store = open_store(path)
    monkeypatch.setattr(advice, "_SELF", advice._Process())
    monkeypatch.setattr(advice, "_PROCESS_MADVISE", 100_000)  # no such system call
    store.advise([0, 50], 5, "sequence")
    assert advice._SELF.refused
    monkeypatch.setattr(advice, "_advise_block", lambda _: pytest.fail("asked again"))
    store.advise([0, 50], 5, "sequence")
    monkeypatch.setattr(advice, "LIBC", None)
    store.advise([0, 50], 5, "sequence")


def resident(values):
    """Whether all pages of a mapped array are in memory, as the kernel sees it."""
    address = values.__array_interface__["data"][0] & -advice.PAGE
    size = values.nbytes + advice.PAGE
    pages = (ctypes.c_ubyte * (size // advice.PAGE + 1))()
    assert mapping.LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    return all(page & 1 for page in pages[: size // advice.PAGE])


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel")
def test_advice_brings_pages_into_memory(tmp_path):
    path = tmp_path / "x.bin"
    np.zeros(1 << 23, np.uint16).tofile(path)
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    store = open_store(path, dtype="uint16")
    rows = [store.read(begin, begin + 2049, "sequence") for begin in (1 << 20, 1 << 22)]
    store.advise([1 << 22, 1 << 20], 2049, "sequence")
    deadline = time.monotonic() + 30
    while not all(map(resident, rows)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------------- processes


def checksum(store: Store) -> tuple[int, int, list[int]]:
    total = int(store.read(0, len(store), "sequence").sum())
    return total, store.documents, store.cuts([0], len(store)).tolist()


def answer(store: Store, pipe: object) -> None:
    pipe.send((checksum(store), store._shared is not None))  # type: ignore[attr-defined]


@pytest.mark.parametrize("storage", ["bin", "h5"])
def test_a_pickled_store_opens_again_by_its_path(tmp_path, storage):
    store = open_store(
        write(tmp_path, token_records(LENGTHS), storage=storage, max_tokens_per_shard=99)
    )
    copy = pickle.loads(pickle.dumps(store))
    assert type(copy) is type(store)
    assert checksum(copy) == checksum(store)
    assert copy.fingerprint == store.fingerprint
    assert len(pickle.dumps(store)) < 2000
    shared = pickle.loads(pickle.dumps(store.share_memory_()))
    assert checksum(shared) == checksum(store)
    store.close()
    with pytest.raises(RuntimeError, match="closed"):
        pickle.loads(pickle.dumps(store)).read(0, 1, "sequence")
    assert pickle.loads(pickle.dumps(Store())).keys == []


def test_a_store_in_memory_is_pickled_with_its_values():
    store = Store()
    store._normalize({"sequence": [np.arange(4), np.arange(3)]})
    copy = pickle.loads(pickle.dumps(store))
    assert copy.bounds("sequence").tolist() == [0, 4, 7]
    assert copy.read(0, 7, "sequence").tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert copy.fingerprint == store.fingerprint


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("shared", [False, True])
def test_workers_read_the_same_store(tmp_path, method, shared):
    store = three_shards(tmp_path / "store")
    if shared:
        store.share_memory_()
        (tmp_path / "store").rename(tmp_path / "gone")  # nothing is read from disk any more
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=answer, args=(store, there))
    process.start()
    assert here.recv() == (checksum(store), shared)
    process.join()
    assert process.exitcode == 0


def shared_names():
    """Names in shared memory, but for the semaphores of tests that run beside this one."""
    return sorted(p for p in Path("/dev/shm").iterdir() if not p.name.startswith("sem."))


def test_shared_memory_is_shared_and_leaves_nothing_behind(tmp_path):
    store = three_shards(tmp_path).share_memory_()
    names = shared_names()
    before = store.read(0, 1, "sequence").tolist()
    child = os.fork()
    if not child:
        store._shared._memory[:2] = [7, 0]
        os._exit(0)
    os.waitpid(child, 0)
    assert before != [7]
    assert store.read(0, 1, "sequence").tolist() == [7]
    descriptor = store._shared._descriptor
    os.fstat(descriptor)
    store.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert shared_names() == names


def test_sharing_keeps_shards_records_and_facts(tmp_path):
    store = open_store(
        write(
            tmp_path, token_records(LENGTHS), max_tokens_per_shard=9, metadata={"eos_token_id": 0}
        )
    )
    facts = lambda: (  # noqa: E731
        store.bounds("sequence").tolist(), store.fingerprint, store.metadata, store.documents,
        store.record_lengths().tolist(), store.path, store.dtype("loss_mask"),
        store.gather([0, 33, 150], 40, "sequence").tolist(),
    )  # fmt: skip
    before = facts()
    assert store.share_memory_() is store
    assert facts() == before
    assert store.share_memory_().fetch(0, 3, "loss_mask").dtype == torch.bool


def test_importing_the_room_imports_neither_torch_nor_h5py_nor_arrow():
    program = (
        "import sys, penstock.store; "
        "print(sorted({'torch', 'h5py', 'pyarrow', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
