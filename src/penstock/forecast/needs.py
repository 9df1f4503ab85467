"""What a run needs: bytes on disk, in a rank's memory, and read in a step."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path

from penstock.config import DataConfig
from penstock.dataset import PackedDataset
from penstock.dataset.base import SampleDataset
from penstock.dataset.tokens import MASK, TOKENS, TokenDataset
from penstock.forecast.report import Disk, Memory, Reading, StageForecast
from penstock.forecast.spans import Axis
from penstock.loader import StatefulDataLoader
from penstock.loader.jobs import group_of
from penstock.run import RunConfig
from penstock.store import Store
from penstock.store.folder import holds_store, token_files

PAGE = 4096
WIDE, NARROW = 8, 4  # bytes of an id, and of a document's number or a position in it


def disk_of(config: DataConfig, datasets: Sequence[TokenDataset]) -> Disk:
    """Bytes of all stores, each counted once, and of their packing plans."""
    stores = {dataset.store.path for dataset in datasets}
    return Disk(
        stores=sum(_store_bytes(path, config.file_pattern) for path in stores if path),
        plans=sum(plan_bytes(dataset) for dataset in datasets),
    )


def plan_bytes(dataset: TokenDataset) -> int:
    """Bytes of a packing plan on disk; 0 where there is none."""
    if not isinstance(dataset, PackedDataset):
        return 0
    return sum(file.stat().st_size for file in dataset.plan.path.iterdir())


def _store_bytes(path: Path, pattern: str) -> int:
    if path.is_file():
        return path.stat().st_size
    if holds_store(path, pattern):
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in token_files(path, pattern))


def memory_of(
    loader: StatefulDataLoader, run: RunConfig, datasets: Sequence[TokenDataset]
) -> Memory:
    """Bytes that a rank holds, at the largest batch of its schedule."""
    rows = max(size for _, size in run.schedule)
    cells = rows * run.seq_len
    packed = bool(run.data.packing) or run.data.pack_sequences
    dataset: SampleDataset = loader.dataset
    group = group_of(dataset, rows) * rows * dataset.sample_bytes
    ahead = loader.config.num_workers * loader.config.prefetch_factor
    return Memory(
        mapped=sum(plan_bytes(dataset) + _offset_bytes(dataset.store) for dataset in datasets),
        batch=2 * WIDE * cells + (2 * NARROW * cells if packed else 0),
        group=group,
        ahead=ahead * group,
    )


def _offset_bytes(store: Store) -> int:
    return 8 * (store.documents_of(TOKENS) + 1) if store.documents_of(TOKENS) else 0


def reading_of(
    axis: Axis,
    run: RunConfig,
    datasets: Sequence[TokenDataset],
    stages: Sequence[StageForecast],
    step_time: float | None,
) -> Reading:
    """Bytes read in a step, on average over the stage and batch size that read most."""
    largest = max(s.size * s.accumulation for s in axis.plan.segments)
    exact, pages = zip(*map(_sample_reads, datasets), strict=True)
    shares = [[amount.share for amount in stage.sources] for stage in stages]
    mean = max(sum(map(float.__mul__, share, exact)) for share in shares)
    paged = max(sum(map(float.__mul__, share, pages)) for share in shares)
    step, in_pages = ceil(mean * largest), ceil(paged * largest)
    found = Reading(step=step, rank=ceil(step / run.world_size), pages=in_pages)
    if step_time is None:
        return found
    return Reading(
        step=step,
        rank=found.rank,
        pages=in_pages,
        rate=step / step_time,
        pages_rate=in_pages / step_time,
        tokens_rate=largest * run.seq_len / step_time,
    )


def _sample_reads(dataset: TokenDataset) -> tuple[float, float]:
    """Bytes of a sample as stored, on average; and in whole pages, at most."""
    spans = 1.0
    tokens: float = dataset.width
    if isinstance(dataset, PackedDataset):
        ledger = dataset.plan.ledger
        spans = ledger.pieces / max(ledger.rows, 1)
        tokens = (ledger.placed + ledger.repeated) / max(ledger.rows, 1)
    keys = [key for key in (TOKENS, MASK) if key in dataset.store.keys]
    sizes = [dataset.store.dtype(key).itemsize for key in keys]
    exact = sum(tokens * size for size in sizes)
    # a span of b bytes at any place touches at most 1 + (b - 1) / PAGE pages, rounded up
    return exact, sum(spans * PAGE + tokens * size for size in sizes)
