"""Which source a position takes its sample from, and which sample of it: exact, at any position.

    >>> order = MixtureOrder([30, 10], ["web", "code"], seed=0, stages=[Stage.of([0.75, 0.25])])
    >>> order.counts(40).tolist()                   # given by each after 40 positions
    [30, 10]
    >>> sorted(order.indices(np.arange(40)).tolist()) == list(range(40))
    True

Weights become integers once (`quantise`). How many samples each source has given after u positions
of a stage is integer arithmetic down a balanced tree (`Tree`), so it is exact at 10^13 as at 10. In
between, blocks of 4,096 positions counted from the stage's start take their quotas from the tree at
their two ends and shuffle the sources by hashed keys (unshuffled, they spread each evenly). Sample
j of a source is its epoch j // n, place j % n of that epoch's permutation, whatever stage asks for
it: a stage may end anywhere, and nothing is skipped or repeated there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.order.hashing import U64, key_of, subkeys
from penstock.order.permutation import permute
from penstock.order.weights import TOTAL, quantise

I64 = npt.NDArray[np.int64]

BLOCK = 4096
_PLACE = np.uint64(BLOCK - 1)
_PLACE_BITS = np.uint64(12)
_KEPT_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of positions with fixed weights: where it starts, and integers that sum to 2^32.

    `start_step` is that of the declared phase it comes from; None if it was begun by hand.
    """

    position: int
    weights: tuple[int, ...]
    start_step: int | None = None

    def __post_init__(self) -> None:
        if self.position < 0 or sum(self.weights) != TOTAL or min(self.weights) < 0:
            raise ConfigError(
                f"a stage starts at a position >= 0 and has weights >= 0 that sum to 2^32, "
                f"not position {self.position} and sum {sum(self.weights)}"
            )

    @classmethod
    def of(
        cls, weights: Sequence[float], position: int = 0, start_step: int | None = None
    ) -> Stage:
        """A stage from weights of any scale.

        >>> Stage.of([1, 1], position=64).weights
        (2147483648, 2147483648)
        """
        return cls(position, quantise(weights), start_step)


class Tree:
    """Splits a number of positions between sources by integer weights, exactly.

    Each node with weights (a, b) under it gives its left child floor(m * a / (a + b)) of its m
    positions and its right child the rest: the parts add up, none ever shrinks as m grows, and each
    is within log2(sources) of its share.

    >>> Tree([TOTAL // 2, TOTAL // 4, TOTAL // 4]).split(np.array([4, 10**13])).tolist()
    [[2, 1, 1], [5000000000000, 2500000000000, 2500000000000]]
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.sources = len(weights)
        depth = (self.sources - 1).bit_length()
        level = np.zeros(1 << depth, np.uint64)
        level[: self.sources] = weights
        self._levels: list[tuple[U64, U64]] = []  # (sum, left child's weight) by node, root first
        while len(level) > 1:
            pairs = level.reshape(-1, 2)
            level = pairs.sum(1, dtype=np.uint64)
            # a node without weight gets no positions: any divisor but 0 will do
            self._levels.insert(0, (np.maximum(level, np.uint64(1)), pairs[:, 0].copy()))

    def split(self, positions: npt.NDArray[Any]) -> I64:
        """How many of the first `positions` fall to each source: (len(positions), sources)."""
        m = positions.astype(np.uint64).reshape(-1, 1)
        for total, left in self._levels:
            # floor(m * left / total) without the product, which would not fit in 64 bits
            first = (m // total) * left + ((m % total) * left) // total
            m = np.stack([first, m - first], axis=2).reshape(len(m), -1)
        return m[:, : self.sources].astype(np.int64)


class MixtureOrder:
    """Position to sample, over sources of `sizes` samples that lie one after the other.

    Endless: `n` = sum(sizes) positions are one epoch in reports, and nothing happens at its end.
    A source's key is hashed from (seed, its name), so sources may be listed in any order, and
    adding one leaves the others' own orders as they were.

    `first` says where each source's samples begin among the indices, where they do not lie one
    after the other; None is a source that gave samples once and is no more. Sources with weight 0
    that are put at the end change nothing of the stages before: a tree grows at its root.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        names: Sequence[str],
        *,
        seed: int,
        stages: Sequence[Stage],
        shuffle: bool = True,
        first: Sequence[int | None] | None = None,
    ) -> None:
        if not stages or stages[0].position != 0:
            raise ConfigError("a mixture's first stage starts at position 0")
        starts = [stage.position for stage in stages]
        if any(a >= b for a, b in pairwise(starts)):
            raise ConfigError(f"stages start one after the other, not at {starts}")
        self.sizes = np.asarray(sizes, np.int64)
        self.names = tuple(names)
        self.seed, self.shuffle, self.stages = seed, shuffle, tuple(stages)
        self.first = first
        here = None if first is None else [place is not None for place in first]
        self.n = int(self.sizes.sum() if here is None else self.sizes[here].sum())
        if len(set(self.names)) < len(self.names):  # they would share one order
            raise ConfigError(f"the sources of a mixture need different names, not {list(names)}")
        if (self.sizes < 0).any():
            raise ConfigError(f"sources have 0 samples or more, not {self.sizes.tolist()}")
        for stage in stages:
            self._check(stage)
        if first is None:
            self._first = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        else:
            self._first = np.array([-1 if place is None else place for place in first], np.int64)
        self._keys = np.array([key_of("source", seed, name) for name in names], np.uint64)
        self._mixture_key = key_of("mixture", seed)
        self._starts = np.asarray(starts, np.int64)
        self._trees = [Tree(stage.weights) for stage in stages]
        self._base = np.zeros((len(stages), len(names)), np.int64)  # given before each stage
        self._blocks: OrderedDict[tuple[int, int], tuple[I64, I64]] = OrderedDict()
        for s in range(1, len(stages)):
            self._base[s] = self._counts(s - 1, starts[s])

    def _check(self, stage: Stage) -> None:
        if not len(stage.weights) == len(self.sizes) == len(self.names):
            raise ConfigError(
                f"a mixture has one weight and one name for each of its {len(self.sizes)} sources, "
                f"not {len(stage.weights)} weights and {len(self.names)} names"
            )
        gone = [place is None for place in self.first or [0] * len(self.sizes)]
        given = zip(self.names, self.sizes, stage.weights, gone, strict=True)
        for name, size, weight, is_gone in given:
            if weight and not size and self.n and not is_gone:
                raise ConfigError(
                    f"source {name!r} has a weight but no samples: give it weight 0 or more data"
                )

    def with_stage(self, stage: Stage) -> MixtureOrder:
        """The same order with a stage begun by hand, in place of any begun by hand there or later.

        Declared stages that lie ahead stay: they still begin at their own positions. One that
        begins right there gives way, and leaves its `start_step` to the new one.
        """
        replaced = [old.start_step for old in self.stages if old.position == stage.position]
        if stage.start_step is None and replaced:
            stage = Stage(stage.position, stage.weights, replaced[0])
        kept = [
            old
            for old in self.stages
            if old.position < stage.position
            or (old.position > stage.position and old.start_step is not None)
        ]
        stages = sorted([*kept, stage], key=lambda each: each.position)
        return MixtureOrder(
            self.sizes.tolist(),
            self.names,
            seed=self.seed,
            stages=stages,
            shuffle=self.shuffle,
            first=self.first,
        )

    def counts(self, position: int) -> I64:
        """How many samples each source has given before `position`."""
        stage = int(np.searchsorted(self._starts, position, "right")) - 1
        return self._counts(stage, position)

    def given(self, stretches: Sequence[tuple[int, int]]) -> list[int]:
        """How many samples each source gives in these stretches of positions."""
        each = [self.counts(end) - self.counts(begin) for begin, end in stretches]
        total: I64 = np.sum([np.zeros(len(self.sizes), np.int64), *each], axis=0)
        return [int(count) for count in total]

    def draws(self, positions: npt.NDArray[Any]) -> tuple[I64, I64]:
        """For each position its source, and its ordinal: how many that source gave before."""
        positions = positions.astype(np.int64)
        stage = np.searchsorted(self._starts, positions, "right") - 1
        block, place = np.divmod(positions - self._starts[stage], BLOCK)
        source, ordinal = np.empty_like(positions), np.empty_like(positions)
        # runs of one stage and block: positions come in order, if with strides
        changes = (np.diff(stage, prepend=-1) != 0) | (np.diff(block, prepend=-1) != 0)
        for a, b in pairwise([*np.flatnonzero(changes).tolist(), len(positions)]):
            sources, ordinals = self._block(int(stage[a]), int(block[a]))
            source[a:b], ordinal[a:b] = sources[place[a:b]], ordinals[place[a:b]]
        return source, ordinal

    def indices(self, positions: npt.NDArray[Any]) -> I64:
        """The sample at each position, as an index into the sources laid end to end."""
        if self.n == 0:
            raise ConfigError("a mixture without a single sample has no order")
        source, ordinal = self.draws(positions)
        if self.first is not None and (gone := self._first[source] < 0).any():
            name, at = self.names[source[gone][0]], int(positions[gone][0])
            raise ConfigError(
                f"position {at:,} holds a sample of source {name!r}, which this run has no more: "
                "open the run with the sources it had then"
            )
        size = self.sizes[source]
        epoch, place = np.divmod(ordinal, size)
        if self.shuffle:
            keys = subkeys(self._keys[source], epoch)
            place = permute(place.astype(np.uint64), size, keys).view(np.int64)
        return self._first[source] + place

    def _counts(self, stage: int, position: int) -> I64:
        block, place = divmod(position - self.stages[stage].position, BLOCK)
        given: I64 = self._base[stage] + self._trees[stage].split(np.array([block * BLOCK]))[0]
        if place:
            given += np.bincount(self._block(stage, block)[0][:place], minlength=len(given))
        return given

    def _block(self, stage: int, block: int) -> tuple[I64, I64]:
        """Source and ordinal of each place in a block; the last few are kept."""
        found = self._blocks.get((stage, block))
        if found is None:
            found = self._blocks[stage, block] = self._make_block(stage, block)
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return found

    def _make_block(self, stage: int, block: int) -> tuple[I64, I64]:
        ends = np.array([block, block + 1]) * BLOCK
        before, after = self._trees[stage].split(ends)
        quota = after - before
        source = np.repeat(np.arange(len(quota)), quota)
        first = np.cumsum(quota) - quota  # where each source's group begins
        place = np.arange(BLOCK, dtype=np.uint64)
        if self.shuffle:
            # ties are broken by place: the low bits of each key are its place
            at = place + np.uint64(self.stages[stage].position + block * BLOCK)
            keys = subkeys(self._mixture_key, at) & ~_PLACE | place
            source = source[(np.sort(keys) & _PLACE).astype(np.intp)]
        else:
            # the k-th of q comes (2k + 1) / 2q of the way; 40 bits tell any two such apart
            number = 2 * (np.arange(BLOCK) - first[source]) + 1
            source = source[np.argsort((number << 40) // (2 * quota[source]), kind="stable")]
        grouped = np.sort((source.astype(np.uint64) << _PLACE_BITS) | place)
        base = self._base[stage] + before - first
        ordinal = np.empty(BLOCK, np.int64)
        ordinal[(grouped & _PLACE).astype(np.intp)] = np.repeat(base, quota) + np.arange(BLOCK)
        return source, ordinal
