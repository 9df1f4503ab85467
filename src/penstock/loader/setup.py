"""What a loader is asked for, checked: its sampler, batch sizes, workers, device; and its plan."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from itertools import pairwise
from numbers import Integral
from typing import Any, Literal

import numpy as np

from penstock.dataset.mixture import MixtureDataset, takes_batches
from penstock.errors import ConfigError
from penstock.loader.fetch import Collate
from penstock.order import Plan, Segment
from penstock.order.plan import Tail, too_small
from penstock.sampler import (
    AnySampler,
    DistributedSampler,
    MixtureSampler,
    ResumableDistributedSampler,
)

BatchSize = int | Sequence[tuple[int, int]]
Workers = Literal["auto", "thread", "process"]


def run_plan(
    n: int,
    schedule: Sequence[tuple[int, int]],
    *,
    world: int,
    accumulation: int,
    tail: Tail,
    lived: Sequence[Segment] = (),
    position: int = 0,
    skipped: Sequence[tuple[int, int]] = (),
) -> Plan:
    """A run's segments: those already lived, the one from `position` on, and the schedule's later.

    >>> plan = run_plan(100, [(0, 4), (2, 8)], world=2, accumulation=1, tail="drop")
    >>> [(segment.position, segment.size) for segment in plan.segments]
    [(0, 8), (16, 16)]
    """
    sizes = [(start, size * world) for start, size in schedule]
    for _, size in sizes:
        if tail == "endless" and n < size:
            raise ConfigError(too_small(n, size))
    step = 0
    if lived:
        plan = Plan(n, lived, tail=tail, skipped=skipped)
        last = plan.segments[-1]
        size = _in_force(sizes, plan.step_at(position))
        if (last.size, last.accumulation) == (size, accumulation):
            return plan.scheduled(sizes, accumulation)
        # a step that was under way has ended: the size of the one after it is what matters
        step = Plan(n, [*lived, Segment(position, last.size)], tail=tail).segments[-1].step
    now = Segment(position, _in_force(sizes, step), accumulation)
    plan = Plan(n, [*lived, now], tail=tail, skipped=skipped)
    return plan.scheduled(sizes, accumulation)


def _in_force(schedule: Sequence[tuple[int, int]], step: int) -> int:
    return [size for start, size in schedule if start <= step][-1]


def checked_sampler(sampler: AnySampler | None, dataset: Any) -> AnySampler:
    """The sampler for this dataset, or an error that says why it is none."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"{type(dataset).__name__} has no length or no items: this loader takes map-style "
            "datasets"
        )
    if sampler is None:
        return DistributedSampler(dataset)
    if not isinstance(sampler, DistributedSampler | MixtureSampler | ResumableDistributedSampler):
        raise ConfigError(
            f"{type(sampler).__name__} gives indices without an address to go back to: use "
            "DistributedSampler, MixtureSampler or ResumableDistributedSampler"
        )
    if sampler.order.n != len(dataset):
        raise ConfigError(
            f"the sampler is over {sampler.order.n} samples and the dataset has {len(dataset)}"
        )
    if isinstance(sampler, MixtureSampler) and isinstance(dataset, MixtureDataset):
        ends = [0, *np.cumsum(sampler.order.sizes).tolist()]
        if ends != dataset.cumulative_sizes:
            raise ConfigError(
                f"the sampler's datasets end at {ends} and this mixture's at "
                f"{dataset.cumulative_sizes}: pass it dataset.cumulative_sizes"
            )
    return sampler


def batch_schedule(batch_size: BatchSize) -> list[tuple[int, int]]:
    """A batch size as a schedule.

    >>> batch_schedule(8), batch_schedule([(0, 8), (100, 16)])
    ([(0, 8)], [(0, 8), (100, 16)])
    """
    rows = [(0, batch_size)] if isinstance(batch_size, Integral) else batch_size
    if not isinstance(rows, Sequence) or not all(map(_is_step_and_size, rows)):
        raise ConfigError(
            "batch_size is a whole number, or a schedule of (step, size) like "
            f"[(0, 8), (1000, 16)], not {batch_size!r}"
        )
    schedule = [(int(step), int(size)) for step, size in rows]
    steps = [step for step, _ in schedule]
    if not schedule or steps[0] != 0 or any(a >= b for a, b in pairwise(steps)):
        raise ConfigError(f"a batch size schedule has increasing steps from 0 on, not {batch_size}")
    if any(size < 1 for _, size in schedule):
        raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
    return schedule


def _is_step_and_size(row: Any) -> bool:
    return (
        isinstance(row, Sequence)
        and len(row) == 2
        and all(isinstance(x, Integral) and not isinstance(x, bool) for x in row)
    )


def in_process(workers: Workers, dataset: Any, count: int, collate: Collate | None) -> bool:
    """Whether batches are made in the calling thread, rather than in torch's processes."""
    if workers not in ("auto", "thread", "process"):
        raise ConfigError(f"workers is 'auto', 'thread' or 'process', not {workers!r}")
    if workers == "auto":
        return count == 0 or (takes_batches(dataset) and collate is None)
    return workers == "thread" or count == 0
