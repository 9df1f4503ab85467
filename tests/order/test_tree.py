"""The tree deals positions out to sources in whole numbers, exactly, at any position."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.order import reference

from penstock.order import quantise
from penstock.order.mixture import Tree

FAR = [10**13, 10**13 + 1, 2**53 + 1, 2**62 - 1, 2**62, 2**62 + 4096]

weights = st.lists(st.just(0.0) | st.floats(1e-6, 1) | st.just(1e-300), min_size=1, max_size=40)
positions = st.integers(0, 2**62) | st.integers(0, 10_000) | st.sampled_from(FAR)


def dealt(integers: tuple[int, ...], *at: int) -> list[list[int]]:
    found: list[list[int]] = Tree(integers).split(np.array(at)).tolist()
    return found


@given(weights.filter(any), st.lists(positions, min_size=1, max_size=5))
def test_it_deals_as_integers_of_any_size_do(weights: list[float], at: list[int]) -> None:
    integers = quantise(weights)
    assert dealt(integers, *at) == [reference.split(m, integers) for m in at]


@given(weights.filter(any), positions)
def test_all_is_dealt_out_and_nothing_to_a_weight_of_zero(weights: list[float], m: int) -> None:
    (found,) = dealt(quantise(weights), m)
    assert sum(found) == m
    assert all(count >= 0 for count in found)
    assert all(weight or not count for weight, count in zip(weights, found, strict=True))


@given(weights.filter(any), positions, st.integers(0, 5000))
def test_no_source_ever_gives_back(weights: list[float], m: int, more: int) -> None:
    before, after = dealt(quantise(weights), m, m + more)
    assert all(a <= b for a, b in zip(before, after, strict=True))
    one_by_one = dealt(quantise(weights), *range(100))
    steps = np.diff(np.array(one_by_one), axis=0)
    assert (np.sort(steps)[:, -1] == 1).all()
    assert (steps.sum(1) == 1).all()


@given(weights.filter(any), positions)
def test_every_source_is_within_the_tree_s_depth_of_its_share(weights: list[float], m: int) -> None:
    integers = quantise(weights)
    depth = (len(weights) - 1).bit_length()
    (found,) = dealt(integers, m)
    for weight, count in zip(integers, found, strict=True):
        drift = abs(count - Fraction(m * weight, 2**32))
        assert drift < depth or drift == depth == 0


@pytest.mark.parametrize("sources", [1, 2, 3, 5, 8, 9, 100, 999, 1000, 1024, 1025])
def test_any_number_of_sources_far_out(sources: int) -> None:
    rng = random.Random(sources)
    integers = quantise([rng.choice([0, 1e-6 ** rng.random()]) for _ in range(sources - 1)] + [0.5])
    found = dealt(integers, *FAR)
    assert found == [reference.split(m, integers) for m in FAR]
    assert [sum(row) for row in found] == FAR


@pytest.mark.parametrize("place", range(4))
def test_one_source_with_all_the_weight_gets_everything(place: int) -> None:
    alone = tuple(2**32 if i == place else 0 for i in range(4))
    assert dealt(alone, 2**62, 1) == [[2**62 * (i == place) for i in range(4)], [*map(bool, alone)]]
