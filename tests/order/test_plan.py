"""All the arithmetic of positions, batches, steps and ranks, against a list made by walking."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.order import reference

from penstock.errors import ConfigError
from penstock.order import Plan, Segment, rest_of_epoch, share
from penstock.order.plan import Tail

WALK = 80

History = tuple[int, list[tuple[int, int, int]], Tail]

tails: st.SearchStrategy[Tail] = st.sampled_from(["drop", "pad", "endless"])


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Samples; (position, size, accumulation) of segments that begin anywhere; the tail."""
    n = draw(st.integers(1, 60))
    tail = draw(tails)
    size = st.integers(1, n if tail == "drop" else 80)
    positions = sorted(draw(st.sets(st.integers(0, 5 * n), min_size=1, max_size=5)))
    return n, [(p, draw(size), draw(st.integers(1, 4))) for p in positions], tail


def made(n: int, segments: Sequence[tuple[int, int, int]], tail: Tail) -> Plan:
    return Plan(n, [Segment(*segment) for segment in segments], tail=tail)


def walked(plan: Plan, count: int) -> list[int]:
    """Where the first batches begin, one after the other."""
    positions = [plan.segments[0].position]
    while len(positions) < count:
        positions.append(plan.following(positions[-1]))
    return positions


@given(histories())
def test_batches_follow_one_another_as_one_rank_walks_them(
    history: History,
) -> None:
    plan = made(*history)
    listed = list(islice(reference.batches(*history), WALK))
    assert walked(plan, WALK) == [batch.position for batch in listed]
    assert [plan.batch_at(k) for k in range(WALK)] == [batch.position for batch in listed]
    assert [plan.step_at(batch.position) for batch in listed] == [batch.step for batch in listed]
    for batch in listed:
        assert plan.epoch(batch.position) == batch.position // plan.n
        segment = plan.segment(batch.position)
        assert (segment.size, segment.accumulation) == history[1][batch.segment][1:]


@given(histories())
def test_a_step_begins_with_its_first_batch(
    history: History,
) -> None:
    plan = made(*history)
    first: dict[int, int] = {}
    for batch in islice(reference.batches(*history), WALK):
        first.setdefault(batch.step, batch.position)
    assert list(first) == list(range(len(first)))
    assert {step: plan.position_of(step) for step in first} == first
    for segment in plan.segments:
        assert plan.step_at(segment.position) == segment.step


@given(histories(), st.integers(1, 30))
def test_a_run_is_what_lies_ahead_in_the_epoch_and_segment(history: History, most: int) -> None:
    plan = made(*history)
    listed = list(islice(reference.batches(*history), WALK + most))
    for k, batch in enumerate(listed[:WALK]):
        ahead = 0
        for other in listed[k : k + most]:
            if (other.position // plan.n, other.segment) != (
                batch.position // plan.n,
                batch.segment,
            ):
                break
            assert other.position == batch.position + ahead * plan.segment(batch.position).size
            ahead += 1
        assert plan.run(batch.position, most) == ahead


@given(histories())
def test_an_epoch_has_as_many_batches_as_are_walked_in_it(
    history: History,
) -> None:
    plan = made(*history)
    by_epoch: dict[int, list[int]] = {}
    end = plan.segments[-1].position + 2 * plan.n
    for batch in reference.batches(*history):
        if batch.position > end:
            break
        by_epoch.setdefault(batch.position // plan.n, []).append(batch.position)
    by_epoch.popitem()  # which may go on
    for positions in by_epoch.values():
        for position in positions:
            assert plan.epoch_batches(position) == len(positions)


@given(histories())
def test_segments_that_were_put_in_their_places_stay_there(history: History) -> None:
    """A state holds them as the plan numbered them, and makes the same plan again."""
    plan = made(*history)
    assert Plan(plan.n, plan.segments, tail=plan.tail).segments == plan.segments


@given(histories(), st.integers(1, 80), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_run_resumed_with_another_batch_size_goes_on_in_the_flat_order(
    history: History,
    size: int,
    accumulation: int,
    rng: random.Random,
) -> None:
    n, _, tail = history
    size = min(size, n) if tail == "drop" else size
    plan = made(*history)
    positions = walked(plan, WALK)
    k = rng.randrange(1, WALK)
    lived = [segment for segment in plan.segments if segment.position < positions[k]]
    resumed = Plan(n, [*lived, Segment(positions[k], size, accumulation)], tail=tail)
    assert walked(resumed, k) == positions[:k]
    at = resumed.batch_at(k)
    assert at == resumed.following(positions[k - 1]) == resumed.settle(positions[k], size)
    assert resumed.segment(at).size == size
    assert resumed.step_at(at) == plan.step_at(positions[k - 1]) + 1
    assert resumed.following(at) == Plan(n, [Segment(at, size)], tail=tail).following(at)


@given(
    st.integers(1, 60),
    tails,
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 80)), min_size=1, max_size=4),
    st.integers(1, 80),
    st.integers(1, 3),
)
def test_a_schedule_takes_its_sizes_at_its_steps(
    n: int, tail: Tail, later: list[tuple[int, int]], first: int, accumulation: int
) -> None:
    """Every batch of step s has the size that the schedule gives for s; none is cut short by it."""
    steps = np.cumsum([step for step, _ in later]).tolist()
    sizes = [size for _, size in later]
    if tail == "drop":
        first, sizes = min(first, n), [min(size, n) for size in sizes]
    schedule = [(0, first), *zip(steps, sizes, strict=True)]
    plan = Plan(n, [Segment(0, first, accumulation)], tail=tail)
    plan = plan.scheduled(schedule[1:], accumulation)
    position, count = 0, 0
    for step in range(steps[-1] + 5):
        size = [size for start, size in schedule if start <= step][-1]
        for k in range(accumulation):
            if tail == "drop" and position % n + size > n:
                position += n - position % n
            if k == 0:
                assert plan.position_of(step) == position
            assert plan.segment(position).size == size
            assert plan.step_at(position) == step
            assert plan.batch_at(count) == position
            left = n - position % n
            position += min(size, left) if tail == "pad" else size
            count += 1


def test_a_size_that_no_longer_fits_ends_the_epoch_at_once() -> None:
    """Not after more batches of the old size: 20 samples are left, and 40 are asked for."""
    plan = Plan(100, [Segment(0, 10)]).scheduled([(8, 40)], 1)
    assert [plan.batch_at(k) for k in (7, 8, 9, 10)] == [70, 100, 140, 200]
    assert [plan.step_at(p) for p in (70, 100, 140)] == [7, 8, 9]
    resumed = Plan(100, [Segment(0, 10), Segment(80, 40)])
    assert [resumed.batch_at(k) for k in (7, 8, 9)] == [70, 100, 140]
    assert resumed.step_at(100) == 8


def test_a_smaller_size_uses_what_the_larger_would_have_dropped() -> None:
    plan = Plan(100, [Segment(0, 32)]).scheduled([(3, 2)], 1)
    assert [plan.batch_at(k) for k in (2, 3, 4, 5)] == [64, 96, 98, 100]


def test_a_segment_inside_a_batch_begins_after_it() -> None:
    plan = Plan(100, [Segment(0, 32), Segment(50, 4)])
    assert walked(plan, 5) == [0, 32, 64, 68, 72]
    assert plan.segments[1] == Segment(64, 4, 1, step=2)


def test_a_run_resumed_at_an_earlier_place_forgets_what_came_after() -> None:
    plan = Plan(100, [Segment(0, 10), Segment(50, 5), Segment(30, 2)])
    assert [s.position for s in plan.segments] == [0, 30]
    assert Plan(100, [Segment(30, 10), Segment(0, 5)]).segments == (Segment(0, 5),)
    assert Plan(100, [Segment(0, 10), Segment(0, 5)]).segments == (Segment(0, 5),)


def test_a_step_that_was_under_way_counts_as_one() -> None:
    plan = Plan(1000, [Segment(0, 10, 4), Segment(60, 20, 2)])
    assert [plan.step_at(p) for p in (0, 30, 40, 50, 60, 80, 100)] == [0, 0, 1, 1, 2, 2, 3]
    assert [plan.position_of(step) for step in range(4)] == [0, 40, 60, 100]


def test_a_run_may_begin_anywhere_and_counts_from_there() -> None:
    plan = Plan(100, [Segment(396, 32, 2)])
    assert plan.segments[0].position == plan.batch_at(0) == plan.position_of(0) == 400
    assert [plan.step_at(p) for p in (0, 99, 396, 400, 432, 464)] == [0, 0, 0, 0, 0, 1]
    assert plan.epoch_batches(400) == 3


@pytest.mark.parametrize("tail", ["drop", "pad", "endless"])
def test_positions_of_ten_to_the_fifteen_are_reached_at_once(tail: Tail) -> None:
    """In Python's integers, without a loop over batches; drop and pad differ by a tail an epoch."""
    n, size, far = 10**9 + 7, 2048, 10**15
    plan = Plan(n, [Segment(0, size, 3), Segment(10**12, 1000, 2)], tail=tail)
    per_epoch = {"drop": n // size, "pad": -(-n // size), "endless": 0}[tail]
    last = plan.segments[-1]
    before = plan.batch_at(far) - last.position
    assert plan.following(plan.batch_at(far)) == plan.batch_at(far + 1)
    for number in (0, 1, 10**8, 10**12, far):
        at = plan.batch_at(number)
        step = plan.step_at(at)
        assert plan.position_of(step) <= at < plan.position_of(step + 1)
        assert 1 <= plan.run(at, 10**6) <= 10**6
    if tail == "endless":
        number = -(-(10**12) // size)
        assert last.position == number * size
        assert before == (far - number) * 1000
    else:
        assert plan.batch_at(per_epoch) == n
        assert plan.batch_at(per_epoch * 900) == n * 900


@pytest.mark.parametrize(
    ("n", "segment", "tail", "words"),
    [
        (100, Segment(0, 101), "drop", "has 100 samples, and one global batch .* takes 101"),
        (0, Segment(0, 1), "drop", "has 0 samples"),
        (0, Segment(0, 1), "pad", "has 0 samples"),
        (0, Segment(0, 1), "endless", "has 0 samples"),
        (100, Segment(0, 0), "drop", "at least 1"),
        (100, Segment(0, 1, 0), "drop", "at least 1"),
        (100, Segment(-1, 1), "drop", "at least 1"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(
    n: int, segment: Segment, tail: Tail, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Plan(n, [segment], tail=tail)


# ------------------------------------------------------------------------------- ranks


@given(st.integers(0, 2**62), st.integers(0, 300), st.integers(1, 40))
def test_the_ranks_shares_make_up_the_whole(start: int, count: int, world: int) -> None:
    parts = [share(start, count, rank=rank, world=world).tolist() for rank in range(world)]
    assert sorted(chain.from_iterable(parts)) == list(range(start, start + count))
    for rank, part in enumerate(parts):
        assert part == list(range(start, start + count))[rank::world]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(0, 60), st.integers(0, 80), st.integers(1, 13), st.booleans())
def test_the_rest_of_an_epoch_is_dealt_out_in_equal_parts(
    n: int, offset: int, world: int, drop_last: bool
) -> None:
    """All of it once; the remainder dropped, or filled up with index (offset + i) mod n."""
    whole = list(range(n))[offset:]
    parts = []
    for rank in range(world):
        first, stride, count = rest_of_epoch(n, offset, rank=rank, world=world, drop_last=drop_last)
        parts.append([(first + stride * i) % n for i in range(count)] if n else [None] * count)
    lengths = {len(part) for part in parts}
    assert lengths == {len(whole) // world if drop_last else -(-len(whole) // world)}
    dealt = [part[i] for i in range(*lengths) for part in parts]
    if drop_last:
        assert dealt == whole[: len(dealt)]
    else:
        assert dealt[: len(whole)] == whole
        assert dealt == [(offset + i) % n for i in range(len(dealt))]


# ----------------------------------------------------------------------------- what is left out


@given(histories(), st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=3))
def test_steps_that_touch_what_is_skipped_are_left_out_and_nothing_else_changes(
    history: History, ranges: list[tuple[int, int]]
) -> None:
    n, segments, tail = history
    whole = made(*history)
    skipped: list[tuple[int, int]] = []
    for first, length in sorted(ranges):
        begin = max(first, segments[0][0], *(end for _, end in skipped), 0)
        skipped.append((begin, begin + length))
    plan = Plan(n, [Segment(*each) for each in segments], tail=tail, skipped=skipped)
    batches = list(islice(reference.batches(*history), 4 * WALK))
    end = batches[-1].position

    def cells(at: int) -> range:
        size = whole.segment(at).size
        room = n - at % n if tail == "pad" else size
        return range(at, at + min(size, room))

    touched = {
        batch.step
        for batch in batches
        for a, b in skipped
        if cells(batch.position).start < b and a < cells(batch.position).stop
    }
    kept = [batch.position for batch in batches if batch.step not in touched]
    start = plan.settle(batches[0].position, plan.segments[0].size)
    got = [start]
    while got[-1] < end:
        got.append(plan.following(got[-1]))
    most = min(len(kept), len(got)) - 2
    assert got[:most] == kept[:most]
    for at in got[:most]:
        assert (plan.step_at(at), plan.epoch(at)) == (whole.step_at(at), whole.epoch(at))
        ahead = plan.run(at, 7)
        there = at
        for _ in range(ahead - 1):
            there = plan.following(there)
            assert plan.epoch(there) == plan.epoch(at)
        if ahead < 7:  # what comes next is no neighbour, or of another epoch or segment
            after = plan.following(there)
            apart = after != there + plan.segment(there).size
            other = plan.segment(after) != plan.segment(at) or plan.epoch(after) != plan.epoch(at)
            assert apart or other
    for epoch in range(max(0, plan.epoch(end) - 1)):
        inside = [at for at in kept if at // n == epoch]
        if inside:
            assert plan.epoch_batches(inside[0]) == len(inside)


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(0, 45), st.integers(0, 45))
def test_what_is_kept_of_a_stretch_is_the_stretch_without_what_is_left_out(
    edges: list[int], begin: int, end: int
) -> None:
    pairs = sorted({edge * 2 for edge in edges})
    ranges = list(zip(pairs[::2], pairs[1::2], strict=False))
    plan = Plan(10, [Segment(0, 2)], tail="endless", skipped=ranges)
    out = {position for a, b in ranges for position in range(a, b)}
    kept = [position for a, b in plan.kept(begin, end) for position in range(a, b)]
    assert kept == [position for position in range(begin, end) if position not in out]
