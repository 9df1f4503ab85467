"""Stretches of a run: which positions its steps take, and which samples of each source they draw.

    axis = Axis.of(loader, begin, end)
    axis.drawn(0, 4096)             # of each source, its ordinals as [(begin, end), ...]
    axis.draws_at(1, 5000, end)     # where source 1 gives its 5,000th sample, counted from 0

A source's *ordinal* is how many samples it gave before. On the endless axis of a mixture they go up
without a gap; a single dataset whose tails are dropped leaves out those at the end of each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.loader import StatefulDataLoader
from penstock.order import EpochOrder, MixtureOrder, Plan, Stage
from penstock.order.mixture import BLOCK

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Axis:
    """A run's positions: its plan, its order and its stages; and those that are delivered.

    `columns` are the places of the loader's sources among the order's.
    """

    plan: Plan
    order: EpochOrder | MixtureOrder
    stages: tuple[Stage, ...]
    columns: tuple[int, ...]
    delivered: tuple[Span, ...]

    @classmethod
    def of(cls, loader: StatefulDataLoader, begin: int, end: int) -> Axis:
        """That of a loader, with all that it has lived, and what it delivers from here to there."""
        order, dataset = loader.sampler.order, loader.dataset
        columns: tuple[int, ...] = (0,)
        if isinstance(order, MixtureOrder):
            columns = tuple(order.names.index(name) for name in dataset.dataset_names)
        delivered = tuple(_joined(batches(loader.plan, begin, end)))
        return cls(loader.plan, order, loader.stages, columns, delivered)

    @property
    def sizes(self) -> list[int]:
        """Samples of each source."""
        if isinstance(self.order, EpochOrder):
            return [self.order.n]
        return [int(self.order.sizes[column]) for column in self.columns]

    def weights(self, stage: Stage) -> tuple[int, ...]:
        """A stage's weight of each source."""
        return tuple(stage.weights[column] for column in self.columns)

    def source(self, k: int) -> EpochOrder:
        """The order of one source's ordinals."""
        if isinstance(self.order, EpochOrder):
            return self.order
        size, name = self.sizes[k], self.order.names[self.columns[k]]
        return EpochOrder(size, self.order.seed, self.order.shuffle, name)

    def drawn(self, begin: int, end: int) -> list[list[Span]]:
        """Of each source the ordinals that are delivered in [begin, end)."""
        found: list[list[Span]] = [[] for _ in self.columns]
        for a, b in self.delivered:
            lo, hi = max(a, begin), min(b, end)
            if lo < hi:
                for spans, first, last in zip(found, self.given(lo), self.given(hi), strict=True):
                    spans.append((first, last))
        return found

    def given(self, position: int) -> list[int]:
        """Ordinals that the sources have come to: where the next sample of each is."""
        if isinstance(self.order, MixtureOrder):
            counts = self.order.counts(position)
            return [int(counts[column]) for column in self.columns]
        return [position]

    def draws_at(self, k: int, ordinal: int, end: int) -> int | None:
        """The position before `end` at which source k gives that ordinal; None if it does not."""
        if isinstance(self.order, EpochOrder):
            return ordinal if ordinal < end else None
        starts, column = [stage.position for stage in self.stages], self.columns[k]
        for start, stop in pairwise([*(s for s in starts if s < end), end]):
            if self.given(stop)[k] <= ordinal:
                continue
            lo, hi = 0, -(-(stop - start) // BLOCK)  # the block is in [lo, hi)
            while hi - lo > 1:
                middle = (lo + hi) // 2
                found = self.given(start + middle * BLOCK)[k] <= ordinal
                lo, hi = (middle, hi) if found else (lo, middle)
            first = start + lo * BLOCK
            source, ordinals = self.order.draws(np.arange(first, min(first + BLOCK, stop)))
            return first + int(np.flatnonzero((source == column) & (ordinals == ordinal))[0])
        return None

    def steps(self, begin: int, end: int) -> Span | None:
        """The first step that takes any of [begin, end), and the one after the last; or None."""
        parts = [(max(a, begin), min(b, end)) for a, b in self.delivered]
        parts = [(a, b) for a, b in parts if a < b]
        if not parts:
            return None
        return self.step_of(parts[0][0]), self.step_of(parts[-1][1] - 1) + 1

    def step_of(self, position: int) -> int:
        """The step of the batch that a position lies in."""
        return step_of(self.plan, position)


def step_of(plan: Plan, position: int) -> int:
    """The step of the batch that a position lies in.

    >>> from penstock.order import Segment
    >>> [step_of(Plan(100, [Segment(0, 10, 2)]), position) for position in (0, 19, 20)]
    [0, 0, 1]
    """
    segment = plan.segment(position)
    first = position - position % plan.n if plan.tail == "drop" else 0
    return plan.step_at(max(position + 1 - segment.size, segment.position, first))


def batches(plan: Plan, begin: int, end: int) -> Iterator[Span]:
    """Positions that batches starting in [begin, end) take, an epoch and segment at a time."""
    position = plan.settle(begin, plan.segment(begin).size)
    while position < end:
        size = plan.segment(position).size
        count = plan.run(position, -(-(end - position) // size))
        yield position, position + count * size
        position = plan.following(position + (count - 1) * size)


def _joined(spans: Iterator[Span]) -> Iterator[Span]:
    """Spans with those that touch as one.

    >>> list(_joined(iter([(0, 4), (4, 8), (10, 12)])))
    [(0, 8), (10, 12)]
    """
    begin, end = next(spans, (0, 0))
    for a, b in spans:
        if a != end:
            yield begin, end
            begin = a
        end = b
    if begin < end:
        yield begin, end
