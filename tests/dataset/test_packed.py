"""Packed rows hold what their plan says, labels stay in documents, plans are made once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.dataset.stores import astrai, documents, npy, penstock
from torch.utils.data import DataLoader

from penstock import (
    ConfigError,
    DataError,
    DistributedSampler,
    H5Store,
    MixtureDataset,
    MmapStore,
    PackedDataset,
    StatefulDataLoader,
    StateMismatch,
    open_store,
)
from penstock.config import DataConfig
from penstock.dataset import plans
from penstock.store import Store

ROOT = Path(__file__).parents[2]
BOS, PAD = 7, 9
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "concat"},
    {"strategy": "concat", "last": "drop"},
    {"strategy": "simple"},
    {"strategy": "best_fit_crop", "buffer_size": 4, "refill": 2},
    {"strategy": "best_fit_crop", "buffer_size": 4, "refill": 2, "bos": "every"},
    {"strategy": "best_fit_decreasing", "chunk_rows": 3},
    {"strategy": "best_fit_decreasing", "bos": "continued"},
    {"strategy": "bfd", "bos": "every"},
    {"strategy": "bfd", "overflow": "truncate_start"},
]


def texts(lengths: Sequence[int]) -> list[list[int]]:
    """Documents whose tokens tell which document and place they are."""
    return [[100 + 50 * (d % 1000) + i for i in range(length)] for d, length in enumerate(lengths)]


def packed(store: Store, seq_len: int = 8, **options: Any) -> PackedDataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some rows of random documents have no label
        return PackedDataset(store, seq_len, bos_token_id=BOS, pad_token_id=PAD, **options)


def expected(
    dataset: PackedDataset, row: int, docs: Sequence[Sequence[int]], masks: Any = None
) -> dict[str, list[int]]:
    """A row from its plan, token by token."""
    plan, width = dataset.plan, dataset.width
    tokens, trained, positions, numbers = [], [], [], []
    first, last = plan.row_splits[row : row + 2].tolist()
    starts = np.cumsum([0, *map(len, docs)])
    for number, piece in enumerate(range(first, last)):
        document = int(plan.document[piece])
        start = int(plan.begin[piece] - starts[document])
        span = slice(start, start + int(plan.length[piece]))
        own = list(docs[document][span])
        mask = [True] * len(own) if masks is None else list(masks[document][span])
        if plan.bos[piece]:
            own, mask = [BOS, *own], [False, *mask]
        tokens += own
        trained += [m and i > 0 for i, m in enumerate(mask)]  # no label across documents
        positions += range(len(own))
        numbers += [number] * len(own)
    padding = width - len(tokens)
    assert padding >= 0
    tokens, trained = tokens + [PAD] * padding, trained + [False] * padding
    positions, numbers = positions + list(range(padding)), numbers + [last - first] * padding
    return {
        "input_ids": tokens[:-1],
        "labels": [t if m else -100 for t, m in zip(tokens[1:], trained[1:], strict=True)],
        "doc_ids": numbers[:-1],
        "position_ids": positions[:-1],
    }


def check(dataset: PackedDataset, docs: Sequence[Sequence[int]], masks: Any = None) -> None:
    """All rows as one batch, against all rows token by token."""
    if not len(dataset):
        return
    batch = dataset.take(range(len(dataset)))
    rows = [expected(dataset, row, docs, masks) for row in range(len(dataset))]
    for key in rows[0]:
        assert batch[key].tolist() == [row[key] for row in rows], key
    flat = [(r, d) for r, row in enumerate(rows) for d in row["doc_ids"]]
    edges = [i for i in range(len(flat)) if i == 0 or flat[i] != flat[i - 1]]
    assert batch["cu_seqlens"].tolist() == [*edges, len(flat)]
    assert batch["max_seqlen"] == int(np.diff(batch["cu_seqlens"]).max())
    assert dataset.plan.ledger.balanced
    labelled = sum(any(label != -100 for label in row["labels"]) for row in rows)
    assert dataset.plan.unlabelled == len(rows) - labelled


# ------------------------------------------------------------------------------------- content


@pytest.mark.parametrize("options", STRATEGIES, ids=lambda o: "-".join(map(str, o.values())))
@given(
    lengths=st.lists(st.integers(0, 30), max_size=25),
    masked=st.booleans(),
    seq_len=st.integers(2, 12),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_are_the_plans_rows_token_by_token(
    tmp_path_factory: pytest.TempPathFactory,
    options: dict[str, Any],
    lengths: list[int],
    masked: bool,
    seq_len: int,
) -> None:
    root = tmp_path_factory.mktemp("packed")
    docs = texts(lengths)
    rng = np.random.default_rng(len(lengths))
    masks = [rng.random(length) < 0.6 for length in lengths] if masked else None
    keys = {"sequence": "uint16"} | ({"loss_mask": "bool"} if masked else {})
    records = [
        {"sequence": d} | ({"loss_mask": masks[i]} if masks else {}) for i, d in enumerate(docs)
    ]
    path = penstock(root / "s", records, keys, shard=40)
    dataset = packed(open_store(path), seq_len, **options)
    check(dataset, docs, masks)


def test_every_token_is_a_target_once_under_concat_but_the_first_of_each_document(
    tmp_path: Path,
) -> None:
    docs = texts([5, 1, 17, 30, 2])
    dataset = packed(open_store(documents(tmp_path / "s", *docs)), 8, strategy="concat")
    labels = dataset.take(range(len(dataset)))["labels"]
    targets = sorted(labels[labels != -100].tolist())
    assert targets == sorted(token for doc in docs for token in doc[1:])


def test_documents_that_end_with_eos_are_packed_from_flat_files_too(tmp_path: Path) -> None:
    docs = [[11, 12, 0], [13, 0], [14, 15, 16, 17, 0], [18, 19]]
    folder = npy(tmp_path / "npy", [*docs[0], *docs[1]], [*docs[2], *docs[3]])
    store = MmapStore(file_pattern="*.npy").load(folder)
    with pytest.raises(ConfigError, match="eos_token_id is required to pack"):
        PackedDataset(store, 4)
    dataset = packed(store, 5, eos_token_id=0)
    check(dataset, docs)
    assert dataset.plan.ledger.documents == 4
    meta = astrai(tmp_path / "astrai", {"sequence": np.concatenate(docs).astype(np.int32)})
    check(packed(open_store(meta), 5, eos_token_id=0), docs)


def test_eos_is_found_across_the_blocks_of_a_scan(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(plans, "BLOCK", 1)  # scans of 16 tokens, lengths one by one
    rng = np.random.default_rng(0)
    flat = rng.integers(0, 9, 500)
    ends = np.flatnonzero(flat == 0) + 1
    docs = [part.tolist() for part in np.split(flat, ends) if len(part)]
    store = MmapStore(file_pattern="*.npy").load(npy(tmp_path / "npy", flat))
    check(packed(store, 12, eos_token_id=0), docs)


def test_a_row_without_labels_is_reported(tmp_path: Path) -> None:
    records = [
        {"sequence": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 0, 0]},
        {"sequence": [1, 2, 3, 4, 5], "loss_mask": [1, 0, 0, 0, 0]},  # its first is no label
        {"sequence": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 0, 1]},
    ]
    path = penstock(tmp_path / "s", records, {"sequence": "uint16", "loss_mask": "bool"})
    with pytest.warns(UserWarning, match="2 of the 3 rows .* no label to train on"):
        dataset = PackedDataset(open_store(path), 4)
    assert dataset.report()["rows_without_labels"] == 2


def test_the_report_accounts_for_every_token(tmp_path: Path) -> None:
    docs = texts([30, 4, 0, 9])
    report = packed(open_store(documents(tmp_path / "s", *docs)), 8, strategy="bfd").report()
    assert report["tokens"] == 43 == report["placed"] + report["cropped"]
    assert report["rows"] * 9 == report["placed"] + report["padding"]
    assert report["documents_cropped"] == 1
    assert report["documents_empty"] == 1
    assert 0 < report["utilisation"] < 1
    assert json.loads(json.dumps(report)) == report
    assert report["strategy"] == "best_fit_decreasing"


def test_items_are_rows_and_torchs_own_loader_takes_them(tmp_path: Path) -> None:
    dataset = packed(open_store(documents(tmp_path / "s", *texts([5, 9, 3, 8, 8]))), 8)
    item = dataset[1]
    assert set(item) == {"input_ids", "labels", "doc_ids", "position_ids"}
    batches = list(DataLoader(dataset, batch_size=2))
    whole = dataset.take(range(len(dataset)))
    assert torch.equal(torch.cat([batch["labels"] for batch in batches]), whole["labels"])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_no_documents_are_no_rows(tmp_path: Path) -> None:
    for name, docs in (("none", []), ("empty", [[], []])):
        assert len(packed(open_store(documents(tmp_path / name, *docs)), 8)) == 0


def test_what_cannot_be_packed_is_said(tmp_path: Path) -> None:
    store = open_store(documents(tmp_path / "s", [1, 2, 3]))
    with pytest.raises(ConfigError, match=r"bos='every' needs bos_token_id"):
        PackedDataset(store, 4, bos="every")
    with pytest.raises(ConfigError, match="bos_token_id 70000 does not fit into uint16"):
        PackedDataset(store, 4, bos="every", bos_token_id=70_000)
    with pytest.raises(ConfigError, match="at least two tokens"):
        PackedDataset(store, 0)
    with pytest.raises(ConfigError, match="balance is 'attention' or None"):
        PackedDataset(store, 4, balance="tokens")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"meant: concat\?"):
        PackedDataset(store, 4, "concatenate")


# --------------------------------------------------------------------------------------- plans


def test_a_plan_is_computed_once_and_found_again(tmp_path: Path, monkeypatch: Any) -> None:
    made = []
    real = plans._write
    monkeypatch.setattr(plans, "_write", lambda *a: made.append(1) or real(*a))
    path = documents(tmp_path / "s", *texts([5, 9, 30, 8]))
    first = packed(open_store(path), 8)
    assert first.plan.path is not None
    assert first.plan.path.parent == tmp_path / "s.packing"
    assert sorted(p.name for p in first.plan.path.iterdir()) == [
        "begin.column", "bos.column", "document.column", "length.column", "plan.json",
        "row_splits.column",
    ]  # fmt: skip
    again = packed(open_store(path), 8)
    assert made == [1]
    assert again.identity() == first.identity()
    check(again, texts([5, 9, 30, 8]))
    open_store(path)  # which the plan beside it does not disturb


@pytest.mark.parametrize(
    "other",
    [{"seq_len": 9}, {"overflow": "truncate"}, {"strategy": "concat"}, {"chunk_rows": 7},
     {"bos": "every"}],
)  # fmt: skip
def test_another_packing_or_other_data_is_another_plan(tmp_path: Path, other: Any) -> None:
    path = documents(tmp_path / "s", *texts([5, 9, 30, 8]))
    names = {
        packed(open_store(path), **{"seq_len": 8, **options}).plan.path for options in ({}, other)
    }
    assert len(names) == 2
    changed = documents(tmp_path / "t", *texts([5, 9, 30, 9]))
    plan = packed(open_store(changed), 8, cache_dir=tmp_path / "s.packing").plan.path
    assert plan not in names
    assert plan is not None
    assert plan.parent == tmp_path / "s.packing"


def test_a_read_only_place_is_answered_by_the_cache_directory(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    path = documents(tmp_path / "s", *texts([5, 9]))
    (tmp_path / "s.packing").write_text("in the way")  # root may write anywhere but here
    dataset = packed(open_store(path), 8)
    assert dataset.plan.path is not None
    assert dataset.plan.path.parent == tmp_path / "cache" / "packing"
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "s.packing" / "x"))
    with pytest.raises(DataError, match="set PENSTOCK_CACHE_DIR"):
        packed(open_store(path), 9)


def _make(path: str, names: Any) -> None:
    names.put(str(packed(open_store(path), 8).plan.path))


def test_processes_that_come_at_once_share_one_plan(tmp_path: Path) -> None:
    path = documents(tmp_path / "s", *texts([5, 9, 30, 8] * 500))
    context = multiprocessing.get_context("spawn")
    names: Any = context.Queue()
    processes = [context.Process(target=_make, args=(str(path), names)) for _ in range(3)]
    for process in processes:
        process.start()
    found = {names.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert len(found) == 1
    left = sorted(
        p.name for p in (tmp_path / "s.packing").iterdir() if not p.name.endswith(".lock")
    )
    assert left == [Path(found.pop()).name]


SLOW = """
import sys, time
from penstock import PackedDataset, open_store
from penstock.dataset import plans
real = plans.pack_blocks
def slow(*arguments):
    for part in real(*arguments):
        print("packing", flush=True)
        time.sleep(60)
        yield part
plans.pack_blocks = slow
PackedDataset(open_store(sys.argv[1]), 8)
"""


def test_a_writer_that_is_killed_leaves_no_plan_and_no_lock(tmp_path: Path) -> None:
    path = documents(tmp_path / "s", *texts([5, 9, 30, 8]))
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(path)], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"packing\n"
    waiting = threading.Thread(target=lambda: packed(open_store(path), 8))
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive()  # behind the lock
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    waiting.join(timeout=30)
    assert not waiting.is_alive()
    check(packed(open_store(path), 8), texts([5, 9, 30, 8]))
    assert not list((tmp_path / "s.packing").glob(".tmp-*"))


def test_a_damaged_plan_is_one_clear_error(tmp_path: Path) -> None:
    path = documents(tmp_path / "s", *texts([5, 9, 30, 8]))
    plan = packed(open_store(path), 8).plan.path
    assert plan is not None
    whole = (plan / "begin.column").read_bytes()
    (plan / "begin.column").write_bytes(whole[:-8])
    with pytest.raises(DataError, match=r"begin.column holds .* the plan is made anew"):
        packed(open_store(path), 8)
    (plan / "begin.column").write_bytes(whole)
    for text in ("", "{}", json.dumps({"pieces": "x", "rows": 1, "ledger": {}, "definition": {}})):
        (plan / "plan.json").write_text(text)
        with pytest.raises(DataError, match="is no packing plan"):
            packed(open_store(path), 8)


def test_a_plan_of_many_blocks_takes_memory_for_one(tmp_path: Path) -> None:
    """Counted in what numpy allocates: ten times the documents, about the same peak."""
    import tracemalloc

    peaks = []
    for count in (100_000, 1_000_000):
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, 40, count)
        flat = np.zeros(int(lengths.sum()), np.uint8)
        from penstock import ShardWriter

        with ShardWriter(tmp_path / str(count), {"sequence": "uint8"}) as writer:
            writer.extend({"sequence": flat}, np.concatenate([[0], np.cumsum(lengths)]))
        store = open_store(tmp_path / str(count))
        store.fingerprint  # noqa: B018 - computed before what is counted
        tracemalloc.start()
        packed(store, 64)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]


def in_memory(*segments: Sequence[int]) -> Store:
    store = H5Store()  # each of whose segments is a record
    store._normalize({"sequence": [np.array(segment, np.uint16) for segment in segments]})
    return store


def test_the_same_tokens_cut_into_other_documents_are_another_plan(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path))
    one = packed(in_memory([1, 2, 3, 4], [5, 6, 7, 8]), 5)
    other = packed(in_memory([1, 2, 3, 4, 5, 6, 7], [8]), 5)
    assert one.plan.path != other.plan.path
    check(one, [[1, 2, 3, 4], [5, 6, 7, 8]])
    check(other, [[1, 2, 3, 4, 5, 6, 7], [8]])


def test_documents_are_those_of_the_tokens_whatever_records_other_keys_have(
    tmp_path: Path,
) -> None:
    docs = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    folder = astrai(
        tmp_path / "s",
        {"sequence": np.concatenate(docs), "scores": np.zeros(1, np.float32)},
        offsets=[{"sequence": [0, 3, 7, 9], "scores": [0, 1]}],
    )
    check(packed(open_store(folder), 4), docs)


def test_eos_is_part_of_what_a_state_belongs_to(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = MmapStore(file_pattern="*.npy").load(npy(tmp_path / "npy", rng.integers(0, 9, 900)))
    one, other = (packed(store, 16, eos_token_id=eos) for eos in (5, 6))
    state = loaders(one, 1, 4)[0].state_dict()
    loaders(one, 1, 4)[0].load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"tokens\.eos was 5 and is 6"):
        loaders(other, 1, 4)[0].load_state_dict(state)


def test_plans_are_not_taken_for_tokens(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "web" / "0.bin")
    store = MmapStore(dtype="uint16", file_pattern="*.bin").load(tmp_path / "web")
    packed(store, 8, eos_token_id=7)
    every = MmapStore(dtype="uint16", file_pattern="**/*.bin").load(tmp_path)
    assert every.total("sequence") == 2000


def test_another_users_plans_and_locks_are_answered_by_the_cache_directory(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """What the system says to another user is said here to root, whom it refuses nothing."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    path = documents(tmp_path / "s", *texts([5, 9, 30]))
    folder = tmp_path / "s.packing"
    folder.mkdir()
    real = os.open

    def refusing(name: Any, *arguments: Any, **options: Any) -> int:
        if Path(name).parent == folder:
            raise PermissionError(13, "Permission denied", str(name))
        return real(name, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    assert packed(open_store(path), 8).plan.path.parent == tmp_path / "cache" / "packing"


def test_a_place_that_something_else_has_is_named(tmp_path: Path) -> None:
    path = documents(tmp_path / "s", *texts([5, 9, 30]))
    plan = packed(open_store(path), 8).plan.path
    (plan / "plan.json").unlink()
    with pytest.raises(DataError, match=r"cannot be written to .*s\.packing: Directory not empty"):
        packed(open_store(path), 8)


def test_best_fit_crop_puts_bos_before_documents_that_lack_it(tmp_path: Path) -> None:
    docs = texts([5, 9, 30, 4])
    meta = {"bos_token_id": BOS}
    without = open_store(documents(tmp_path / "without", *docs, metadata=meta))
    own = [[BOS, *doc] for doc in docs]
    with_bos = open_store(documents(tmp_path / "with", *own, metadata=meta))
    for store, wanted in ((without, "every"), (with_bos, "never")):
        dataset = packed(store, 8, strategy="best_fit_crop", last="drop")
        assert dataset.packing.bos == wanted
        assert (dataset.take(range(len(dataset)))["input_ids"][:, 0] == BOS).all()
    assert packed(without, 8).packing.bos == "never"


def test_tokens_a_sample_leave_padding_out(tmp_path: Path) -> None:
    store = open_store(documents(tmp_path / "s", *[[1] * 6] * 50))
    assert packed(store, 9, strategy="bfd").tokens_a_sample == 5
    assert packed(store, 23, strategy="concat").tokens_a_sample == 23


def test_a_mixture_is_balanced_in_all_its_datasets_or_in_none(tmp_path: Path) -> None:
    store = open_store(documents(tmp_path / "s", *texts([5, 9, 30])))
    with pytest.raises(ConfigError, match="balanced in all its datasets or in none: 'b' is, 'a'"):
        MixtureDataset([packed(store), packed(store, balance="attention")], ["a", "b"])


# -------------------------------------------------------------------------------------- loading


def loaders(dataset: Any, world: int, size: int) -> list[StatefulDataLoader]:
    return [
        StatefulDataLoader(
            dataset,
            size // world,
            DistributedSampler(dataset, world, rank, seed=1),
            DataConfig(num_workers=0),
        )
        for rank in range(world)
    ]


@pytest.mark.parametrize("mixed", [False, True])
def test_balanced_ranks_share_the_same_global_batches_more_evenly(
    tmp_path: Path, mixed: bool
) -> None:
    rng = np.random.default_rng(0)
    lengths = np.maximum(rng.lognormal(3, 1.2, 4000), 1).astype(int)
    store = open_store(documents(tmp_path / "s", *[[1] * n for n in lengths]))
    kinds = [packed(store, 128, balance=balance) for balance in (None, "attention")]
    if mixed:
        kinds = [MixtureDataset([kind, kind], ["a", "b"]) for kind in kinds]
    flat: list[Any] = [iter(loader) for loader in loaders(kinds[0], 1, 16)]
    plain, even = ([iter(each) for each in loaders(kind, 4, 16)] for kind in kinds)
    worst: list[list[float]] = [[], []]
    for whole in flat[0]:
        rows = sorted(whole["input_ids"].tolist())
        ends = sorted(whole["labels"].tolist())
        for k, ranks in enumerate((plain, even)):
            batches = [next(rank) for rank in ranks]
            assert sorted(torch.cat([b["input_ids"] for b in batches]).tolist()) == rows
            assert sorted(torch.cat([b["labels"] for b in batches]).tolist()) == ends
            spent = [int((np.diff(b["cu_seqlens"]) ** 2).sum()) for b in batches]
            worst[k].append(max(spent) / np.mean(spent))
    assert np.mean(worst[1]) < 1 + (np.mean(worst[0]) - 1) / 2
    gain = packed(store, 128, balance="attention").report(batch_size=4, world_size=4)["attention"]
    assert 1 <= gain["balanced"] < gain["unbalanced"]


def test_a_balanced_run_goes_on_exactly_from_any_batch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = open_store(documents(tmp_path / "s", *[[1] * int(n) for n in rng.integers(1, 60, 900)]))
    dataset = packed(store, 64, balance="attention")
    whole = [batch["labels"].tolist() for batch in loaders(dataset, 2, 8)[1]]
    for stop in (1, 2, 5, 11):
        loader = loaders(dataset, 2, 8)[0]
        for number, _ in enumerate(loader, 1):
            if number == stop:
                break
        again = loaders(dataset, 2, 8)[1]
        again.load_state_dict(loader.state_dict())
        assert [batch["labels"].tolist() for batch in again] == whole[stop:]
