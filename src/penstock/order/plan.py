"""Positions, batches, steps and ranks: all the arithmetic there is, in one place.

    >>> plan = Plan(100, [Segment(0, 32)])          # 100 samples, 32 to a global batch
    >>> [plan.batch_at(k) for k in range(4)]        # the tail of 4 is dropped: next epoch
    [0, 32, 64, 100]
    >>> share(32, 32, rank=1, world=4).tolist()     # rank 1's part of the second batch
    [33, 37, 41, 45, 49, 53, 57, 61]

A *segment* is a stretch with one global batch size; a run that is resumed with another, or that has
a schedule of batch sizes, has several. Batches are numbered from the start of the run, and
`position` is the first position of the batch that comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

Tail = Literal["drop", "pad", "endless"]


def share(start: int, count: int, *, rank: int, world: int) -> npt.NDArray[np.int64]:
    """Rank r's part of the `count` positions from `start` on: `[r::world]`, counted from there."""
    return np.arange(start + rank, start + count, world, dtype=np.int64)


def deal(costs: npt.NDArray[np.int64], world: int) -> npt.NDArray[np.int64]:
    """Places of a global batch for each rank, as many for each, by a greedy deal of their costs.

    The costliest first, a round at a time: each round gives every rank one, the costliest to the
    rank that has been given least.

    >>> deal(np.array([9, 1, 8, 2]), 2).tolist()
    [[0, 1], [2, 3]]
    """
    rounds = np.argsort(-costs, kind="stable").reshape(-1, world)
    given = np.zeros(world, np.int64)
    dealt = np.empty((world, len(rounds)), np.int64)
    for number, places in enumerate(rounds):
        ranks = np.argsort(given, kind="stable")
        dealt[ranks, number] = places
        given[ranks] += costs[places]
    dealt.sort(axis=1)
    return dealt


def rest_of_epoch(
    n: int, offset: int, *, rank: int, world: int, drop_last: bool
) -> tuple[int, int, int]:
    """A bare sampler's part of an epoch from `offset` on: (first place, stride, how many), mod n.

    Every rank has as many: the remainder is dropped, or filled from the epoch's start.

    >>> rest_of_epoch(10, 0, rank=1, world=4, drop_last=True)
    (1, 4, 2)
    >>> rest_of_epoch(10, 0, rank=1, world=4, drop_last=False)
    (1, 4, 3)
    """
    left = max(n - offset, 0)
    count = left // world if drop_last else -(-left // world)
    return offset + rank, world, count


def too_small(n: int, size: int) -> str:
    """What to say where a dataset does not fill one batch."""
    return (
        f"the dataset has {n} samples, and one global batch (batch_size x world size) takes "
        f"{size}: use a smaller batch, shorter samples, or more data"
    )


@dataclass(frozen=True, slots=True)
class Segment:
    """From `position` on, global batches of `size` positions, `accumulation` of them to a step.

    `step` is the number of the step that begins there. It follows from the segments before.
    """

    position: int
    size: int
    accumulation: int = 1
    step: int = 0


class Plan:
    """Which positions each batch of a run holds, over `n` samples an epoch.

    `tail` says what an epoch does with fewer positions than a batch needs at its end: "drop" them,
    "pad" the batch, or, on an "endless" axis, take no notice of epochs.

    Steps that touch one of the `skipped` ranges of positions are left out whole. The axis keeps
    their places, so that every other step has the number and the samples it would have had.

    >>> plan = Plan(100, [Segment(0, 10)], skipped=[(20, 45)])
    >>> plan.left_out, plan.following(10), plan.step_at(50)
    (((20, 50),), 50, 5)
    """

    def __init__(
        self,
        n: int,
        segments: Sequence[Segment],
        *,
        tail: Tail = "drop",
        skipped: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.n, self.tail = n, tail
        for segment in segments:
            self._check(segment)
        self.skipped = tuple(skipped)
        self.left_out: tuple[tuple[int, int], ...] = ()
        self.segments = self._number(segments)
        self.left_out = self._leave_out()

    def _check(self, segment: Segment) -> None:
        if segment.size < 1 or segment.accumulation < 1 or segment.position < 0:
            raise ConfigError(f"batch sizes and accumulation are at least 1, not {segment}")
        if self.n < 1 or (self.tail == "drop" and self.n < segment.size):
            raise ConfigError(too_small(self.n, segment.size))

    def _number(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        """Order the segments, let the last of those at one place win, and number their steps.

        A segment is in force from the end of the batch under way at its position on, even where
        its own first batch has no room before the next epoch: `settle` decides that.
        """
        kept: list[Segment] = []
        for segment in segments:
            while kept and kept[-1].position >= segment.position:
                kept.pop()
            kept.append(segment)
        done = [replace(s, position=self.settle(s.position, s.size), step=0) for s in kept[:1]]
        for segment in kept[1:]:
            last = done[-1]
            batches = self._batches(last, segment.position)
            at = self._end(last, batches)
            if at < segment.position:  # which lies in a tail that is dropped
                at = self._skip(last, batches)
            if at == last.position:  # which has not a single batch
                done.pop()
            step = last.step - (-batches // last.accumulation)
            done.append(replace(segment, position=at, step=step))
        return tuple(done)

    def scheduled(self, sizes: Sequence[tuple[int, int]], accumulation: int) -> Plan:
        """This plan followed by the later entries of a schedule of (step, global batch size)."""
        segments = list(self.segments)
        for step, size in sizes:
            last = segments[-1]
            if step <= last.step:
                continue
            position = self._end(last, (step - last.step) * last.accumulation)
            segments.append(Segment(position, size, accumulation, step))
        return Plan(self.n, segments, tail=self.tail, skipped=self.skipped)

    # --- what is left out

    def kept(self, begin: int, end: int) -> list[tuple[int, int]]:
        """[begin, end) without the steps that are left out.

        >>> Plan(100, [Segment(0, 10)], skipped=[(20, 45)]).kept(10, 60)
        [(10, 20), (50, 60)]
        """
        found = []
        for first, last in self.left_out:
            if begin < min(first, end):
                found.append((begin, min(first, end)))
            begin = max(begin, last)
            if begin >= end:
                return found
        return [*found, (begin, end)] if begin < end else found

    def _leave_out(self) -> tuple[tuple[int, int], ...]:
        """The skipped ranges, widened to whole steps."""
        found: list[tuple[int, int]] = []
        for begin, end in sorted(self.skipped):
            first, last = self._batch_around(begin), self._batch_around(end - 1)
            if self._after(first, self.segment(first).size) <= begin:  # `begin` lies in a tail
                first = self.following(first)
            if last < first or first >= end:  # no batch has one of these positions
                continue
            start = self.position_of(self.step_at(first))
            stop = self.position_of(self.step_at(last) + 1)
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], max(stop, found[-1][1])
            else:
                found.append((start, stop))
        return tuple(found)

    def _batch_around(self, position: int) -> int:
        """Where the last batch begins that begins no later than `position`; else the first."""
        until = position + 1
        for segment in reversed(self.segments):
            if batches := self._batches(segment, until):
                return self._skip(segment, batches - 1)
            until = min(until, segment.position)  # it may begin in a tail, with no batch there
        return self._skip(self.segments[0], 0)

    # --- epochs

    def epoch(self, position: int) -> int:
        """The epoch that a position lies in."""
        return position // self.n

    def settle(self, position: int, size: int) -> int:
        """Where the next batch of `size` starts: here, or past a tail or what is left out."""
        at = self._with_room(position, size)
        for begin, end in self.left_out:
            if begin <= at < end:
                at = self._with_room(end, self.segment(end).size)
        return at

    def _with_room(self, position: int, size: int) -> int:
        offset = position % self.n
        if self.tail == "drop" and offset + size > self.n:
            return position - offset + self.n
        return position

    def following(self, position: int) -> int:
        """The position after the batch that starts at `position`."""
        end = self._after(position, self.segment(position).size)
        return self.settle(end, self.segment(end).size)

    def run(self, position: int, most: int) -> int:
        """How many batches, up to `most`, start in this epoch and segment from `position` on."""
        segment = self.segment(position)
        end = (self.epoch(position) + 1) * self.n
        later = [s.position for s in self.segments if s.position > position]
        later += [begin for begin, _ in self.left_out if begin > position]
        if self.tail == "drop":
            inside = (end - position) // segment.size
        else:
            inside = -(-(end - position) // segment.size)
        if later:
            inside = min(inside, -(-(min(later) - position) // segment.size))
        return min(inside, most)

    def epoch_batches(self, position: int) -> int:
        """How many batches of this run lie in the epoch around `position`, from its start on."""
        start = self.epoch(position) * self.n
        return sum(self._between(a, b) for a, b in self.kept(start, start + self.n))

    def _between(self, begin: int, end: int) -> int:
        """How many batches start in [begin, end), skipped or not."""
        ends = [*(s.position for s in self.segments[1:]), end]
        count = 0
        for segment, until in zip(self.segments, ends, strict=True):
            last = max(min(until, end), segment.position)
            first = min(max(begin, segment.position), last)
            count += self._batches(segment, last) - self._batches(segment, first)
        return count

    # --- batches and steps

    def segment(self, position: int) -> Segment:
        """The segment in force for a batch that starts at `position`."""
        found = self.segments[0]
        for each in self.segments[1:]:
            if each.position > position:
                break
            found = each
        return found

    def step_at(self, position: int) -> int:
        """The step that the batch at `position` belongs to, counted from the start of the run."""
        segment = self.segment(position)
        return segment.step + self._batches(segment, position) // segment.accumulation

    def position_of(self, step: int) -> int:
        """Where a step begins."""
        segment = [s for s in self.segments if s.step <= step][-1]
        return self._skip(segment, (step - segment.step) * segment.accumulation)

    def batch_at(self, number: int) -> int:
        """Where the global batch of that number begins, counted from the start of the run."""
        for i, segment in enumerate(self.segments):
            if i + 1 == len(self.segments):
                break
            inside = self._batches(segment, self.segments[i + 1].position)
            if number < inside:
                break
            number -= inside
        return self._skip(segment, number)

    def _batches(self, segment: Segment, position: int) -> int:
        """How many of a segment's batches start before `position`."""
        if position <= segment.position:
            return 0
        if self.tail == "endless":
            return -(-(position - segment.position) // segment.size)
        e0, o0 = divmod(segment.position, self.n)
        e1, o1 = divmod(position, self.n)
        left = self._left(o0, segment.size)
        if e0 == e1:
            return min(-(-(o1 - o0) // segment.size), left)
        per_epoch = self._left(0, segment.size)
        return left + (e1 - e0 - 1) * per_epoch + min(-(-o1 // segment.size), per_epoch)

    def _left(self, offset: int, size: int) -> int:
        """Batches of an epoch from `offset` on."""
        left = self.n - offset
        return left // size if self.tail == "drop" else -(-left // size)

    def _skip(self, segment: Segment, batches: int) -> int:
        """The position `batches` batches after a segment's start, were it the last one."""
        if self.tail == "endless":
            return segment.position + batches * segment.size
        epoch, offset = divmod(segment.position, self.n)
        first = self._left(offset, segment.size)
        if batches >= first:
            more, batches = divmod(batches - first, self._left(0, segment.size))
            epoch, offset = epoch + 1 + more, 0
        return epoch * self.n + offset + batches * segment.size

    def _end(self, segment: Segment, batches: int) -> int:
        """Where that many of a segment's batches end, whether or not another would fit."""
        if batches == 0:
            return segment.position
        return self._after(self._skip(segment, batches - 1), segment.size)

    def _after(self, position: int, size: int) -> int:
        """Where a batch of `size` ends that starts at `position`."""
        if self.tail == "pad":
            return min(position + size, (self.epoch(position) + 1) * self.n)
        return position + size
