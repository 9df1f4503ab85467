"""How fast batches come: Penstock beside bare numpy and beside its peers, in one run on one core.

    make bench-loading                              # or: python benchmarks/loading.py --quick

200 M uint16 tokens in documents of log-normal length, batches of 16 x 2048. The reference does the
same work in bare numpy: one gather from the mapped file, two contiguous widenings to int64. Outputs
are compared before anything is timed. Contenders take turns, so that a busy machine is busy for all
of them; a figure is the median of its turns, and what counts is the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock import (
    DataConfig,
    DistributedSampler,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    ShardWriter,
    StatefulDataLoader,
    WindowDataset,
    open_store,
)

B, T = 16, 2048
EOS = 0
Batches = Iterator[Any]


# --- data


def make_data(root: Path, tokens: int) -> None:
    """The same documents as one shard, as 1,000, as ten stores, and as the peers' files."""
    done = root / "done.json"
    if done.exists() and json.loads(done.read_text()) == tokens:
        return
    rng = np.random.default_rng(0)
    lengths = np.maximum(rng.lognormal(6.0, 1.0, tokens // 300), 2).astype(np.int64)
    ends = np.cumsum(lengths)
    ends = np.append(ends[ends < tokens], tokens)
    flat = rng.integers(1, 50_000, tokens, dtype=np.uint16)
    flat[ends - 1] = EOS
    (root / "npy").mkdir(parents=True, exist_ok=True)
    np.save(root / "npy" / "tokens.npy", flat)
    (root / "ds").mkdir(exist_ok=True)
    flat.tofile(root / "ds" / "tokens.ds")
    write(root / "one", flat, ends, tokens)
    write(root / "many", flat, ends, tokens // 1000)
    for k in range(10):
        lo, hi = np.searchsorted(ends, [k * tokens // 10, (k + 1) * tokens // 10])
        begin = 0 if lo == 0 else ends[lo - 1]
        part = ends[lo:hi] - begin
        write(root / f"source{k}", flat[begin : begin + part[-1]], part, tokens)
    done.write_text(json.dumps(tokens))


def write(out: Path, flat: np.ndarray, ends: np.ndarray, shard: int) -> None:
    """One store of these documents."""
    offsets = np.concatenate([[0], ends])
    with ShardWriter(
        out, {"sequence": "uint16"}, max_tokens_per_shard=shard, overwrite=True
    ) as writer:
        writer.extend({"sequence": flat}, offsets)


def warm(root: Path) -> None:
    """Have a folder's files in the page cache, whatever an earlier run has dropped."""
    for file in sorted(root.rglob("*")):
        if file.is_file() and file.name != "zeros.bin":
            with file.open("rb") as opened:
                while opened.read(1 << 24):
                    pass


def drop_pages(root: Path) -> None:
    """Take a folder's files out of the page cache; nothing may have them mapped."""
    for file in sorted(root.rglob("*")):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# --- contenders: each an endless iterator of batches


def bare(root: Path) -> Batches:
    """The reference: gather, widen, widen."""
    flat = np.load(root / "npy" / "tokens.npy", mmap_mode="r")
    view = np.lib.stride_tricks.as_strided(np.asarray(flat), (len(flat) - T, T + 1), (2, 2))
    rng = np.random.default_rng(1)
    while True:
        starts = (rng.permutation(len(flat) // (T + 1)) * (T + 1))[: 5000 * B].reshape(-1, B)
        for at in starts:
            rows = view[at]
            yield rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)


def ours(dataset: Any, workers: int = 0, sampler: Any = None) -> Batches:
    """A StatefulDataLoader, epoch after epoch."""
    sampler = sampler or DistributedSampler(dataset, seed=1)
    loader = StatefulDataLoader(dataset, B, sampler, DataConfig(num_workers=workers))
    while True:
        yield from loader


def windows(root: Path, *, packed: bool = False) -> WindowDataset:
    """A store's windows."""
    return WindowDataset(open_store(root), T, pack_sequences=packed)


def mixture(root: Path, workers: int = 0) -> Batches:
    """Ten stores with different weights."""
    dataset = MixtureDataset(
        [windows(root / f"source{k}") for k in range(10)], [f"source{k}" for k in range(10)]
    )
    weights = [1.0 + k for k in range(10)]
    return ours(dataset, workers, MixtureSampler(dataset.cumulative_sizes, weights, seed=1))


class Memmap(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """What one writes by hand for torchdata: a window of a memmap an item."""

    def __init__(self, file: Path) -> None:
        self.flat = np.load(file, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.flat) // (T + 1)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = torch.from_numpy(self.flat[i * (T + 1) : (i + 1) * (T + 1)].astype(np.int64))
        return {"input_ids": row[:-1], "labels": row[1:]}


def torchdata_loader(root: Path) -> Batches:
    """The StatefulDataLoader of torchdata over that dataset."""
    from torchdata.stateful_dataloader import StatefulDataLoader as TheirLoader

    dataset = Memmap(root / "npy" / "tokens.npy")
    loader = TheirLoader(dataset, batch_size=B, sampler=DistributedSampler(dataset, seed=1))
    while True:
        yield from loader


def datatrove_loader(root: Path) -> Batches:
    """The dataset of datatrove with positions from EOS, in torch's DataLoader."""
    from datatrove.utils.dataset import DatatroveFolderDataset

    dataset = DatatroveFolderDataset(
        str(root / "ds"), T, return_positions=True, positions_from_eos_token_id=EOS
    )
    sampler = DistributedSampler(dataset, seed=1)
    loader = torch.utils.data.DataLoader(dataset, batch_size=B, sampler=sampler)
    while True:
        yield from loader


# --- checks


def check(root: Path) -> None:
    """Every contender's first batches hold what they should."""
    flat = np.load(root / "npy" / "tokens.npy", mmap_mode="r")
    by_file = MemoryMappedDataset(root / "npy", T + 1, pack_sequences=True, eos_token_id=EOS)
    packed = ours(by_file)
    theirs, trove = torchdata_loader(root), datatrove_loader(root)
    order = DistributedSampler(by_file, seed=1).order.indices(np.arange(3 * B)).reshape(3, B)
    for indices in order:
        rows = np.stack([flat[i * (T + 1) : (i + 1) * (T + 1)] for i in indices]).astype(np.int64)
        batch, plain, positioned = next(packed), next(theirs), next(trove)
        same = (rows[:, 1:] == batch["labels"].numpy()) | (batch["labels"].numpy() == -100)
        assert (batch["input_ids"].numpy() == rows[:, :-1]).all()
        assert same.all()
        assert torch.equal(plain["input_ids"], batch["input_ids"])
        assert (plain["labels"].numpy() == rows[:, 1:]).all()
        assert torch.equal(positioned["input_ids"][:, :-1], batch["input_ids"])
        assert torch.equal(positioned["positions"][:, :-1], batch["position_ids"].long())
    one, many = (ours(windows(root / name, packed=True)) for name in ("one", "many"))
    for _ in range(3):
        a, b = next(one), next(many)
        assert all(torch.equal(a[key], b[key]) for key in a if key != "max_seqlen")


# --- timing


def take(batches: Batches, count: int) -> float:
    """Tokens a second over `count` batches."""
    start = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count * B * T / (time.perf_counter() - start)


def measure(contenders: dict[str, tuple[Batches, int]], turns: int) -> dict[str, list[float]]:
    """Each contender's rates, one turn of `count` batches at a time."""
    for batches, count in contenders.values():
        take(batches, max(count // 10, 1))
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, (batches, count) in contenders.items():
            rates[name].append(take(batches, count))
    return rates


def busy(root: Path, turns: int) -> tuple[float, float]:
    """Seconds a batch made by hand, in process, takes from a computing main thread; and a loader's.

    Both are differences of two long times, so they are taken in short pairs, side by side.
    """

    def compute() -> int:
        return sum(i * i for i in range(20_000))

    def seconds(batches: Batches | None) -> float:
        start = time.perf_counter()
        for _ in range(20):
            if batches is not None:
                next(batches)
            compute()
        return time.perf_counter() - start

    def lost(batches: Batches) -> float:
        return (seconds(batches) - seconds(None)) / 20

    pair = by_hand(root), ours(windows(root / "one"), workers=4)
    for batches in pair:
        take(batches, 200)
    losses = [[lost(batches) for batches in pair] for _ in range(10 * turns)]
    by_itself, loader = (statistics.median(each) for each in zip(*losses, strict=True))
    return by_itself, loader


def by_hand(root: Path) -> Batches:
    """`take` in a plain loop: nothing read ahead, no threads, no state."""
    dataset, rng = windows(root / "one"), np.random.default_rng(1)
    while True:
        yield dataset.take(rng.integers(0, len(dataset), B))


def cold(root: Path, workers: int) -> float:
    """Tokens a second from files that are in nobody's memory."""
    drop_pages(root / "one")
    dataset = windows(root / "one")
    batches = ours(dataset, workers)
    rate = take(batches, 150)
    batches.close()
    dataset.close()
    return rate


BILLION = 10**9


def constant_start(root: Path) -> tuple[float, float]:
    """Seconds to a first batch, and to one after a resume, at 10^9 samples of an open dataset."""
    folder = root / "billion"
    folder.mkdir(exist_ok=True)
    with (folder / "zeros.bin").open("wb") as file:
        file.truncate(BILLION * 4)  # not a block of it is written
    dataset = MemoryMappedDataset(folder, 2, "*.bin", dtype="uint16")
    assert len(dataset) == BILLION
    times = []
    state: dict[str, Any] = {}
    for _ in range(20):
        start = time.perf_counter()
        loader = StatefulDataLoader(dataset, B, DistributedSampler(dataset, seed=1))
        next(iter(loader))
        first = time.perf_counter()
        state = state or loader.state_dict() | {"position": BILLION // 2}
        built = time.perf_counter()
        loader = StatefulDataLoader(dataset, B, DistributedSampler(dataset, seed=1))
        loader.load_state_dict(state)
        next(iter(loader))
        times.append((first - start, time.perf_counter() - built))
    first, again = zip(*times, strict=True)
    return statistics.median(first), statistics.median(again)


# --- report


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("build/bench-loading"))
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--quick", action="store_true", help="20 M tokens, fewer turns")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    tokens, turns = (20_000_000, 3) if options.quick else (options.tokens, 9)
    root = options.data / str(tokens)
    root.mkdir(parents=True, exist_ok=True)
    make_data(root, tokens)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    check(root)
    warm(root)

    rates = measure(
        {
            "numpy, bare": (bare(root), 1000),
            "windows": (ours(windows(root / "one")), 1000),
            "windows, reading ahead": (ours(windows(root / "one"), workers=4), 1000),
            "1,000 shards": (ours(windows(root / "many")), 500),
            "mixture of ten": (mixture(root), 500),
            "masks, from records": (ours(windows(root / "one", packed=True)), 400),
            "masks, from EOS": (
                ours(
                    MemoryMappedDataset(root / "npy", T + 1, pack_sequences=True, eos_token_id=EOS)
                ),
                400,
            ),
            "torchdata": (torchdata_loader(root), 100),
            "datatrove, positions": (datatrove_loader(root), 40),
        },
        turns,
    )
    median = {name: statistics.median(values) for name, values in rates.items()}
    cost, loss = busy(root, turns)
    colds = [(cold(root, 0), cold(root, 4)) for _ in range(max(turns // 3, 1))]
    without, ahead = (statistics.median(each) for each in zip(*colds, strict=True))

    first, again = constant_start(root)

    def ratio(a: str, b: str) -> float:
        return median[a] / median[b]

    asked: list[tuple[str, float, float]] = [
        ("windows / numpy, bare", ratio("windows", "numpy, bare"), 0.7),
        (
            "windows, reading ahead / numpy, bare",
            ratio("windows, reading ahead", "numpy, bare"),
            0.7,
        ),
        ("windows / torchdata", ratio("windows", "torchdata"), 3.5),
        ("masks, from records / numpy, bare", ratio("masks, from records", "numpy, bare"), 0.22),
        ("masks, from EOS / numpy, bare", ratio("masks, from EOS", "numpy, bare"), 0.22),
        ("masks, from EOS / datatrove", ratio("masks, from EOS", "datatrove, positions"), 8.0),
        ("1,000 shards / windows", ratio("1,000 shards", "windows"), 0.5),
        ("mixture of ten / windows", ratio("mixture of ten", "windows"), 0.5),
        ("busy: loss by take() in process / by the loader", cost / max(loss, 1e-9), 1.0),
        ("cold: reading ahead / without", ahead / without, 3.0),
        ("10 ms / first batch at 10^9 samples", 0.01 / first, 1.0),
        ("10 ms / resume at 10^9 samples", 0.01 / again, 1.0),
    ]
    report(rates, asked, tokens)
    if options.json:
        figures = {"rates": rates, "ratios": {name: got for name, got, _ in asked}}
        options.json.write_text(json.dumps(figures, indent=1))


def report(
    rates: dict[str, list[float]], asked: list[tuple[str, float, float]], tokens: int
) -> None:
    """The two tables."""
    print(f"{tokens:,} tokens, batches of {B} x {T}, one core of {os.cpu_count()}; {versions()}\n")
    for name, values in rates.items():
        low, mid, high = (f(values) / 1e6 for f in (min, statistics.median, max))
        print(f"{name:26} {mid:8,.0f} M tokens/s   ({low:,.0f} to {high:,.0f})")
    print()
    for name, got, floor in asked:
        print(f"{name:52} {got:7.2f}   asked {floor:5.2f}   {'ok' if got >= floor else 'SHORT'}")


def versions() -> str:
    """What ran."""
    found = [f"Python {platform.python_version()}"]
    for name in ("penstock", "numpy", "torch", "torchdata", "datatrove"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} (not installed)")
    return ", ".join(found)


if __name__ == "__main__":
    main()
