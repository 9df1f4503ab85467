"""What a run delivers, the slow way: one rank, plain Python, walked from the first batch on.

Written from the laws and the contracts, not from the code. Penstock's own are the primitives that
the order's tests pin by themselves: `Permutation`, `key_of` and `subkeys`.

    >>> run = Run(sizes=(10,), schedule=((0, 4),))
    >>> [(batch.epoch, batch.step, len(batch.samples)) for batch in take(run, 3)]
    [(0, 0, 4), (0, 1, 4), (1, 2, 4)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, islice
from typing import Literal

import numpy as np

from penstock.order import Permutation
from penstock.order.hashing import key_of, subkeys

BLOCK = 4096
Schedule = tuple[tuple[int, int], ...]  # (step, global batch size)
Phases = tuple[tuple[int, tuple[int, ...]], ...]  # (start step, weights that sum to 2^32)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run over sources of these sizes; one source without phases is a single dataset."""

    sizes: tuple[int, ...]
    schedule: Schedule
    names: tuple[str, ...] = ()
    phases: Phases = ()
    accumulation: int = 1
    seed: int = 0
    shuffle: bool = True
    tail: Literal["drop", "pad", "endless"] = "drop"

    @property
    def n(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One global batch: rank r of W has `samples[r::W]`; from `real` on they are padding."""

    epoch: int
    step: int
    position: int
    samples: tuple[int, ...]
    real: int


class Simulation:
    """A run batch by batch. `resize` is a resume with other batch sizes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.schedule, self.accumulation = run.schedule, run.accumulation
        self.position = self._step = self._inside = 0
        self._lived = 0, 0  # size and accumulation of the batch last delivered
        self._flat: list[int] = []
        self._axis = axis(run)
        self._settle()

    @property
    def step(self) -> int:
        """The step of the next batch: one that is under way ends where sizes change."""
        now = self._size_at(self._step), self.accumulation
        return self._step + (self._inside > 0 and now != self._lived)

    @property
    def size(self) -> int:
        """The global batch size in force for the next batch."""
        return self._size_at(self.step)

    def _size_at(self, step: int) -> int:
        return [size for start, size in self.schedule if start <= step][-1]

    @property
    def epoch(self) -> int:
        return self.position // self.run.n

    def resize(self, schedule: Schedule, accumulation: int) -> None:
        """Go on with other sizes, in force once a batch is delivered or an epoch left by them."""
        self.schedule, self.accumulation = schedule, accumulation
        before = self.position
        self._settle()
        if self.position != before:
            self._begin()

    def _begin(self) -> None:
        if self.step != self._step:
            self._step, self._inside = self.step, 0

    def __next__(self) -> Batch:
        self._begin()
        n, start, size = self.run.n, self.position, self.size
        self._lived = size, self.accumulation
        epoch_start = start - start % n
        real = size if self.run.tail == "endless" else min(size, epoch_start + n - start)
        samples = [self._sample(start + i) for i in range(real)]
        samples += [self._sample(epoch_start + i % n) for i in range(size - real)]
        batch = Batch(
            epoch=self.epoch, step=self.step, position=start, samples=tuple(samples), real=real
        )
        self.position += real
        self._inside += 1
        if self._inside == self.accumulation:
            self._step, self._inside = self._step + 1, 0
        self._settle()
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def _settle(self) -> None:
        """An epoch with fewer samples left than the next batch takes is over."""
        offset = self.position % self.run.n
        if self.run.tail == "drop" and offset + self.size > self.run.n:
            self.position += self.run.n - offset

    def _sample(self, position: int) -> int:
        while len(self._flat) <= position:
            self._flat.append(next(self._axis))
        return self._flat[position]


def take(run: Run, count: int) -> list[Batch]:
    """The first `count` batches of a run."""
    return list(islice(Simulation(run), count))


def position_of(run: Run, step: int) -> int:
    """Where a step begins, by walking there."""
    simulation = Simulation(Run(sizes=run.sizes, schedule=run.schedule, tail=run.tail,
                                accumulation=run.accumulation, shuffle=False))  # fmt: skip
    while simulation.step < step:
        next(simulation)
    return simulation.position


def axis(run: Run) -> Iterator[int]:
    """The sample at position 0, 1, 2, ...: every source walked in order, counted as it goes."""
    if run.phases:
        yield from _mixture_axis(run)
        return
    epoch = 0
    while True:
        places = np.arange(run.n)
        if run.shuffle:
            key = int(subkeys(key_of("source", run.seed, "data"), np.array([epoch]))[0])
            places = Permutation(run.n, key)(places)
        yield from places.tolist()
        epoch += 1


def _mixture_axis(run: Run) -> Iterator[int]:
    given = [0] * len(run.sizes)
    first = [0, *accumulate(run.sizes)]
    shuffled: dict[tuple[int, int], list[int]] = {}  # (source, its epoch) → its order
    starts = [position_of(run, step) for step, _ in run.phases]
    for (_, weights), start, end in zip(run.phases, starts, [*starts[1:], None], strict=True):
        at = start
        while end is None or at < end:
            block = _block(run, weights, start, (at - start) // BLOCK)
            for source in block if end is None else block[: end - at]:
                epoch, place = divmod(given[source], run.sizes[source])
                if (source, epoch) not in shuffled:
                    shuffled[source, epoch] = _source_order(run, source, epoch)
                yield first[source] + shuffled[source, epoch][place]
                given[source] += 1
            at += BLOCK


def _source_order(run: Run, source: int, epoch: int) -> list[int]:
    places = np.arange(run.sizes[source])
    if run.shuffle:
        own = key_of("source", run.seed, run.names[source])
        key = int(subkeys(own, np.array([epoch]))[0])
        places = Permutation(run.sizes[source], key)(places)
    return places.tolist()


def _block(run: Run, weights: Sequence[int], start: int, number: int) -> list[int]:
    """The source of each place of a stage's block: quotas from the tree, shuffled by hashed keys.

    Without shuffle they are spread: the k-th of q comes (2k + 1) / 2q of the way.
    """
    before, after = split(number * BLOCK, weights), split((number + 1) * BLOCK, weights)
    quota = [b - a for a, b in zip(before, after, strict=True)]
    sources = [k for k, q in enumerate(quota) for _ in range(q)]
    if not run.shuffle:
        way = [Fraction(2 * i + 1, 2 * q) for q in quota for i in range(q)]
        return [sources[place] for place in sorted(range(BLOCK), key=way.__getitem__)]
    positions = np.arange(BLOCK) + start + number * BLOCK
    keys = subkeys(key_of("mixture", run.seed), positions).tolist()
    places = sorted(range(BLOCK), key=lambda place: (keys[place] >> 12, place))
    return [sources[place] for place in places]


def split(m: int, weights: Sequence[int]) -> list[int]:
    """The tree of law 3 in Python's integers: left = floor(m * a / s), right = m - left.

    >>> split(10**13 + 1, [2**31, 2**30, 2**30])
    [5000000000000, 2500000000000, 2500000000001]
    """
    if len(weights) == 1:
        return [m]
    half = 1 << ((len(weights) - 1).bit_length() - 1)
    left, right = weights[:half], weights[half:]
    total = sum(left) + sum(right)
    share = m * sum(left) // total if total else 0
    return split(share, left) + split(m - share, right)
