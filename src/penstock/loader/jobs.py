"""What a loader makes next: the samples of some batches together, in order, for one rank."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.base import SampleDataset
from penstock.loader.ahead import Job
from penstock.order import Plan, deal, share
from penstock.sampler import AnySampler

ORDER_BLOCK = 4096  # positions whose order is computed at a time
GROUP = 16  # batches fetched together, at most
I64 = npt.NDArray[np.int64]


def jobs(
    plan: Plan, sampler: AnySampler, dataset: Any, position: int, epoch: int, *, grouped: bool
) -> Generator[Job]:
    """The jobs from `position` to the epoch's end; the first one is small, to start soon."""
    world = sampler.num_replicas
    balanced = isinstance(dataset, SampleDataset) and dataset.balanced
    most = 1
    while plan.epoch(position) == epoch:
        size = plan.segment(position).size
        group = group_of(dataset, size // world) if grouped else 1
        ahead = plan.run(position, max(group, ORDER_BLOCK // size))
        if balanced and plan.tail != "pad":
            indices = _dealt(sampler, dataset, position, ahead, size)
        else:
            indices = _shared(plan, sampler, position, ahead * size, epoch)
        done = 0
        while done < ahead:
            batches = min(most, ahead - done)
            samples = indices[done * size // world : (done + batches) * size // world]
            yield Job(position + done * size, batches, samples)
            done, most = done + batches, min(most * 2, group)
        position = plan.following(position + (ahead - 1) * size)


def _shared(plan: Plan, sampler: AnySampler, position: int, count: int, epoch: int) -> I64:
    """This rank's samples of `count` positions."""
    positions = share(position, count, rank=sampler.rank, world=sampler.num_replicas)
    if plan.tail == "pad":  # past the end, samples from the epoch's start: masked later
        end = (epoch + 1) * plan.n
        positions = np.where(positions < end, positions, end - plan.n + positions % plan.n)
    return sampler.order.indices(positions)


def _dealt(
    sampler: AnySampler, dataset: SampleDataset, position: int, batches: int, size: int
) -> I64:
    """This rank's samples where ranks are to get the same costs: global batch by global batch."""
    indices = sampler.order.indices(np.arange(position, position + batches * size))
    costs = dataset.costs(indices).reshape(batches, size)
    own = [k * size + deal(costs[k], sampler.num_replicas)[sampler.rank] for k in range(batches)]
    dealt: I64 = indices[np.concatenate(own)]
    return dealt


def group_of(dataset: Any, rows: int) -> int:
    """How many batches of `rows` samples to fetch together."""
    if not dataset.sample_bytes:
        return 1
    batches: int = dataset.group_bytes // (rows * dataset.sample_bytes)
    return max(1, min(GROUP, batches))
