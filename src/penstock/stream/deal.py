"""Which unit each lane reads next: arithmetic, so that an address can be gone on from.

    >>> turns = Turns(units=5, lanes=2, seed=0, shuffle=False)
    >>> at = turns.first(1)
    >>> at, turns.unit(at), turns.following(1, at)
    ((0, 1), 1, (0, 3))

The place of a unit is (epoch, number): its number counts through an epoch, which has each unit
once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Protocol

import numpy as np

from penstock.errors import ConfigError
from penstock.order import Permutation
from penstock.order.hashing import key_of

At = tuple[int, int]  # epoch, number


class Deal(Protocol):
    """An endless list of units for each lane."""

    def first(self, lane: int) -> At:
        """Where a lane begins."""

    def following(self, lane: int, at: At) -> At:
        """Where it goes on after that."""

    def unit(self, at: At) -> int:
        """Which unit stands there."""

    def has(self, lane: int, at: At) -> bool:
        """Whether a lane ever comes there."""


@dataclass(frozen=True, slots=True)
class Turns:
    """All units in turn, permuted anew in each epoch: the P-th, over all epochs, is lane P mod L's.

    So lanes have the same number of units but for one, and where there are fewer units than lanes,
    a lane's first epoch is a later one. Without shuffling units stand in their order; but where
    lanes and units have a common divisor, so that a lane would meet the same units for ever, an
    epoch begins one unit later whenever each lane has met those.
    """

    units: int
    lanes: int
    seed: int
    shuffle: bool = True
    alternate: bool = True  # passes each have all units, so that all can be in one order

    def first(self, lane: int) -> At:
        """Where a lane begins."""
        return divmod(lane, self.units)

    def in_epoch(self, lane: int, epoch: int) -> At:
        """Where it begins an epoch, or a later one where that has no unit for it."""
        start = epoch * self.units
        return divmod(start + (lane - start) % self.lanes, self.units)

    def following(self, lane: int, at: At) -> At:
        """Where it goes on after that."""
        assert self.has(lane, at)
        return divmod(at[0] * self.units + at[1] + self.lanes, self.units)

    def unit(self, at: At) -> int:
        """Which unit stands there."""
        if not self.shuffle:
            if not self.alternate:
                return at[1]
            common = gcd(self.units, self.lanes)
            return (at[1] + at[0] // (self.lanes // common) % common) % self.units
        key = key_of("stream", self.seed, "units", at[0])
        return int(Permutation(self.units, key)(np.array([at[1]]))[0])

    def has(self, lane: int, at: At) -> bool:
        """Whether a lane ever comes there."""
        return at[1] < self.units and (at[0] * self.units + at[1]) % self.lanes == lane


class Groups:
    """nanochat's: row group j of each file goes to lane j mod L, files in order, for ever.

    >>> groups = Groups([3, 2], lanes=2)
    >>> at, found = groups.first(0), []
    >>> for _ in range(4):
    ...     found.append((at[0], *groups.place(at[1])))
    ...     at = groups.following(0, at)
    >>> found                                           # epoch, file, row group
    [(0, 0, 0), (0, 0, 2), (0, 1, 0), (1, 0, 0)]
    """

    def __init__(self, groups: Sequence[int], lanes: int) -> None:
        self._groups, self._lanes = list(groups), lanes
        self._base = [0, *accumulate(groups)]
        if max(groups, default=0) < lanes:
            raise ConfigError(
                f"no file has {lanes} row groups ({max(groups, default=0)} at most), so that some "
                f"of {lanes} lanes would never get one: write smaller row groups, use fewer ranks, "
                "or packing='chunked'"
            )

    def first(self, lane: int) -> At:
        """Where a lane begins."""
        return self._at_or_after(lane, 0, 0, lane)

    def following(self, lane: int, at: At) -> At:
        """Where it goes on after that."""
        file, group = self.place(at[1])
        return self._at_or_after(lane, at[0], file, group + self._lanes)

    def resumed(self, lane: int, epoch: int, file: int, group: int) -> At:
        """Where nanochat goes on after a state with this file and row group."""
        base = (group // self._lanes + 1) * self._lanes
        return self._at_or_after(lane, epoch, file, base + lane)

    def unit(self, at: At) -> int:
        """Which unit stands there: the number itself."""
        return at[1]

    def place(self, number: int) -> tuple[int, int]:
        """File and row group of a number."""
        file = bisect_right(self._base, number) - 1
        return file, number - self._base[file]

    def has(self, lane: int, at: At) -> bool:
        """Whether a lane ever comes there."""
        return at[1] < self._base[-1] and self.place(at[1])[1] % self._lanes == lane

    def _at_or_after(self, lane: int, epoch: int, file: int, group: int) -> At:
        while True:
            if file >= len(self._groups):
                epoch, file, group = epoch + 1, 0, lane
            if group < self._groups[file]:
                return epoch, self._base[file] + group
            file, group = file + 1, lane
