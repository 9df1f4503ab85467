"""Deals: each epoch has each unit once, over all lanes, and each lane meets them all."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.stream.deal import Groups, Turns


def places(deal: Any, lane: int, count: int) -> list[tuple[int, int]]:
    at, found = deal.first(lane), []
    for _ in range(count):
        found.append(at)
        at = deal.following(lane, at)
    return found


@given(
    units=st.integers(1, 40),
    lanes=st.integers(1, 24),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    start=st.sampled_from([0, 3, 10**6]),
)
def test_each_epoch_has_each_unit_once_over_all_lanes(
    units: int, lanes: int, seed: int, shuffle: bool, start: int
) -> None:
    turns = Turns(units, lanes, seed, shuffle)
    seen: Counter[tuple[int, int]] = Counter()
    for lane in range(lanes):
        at = turns.first(lane)
        if start:  # any address is gone on from, however deep: epoch by epoch, no walk
            first = start * units
            at = divmod(first + (lane - first) % lanes, units)
        for _ in range(3 * units // lanes + 3):
            assert turns.has(lane, at)
            assert not turns.has((lane + 1) % lanes, at) or lanes == 1
            seen[at[0], turns.unit(at)] += 1
            at = turns.following(lane, at)
    for epoch in range(start, start + 2):
        assert all(seen[epoch, unit] == 1 for unit in range(units))
    assert set(seen.values()) == {1}


@given(units=st.integers(1, 12), lanes=st.integers(1, 24))
def test_unshuffled_every_lane_meets_every_unit(units: int, lanes: int) -> None:
    turns = Turns(units, lanes, seed=0, shuffle=False)
    for lane in range(lanes):
        met = [turns.unit(at) for at in places(turns, lane, 2 * units * lanes)]
        assert set(met) == set(range(units))


def test_one_lane_unshuffled_reads_in_order() -> None:
    turns = Turns(5, 1, seed=0, shuffle=False)
    assert [turns.unit(at) for at in places(turns, 0, 12)] == [*range(5), *range(5), 0, 1]


def test_lanes_have_as_many_units_but_for_one_and_epochs_differ() -> None:
    turns = Turns(100, 7, seed=1)
    counts = [sum(at[0] < 3 for at in places(turns, lane, 60)) for lane in range(7)]
    assert max(counts) - min(counts) <= 1
    orders = [[turns.unit((epoch, n)) for n in range(100)] for epoch in range(3)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != [Turns(100, 7, seed=2).unit((0, n)) for n in range(100)]


@given(
    groups=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    lanes=st.integers(1, 6),
)
def test_groups_of_each_file_go_to_lanes_in_turn(groups: list[int], lanes: int) -> None:
    if max(groups) < lanes:
        with pytest.raises(ConfigError, match=r"no file has .* row groups"):
            Groups(groups, lanes)
        return
    deal = Groups(groups, lanes)
    every = [
        (epoch, file, group)
        for epoch in range(3)
        for file, count in enumerate(groups)
        for group in range(count)
    ]
    for lane in range(lanes):
        wanted = [each for each in every if each[2] % lanes == lane]
        walk = places(deal, lane, len(wanted))
        assert [(at[0], *deal.place(at[1])) for at in walk] == wanted
        assert all(deal.has(lane, at) for at in walk)
        assert all(lanes == 1 or not deal.has((lane + 1) % lanes, at) for at in walk)
        assert [deal.unit(at) for at in walk] == [at[1] for at in walk]
        for (epoch, file, group), after in zip(wanted, islice(walk, 1, None), strict=False):
            assert deal.resumed(lane, epoch, file, group) == after
    assert not deal.has(0, (0, sum(groups)))
