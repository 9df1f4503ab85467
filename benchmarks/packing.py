"""How fast lengths become rows, and rows batches: Penstock beside its peers in one run.

    make bench-packing                              # or: python benchmarks/packing.py --quick

Log-normal lengths, T = 2,048. Rows, padding and contents are compared before anything is timed.
Peers are given fewer documents, since each costs them the same however many there are. TRL and
Grain move the tokens along, of one byte here, because their interface is made of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock import (
    DataConfig,
    DistributedSampler,
    PackedDataset,
    ShardWriter,
    StatefulDataLoader,
    open_store,
    pack_rows,
)

B, T = 16, 2048


def lognormal(count: int, seed: int = 0) -> np.ndarray:
    """Lengths around 400 tokens, a tenth of them longer than a row."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(6.0, 1.2, count), 1, 65_535).astype(np.uint16)


def seconds(run: Callable[[], Any]) -> float:
    """What one run takes, garbage collected before."""
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# --- peers: each from lengths to the rows it makes, as a count


def olmo(lengths: np.ndarray) -> int:
    """OLMo-core's optimised best-fit decreasing."""
    from olmo_core.data.utils import InstancePacker

    ends = np.cumsum(lengths, dtype=np.int64)
    packer = InstancePacker(T)
    instances, _, _ = packer.pack_documents(np.stack([ends - lengths, ends], 1))
    return len(instances)


def trl_dataset(lengths: np.ndarray) -> Any:
    """Documents of one-byte tokens, for TRL."""
    import datasets
    import pyarrow as pa

    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = pa.array(np.zeros(int(offsets[-1]), np.int8))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), tokens)})
    return datasets.Dataset(table).with_format("arrow")


def trl(dataset: Any) -> int:
    """TRL's bfd, all documents as one batch."""
    from trl import pack_dataset

    options = {"batch_size": len(dataset), "load_from_cache_file": False, "keep_in_memory": True}
    return len(pack_dataset(dataset, T, strategy="bfd", map_kwargs=options))


def grain_rows(lengths: np.ndarray) -> int:
    """Grain's best fit, as documents come, over 64 open rows."""
    from grain._src.python.dataset.transformations.packing import BestFitPackIterDataset
    from grain.python import MapDataset

    documents = MapDataset.source([{"x": np.zeros(n, np.int8)} for n in lengths.tolist()])
    packed = BestFitPackIterDataset(
        documents.to_iter_dataset(), length_struct={"x": T}, num_packing_bins=64
    )
    return sum(1 for _ in packed)


# --- the rolling buffer, scanned


def scanned(lengths: list[int], capacity: int, least: int = 1000, batch: int = 128) -> int:
    """The policy of best_fit_crop with the buffer looked through for each pick."""
    waiting: list[int] = []
    at = rows = 0
    while waiting or at < len(lengths):
        room = capacity
        while room and (waiting or at < len(lengths)):
            while len(waiting) < least and at < len(lengths):
                waiting += lengths[at : at + batch]
                at += batch
            best = found = -1
            for i, length in enumerate(waiting):
                if best < length <= room:
                    best, found = length, i
            if found < 0:
                found = min(range(len(waiting)), key=waiting.__getitem__)
            room -= min(waiting.pop(found), room)
        rows += 1
    return rows


def scanning_loader(tokens: np.ndarray, lengths: list[int]) -> Iterator[Any]:
    """That policy making batches as nanochat does: rows filled from a pool of tokens, copied."""
    pool = torch.from_numpy(tokens.astype(np.int64))
    starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    waiting: list[tuple[int, int]] = []
    at = 0
    rows = torch.empty((B, T + 1), dtype=torch.long)
    while True:
        for row in rows:
            column = 0
            while column <= T:
                while len(waiting) < 1000:
                    waiting += [(starts[d % len(lengths)], lengths[d % len(lengths)])
                                for d in range(at, at + 128)]  # fmt: skip
                    at += 128
                room = T + 1 - column
                best = found = -1
                for i, (_, length) in enumerate(waiting):
                    if best < length <= room:
                        best, found = length, i
                if found < 0:
                    found = min(range(len(waiting)), key=lambda i: waiting[i][1])
                start, length = waiting.pop(found)
                length = min(length, room)
                row[column : column + length] = pool[start : start + length]
                column += length
        yield rows[:, :-1].clone(), rows[:, 1:].clone()


# --- measuring


def plan_rates(documents: int, peers: int) -> dict[str, float]:
    """Documents a second, by whom; what they make is compared first."""
    few, some = lognormal(peers), lognormal(documents)
    cut = np.minimum(few, T)
    ours = pack_rows(few, T)
    assert ours.ledger.balanced
    assert len(ours) == olmo(cut), "OLMo-core packs otherwise"
    assert len(ours) == trl(trl_dataset(few)), "TRL packs otherwise"
    first = few[:5000]
    assert grain_rows(np.minimum(first, T)) >= len(pack_rows(first, T)), "Grain packs tighter"
    crop = pack_rows(few[:20_000], T + 1, "best_fit_crop")
    assert len(crop) == scanned(few[:20_000].tolist(), T + 1), "the policies differ"
    rates = {
        f"best_fit_decreasing, {documents:,}": documents / seconds(lambda: pack_rows(some, T)),
        f"best_fit_decreasing, {peers:,}": peers / seconds(lambda: pack_rows(few, T)),
        "best_fit_decreasing, split": documents
        / seconds(lambda: pack_rows(some, T, overflow="split")),
        "best_fit_decreasing, chunks": peers / seconds(lambda: pack_rows(few, T, chunk_rows=1000)),
        "concat": documents / seconds(lambda: pack_rows(some, T, "concat")),
        "OLMo-core InstancePacker": peers / seconds(lambda: olmo(cut)),
    }
    dataset = trl_dataset(few)
    rates["TRL bfd"] = peers / seconds(lambda: trl(dataset))
    sample = np.minimum(few[:20_000], T)
    rates["Grain best fit"] = len(sample) / seconds(lambda: grain_rows(sample))
    rates["best_fit_crop"] = peers / seconds(lambda: pack_rows(few, T + 1, "best_fit_crop"))
    lengths = few[:20_000].tolist()
    rates["best_fit_crop, scanned"] = len(lengths) / seconds(lambda: scanned(lengths, T + 1))
    return rates


def memory(documents: int) -> float:
    """Bytes a document at the peak, its length included."""
    lengths = lognormal(documents)
    tracemalloc.start()
    pack_rows(lengths, T)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return (peak + lengths.nbytes) / documents


def batch_rates(root: Path, turns: int) -> dict[str, float]:
    """Tokens a second in packed batches, over tokens that are there already."""
    shutil.rmtree(root, ignore_errors=True)
    lengths = lognormal(60_000)
    tokens = np.random.default_rng(0).integers(0, 50_000, int(lengths.sum()), np.uint16)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    with ShardWriter(root / "store", {"sequence": "uint16"}) as writer:
        writer.extend({"sequence": tokens}, ends)
    store = open_store(root / "store")
    dataset = PackedDataset(store, T, "best_fit_crop")
    slow = scanning_loader(tokens, lengths.tolist())
    for at in range(3):  # the same rows, in the plan's order
        inputs, targets = next(slow)
        batch = dataset.take(range(at * B, (at + 1) * B))
        assert torch.equal(batch["input_ids"], inputs)
        kept = batch["labels"] != -100
        assert torch.equal(batch["labels"][kept], targets[kept])
    decreasing = PackedDataset(store, T)

    def endless(packed: PackedDataset) -> Iterator[Any]:
        config = DataConfig(num_workers=0)
        loader = StatefulDataLoader(packed, B, DistributedSampler(packed, 1, 0), config)
        while True:
            yield from loader

    contenders = {
        "best_fit_crop, batches with masks": (endless(dataset), 200),
        "best_fit_decreasing, batches with masks": (endless(decreasing), 200),
        "best_fit_crop scanned, batches": (slow, 5),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, (batches, count) in contenders.items():
            spent = seconds(lambda b=batches, n=count: [next(b) for _ in range(n)])
            rates[name].append(count * B * T / spent)
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/bench-packing"))
    parser.add_argument("--quick", action="store_true", help="fewer documents")
    parser.add_argument("--long", action="store_true", help="10^8 documents, too")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    documents, peers = (10**6, 10**5) if options.quick else (10**7, 3 * 10**5)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    plans = plan_rates(documents, peers)
    if options.long:
        huge = np.tile(lognormal(10**7), 10)
        plans["best_fit_decreasing, 100,000,000"] = len(huge) / seconds(lambda: pack_rows(huge, T))
        del huge
    batches = batch_rates(options.data, 5)
    bytes_each = memory(documents)
    fastest = max(plans[name] for name in ("OLMo-core InstancePacker", "TRL bfd", "Grain best fit"))
    decreasing = plans[f"best_fit_decreasing, {documents:,}"]
    crop = batches["best_fit_crop, batches with masks"]
    asked = [
        ("best_fit_decreasing / 10 M documents a second", decreasing / 10e6, 1.0),
        ("best_fit_decreasing / the fastest peer", decreasing / fastest, 40.0),
        ("40 bytes / memory a document", 40 / bytes_each, 1.0),
        ("best_fit_crop / 200,000 documents a second", plans["best_fit_crop"] / 200e3, 1.0),
        ("best_fit_crop / scanned", plans["best_fit_crop"] / plans["best_fit_crop, scanned"], 18.0),
        ("its batches / scanned ones", crop / batches["best_fit_crop scanned, batches"], 8.0),
    ]
    if options.long:
        rate = plans["best_fit_decreasing, 100,000,000"]
        asked.append(("best_fit_decreasing at 10^8 / 5 M", rate / 5e6, 1.0))
    named = ("penstock", "numpy", "torch", "ai2-olmo-core", "trl", "grain")
    print(
        f"T = {T}, one core of {os.cpu_count()}; Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in named)
    )
    print(f"{bytes_each:.1f} bytes of memory a document\n")
    for name, rate in plans.items():
        print(f"{name:42} {rate / 1e6:10.3f} M documents/s")
    for name, rate in batches.items():
        print(f"{name:42} {rate / 1e6:10.1f} M tokens/s")
    print()
    for name, got, floor in asked:
        print(f"{name:52} {got:7.2f}   asked {floor:5.2f}   {'ok' if got >= floor else 'SHORT'}")
    if options.json:
        figures = {"rates": plans | batches, "ratios": {name: got for name, got, _ in asked}}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
