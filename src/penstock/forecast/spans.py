"""Stretches of a run: which positions its steps take, and which samples of each source they draw.

    axis = Axis.of(loader)
    axis.drawn(0, 4096)             # of each source, its ordinals as [(begin, end), ...]
    axis.draws_at(1, 5000)          # where source 1 gives its 5,000th sample, counted from 0

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
    """A run's positions: its plan, its order and its stages."""

    plan: Plan
    order: EpochOrder | MixtureOrder
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, loader: StatefulDataLoader) -> Axis:
        """That of a loader, with all that it has lived."""
        return cls(loader.plan, loader.sampler.order, loader.stages)

    @property
    def sizes(self) -> list[int]:
        """Samples of each source."""
        mixed = isinstance(self.order, MixtureOrder)
        return self.order.sizes.tolist() if mixed else [self.order.n]  # type: ignore[union-attr]

    def source(self, k: int) -> EpochOrder:
        """The order of one source's ordinals."""
        if isinstance(self.order, EpochOrder):
            return self.order
        size, name = int(self.order.sizes[k]), self.order.names[k]
        return EpochOrder(size, self.order.seed, self.order.shuffle, name)

    def drawn(self, begin: int, end: int) -> list[list[Span]]:
        """Of each source the ordinals that the batches from `begin` to `end` take."""
        if isinstance(self.order, MixtureOrder):
            counts = zip(self.given(begin), self.given(end), strict=True)
            return [[span] for span in counts]
        joined: list[Span] = []
        for a, b in batches(self.plan, begin, end):
            if joined and joined[-1][1] == a:
                joined[-1] = joined[-1][0], b
            else:
                joined.append((a, b))
        return [joined]

    def given(self, position: int) -> list[int]:
        """Ordinals that the sources have come to: where the next sample of each is."""
        if isinstance(self.order, MixtureOrder):
            return [int(count) for count in self.order.counts(position)]
        return [position]

    def draws_at(self, k: int, ordinal: int, end: int) -> int | None:
        """The position before `end` at which source k gives that ordinal; None if it does not."""
        if isinstance(self.order, EpochOrder):
            return ordinal if ordinal < end else None
        starts = [stage.position for stage in self.stages]
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
            return first + int(np.flatnonzero((source == k) & (ordinals == ordinal))[0])
        return None

    def step_of(self, position: int) -> int:
        """The step of the batch that a position lies in."""
        segment = self.plan.segment(position)
        first = position - position % self.plan.n if self.plan.tail == "drop" else 0
        return self.plan.step_at(max(position + 1 - segment.size, segment.position, first))


def batches(plan: Plan, begin: int, end: int) -> Iterator[Span]:
    """Positions that batches starting in [begin, end) take, an epoch and segment at a time."""
    position = plan.settle(begin, plan.segment(begin).size)
    while position < end:
        size = plan.segment(position).size
        count = plan.run(position, -(-(end - position) // size))
        yield position, position + count * size
        position = plan.following(position + (count - 1) * size)
