"""The shuffles look like chance: between neighbours, along strides, across epochs and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
from tests.order.statistic import by_chance, chi_square, correlation

from penstock.order import EpochOrder, MixtureOrder, Stage, permute
from penstock.order.hashing import key_of, subkeys

I64 = npt.NDArray[np.int64]

SIZES = [2**16, 100_003, 10**9, 2**40 + 7]
SEEDS = [0, 1, 2**40]
LAGS = [1, 2, 3, 7, 8, 64, 1000]


def runs(n: int, seed: int) -> Iterator[I64]:
    """What is met of an order: an epoch's beginning, its end, and what single ranks see of it.

    At most a quarter of an epoch: the whole of it holds every number once, and not by chance.
    """
    order, count = EpochOrder(n, seed), min(2**16, n // 4)
    yield order.indices(np.arange(count))
    yield order.indices(4 * n - count + np.arange(count))
    for stride in (8, 64, 4096):
        yield order.indices(n + stride * np.arange(min(count, n // stride // 2)))


def joint(a: I64, b: I64, kinds: int) -> I64:
    """How often each pair of kinds occurs."""
    return np.bincount(a * kinds + b, minlength=kinds * kinds)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_part_of_the_range_is_met_as_often(n: int, seed: int) -> None:
    for run in runs(n, seed):
        bins = max(2, min(256, len(run) // 32))
        for kinds in (np.arange(bins) * n // bins, None):
            if kinds is None:  # by remainder; else by size
                found, wanted = np.bincount(run % bins, minlength=bins), np.full(bins, 1 / bins)
            else:
                found = np.bincount(np.searchsorted(kinds, run, "right") - 1, minlength=bins)
                wanted = np.diff(kinds, append=n) / n
            assert by_chance(chi_square(found, wanted * len(run)))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", SEEDS)
def test_neighbours_have_nothing_to_do_with_each_other(n: int, seed: int) -> None:
    for run in runs(n, seed):
        assert by_chance(correlation(np.arange(len(run)), run))
        for lag in LAGS:
            if lag < len(run) // 4:
                assert by_chance(correlation(run[:-lag], run[lag:]))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", SEEDS)
def test_parities_and_low_bits_of_neighbours_come_in_all_pairs_alike(n: int, seed: int) -> None:
    for run in runs(n, seed):
        for lag in LAGS:
            a, b = run[:-lag], run[lag:]
            for kinds in (2, 4, 8):
                if len(a) > 16 * kinds**2:
                    assert by_chance(chi_square(joint(a % kinds, b % kinds, kinds)))
                    high = joint(a * kinds // n, b * kinds // n, kinds)
                    assert by_chance(chi_square(high))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", SEEDS)
def test_steps_from_one_index_to_the_next_are_of_any_size(n: int, seed: int) -> None:
    for run in runs(n, seed):
        steps = (run[1:] - run[:-1]) % n
        bins = max(2, min(256, len(run) // 32))
        assert by_chance(chi_square(np.bincount(steps * bins // n, minlength=bins)))
        assert by_chance(chi_square(np.bincount(steps % 2, minlength=2)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_whole_epoch_rises_and_falls_as_often(seed: int) -> None:
    """Ascents of a random order of n are about normal: (n - 1) / 2, variance (n + 1) / 12."""
    for n in SIZES[:2]:
        order = EpochOrder(n, seed).indices(np.arange(n))
        ascents = int((np.diff(order) > 0).sum())
        assert by_chance((ascents - (n - 1) / 2) / math.sqrt((n + 1) / 12))


# ------------------------------------------------------------------------------- tiny ones


def orders_of(n: int, keys: npt.NDArray[np.uint64]) -> list[I64]:
    """Where each index of range(n) goes under each key."""
    indices = [np.full(len(keys), i, np.uint64) for i in range(n)]
    return [permute(index, n, keys).astype(np.int64) for index in indices]


def check_all_orders_are_as_frequent(n: int, count: int) -> None:
    images = orders_of(n, subkeys(key_of("tiny", n), np.arange(count)))
    number = np.zeros(count, np.int64)  # of the order among all n!
    for i in range(n):
        smaller = sum((images[j] < images[i]).astype(np.int64) for j in range(i + 1, n))
        number = number * (n - i) + smaller
    assert by_chance(chi_square(np.bincount(number, minlength=math.factorial(n))))


@pytest.mark.parametrize("n", range(2, 8))
def test_all_orders_of_a_few_elements_are_as_frequent(n: int) -> None:
    check_all_orders_are_as_frequent(n, max(10_000, 20 * math.factorial(n)))


@pytest.mark.long
@pytest.mark.parametrize("n", range(2, 9))
def test_all_orders_of_a_few_elements_are_as_frequent_among_millions(n: int) -> None:
    check_all_orders_are_as_frequent(n, 4_000_000)


@pytest.mark.parametrize("n", [9, 16, 31, 64, 100, 255, 256, 257, 1024])
def test_any_two_of_a_few_more_elements_go_anywhere(n: int) -> None:
    """Places that lie in one row, one column or on the corners of a rectangle of the Feistel grid,
    for those are where too few rounds show."""
    count, column = 40_000, 1 << (n - 1).bit_length() // 2
    keys = subkeys(key_of("few", n), np.arange(count))
    corners = [0, 1, column, column + 1, n - 1]
    image = {i: permute(np.full(count, i, np.uint64), n, keys).astype(np.int64) for i in corners}
    for i in corners:
        assert by_chance(chi_square(np.bincount(image[i], minlength=n)))
    for i, j in combinations(corners, 2):
        apart = np.bincount((image[i] - image[j]) % n, minlength=n)
        assert apart[0] == 0
        assert by_chance(chi_square(apart[1:]))


# ------------------------------------------------------------------------------- independence


@pytest.mark.parametrize("n", [1000, 2**16, 100_003])
def test_epochs_seeds_and_sources_have_nothing_to_do_with_each_other(n: int) -> None:
    """Two unrelated orders agree at one place on average, and neither follows the other."""
    keys = {subkeys(key_of("source", seed, "data"), np.arange(3)).tobytes() for seed in range(3)}
    assert len(keys) == 3
    orders = [
        permute(np.arange(n, dtype=np.uint64), n, subkeys(key_of("source", seed, name), epoch))
        for seed in (0, 1, -1)
        for name in ("data", "web", "bew")
        for epoch in (np.array([0]), np.array([1]), np.array([2]))
    ]
    pairs = list(combinations(orders, 2))
    agreed = 0
    for a, b in pairs:
        assert by_chance(correlation(a, b))
        agreed += int((a == b).sum())
    assert by_chance((agreed - len(pairs)) / math.sqrt(len(pairs)))


def test_a_sample_comes_anywhere_in_the_next_epoch() -> None:
    n, epochs = 64, 4000
    order = EpochOrder(n, seed=0).indices(np.arange(n * epochs)).reshape(epochs, n)
    assert (np.sort(order) == np.arange(n)).all()
    place = np.argsort(order)  # of each sample in each epoch
    both = np.bincount((place[:-1] * n + place[1:]).reshape(-1), minlength=n * n)
    assert by_chance(chi_square(both))


# ------------------------------------------------------------------------------- mixtures


@pytest.mark.parametrize("seed", SEEDS)
def test_the_sources_of_neighbours_have_nothing_to_do_with_each_other(seed: int) -> None:
    weights = [8, 4, 2, 1, 1]
    order = MixtureOrder([10**6] * 5, list("abcde"), seed=seed, stages=[Stage.of(weights)])
    source, _ = order.draws(np.arange(64 * 4096))
    share = np.array(weights) / 16
    for lag in (1, 2, 8, 64, 4095, 4096):
        found = joint(source[:-lag], source[lag:], 5)
        assert by_chance(chi_square(found, np.outer(share, share) * found.sum()))
        assert by_chance(correlation(source[:-lag], source[lag:]))


def test_every_rank_and_every_place_of_a_block_meets_every_source() -> None:
    """Along one place of many blocks, as one rank of 4,096 sees them, each comes by its weight."""
    weights, blocks = [5, 2, 1], 800
    order = MixtureOrder([10**6] * 3, list("abc"), seed=1, stages=[Stage.of(weights)])
    source, _ = order.draws(np.arange(blocks * 4096))
    grid = source.reshape(blocks, 4096)
    share = np.array(weights) / 8
    for place in range(0, 4096, 97):
        found = np.bincount(grid[:, place], minlength=3)
        assert by_chance(chi_square(found, share * blocks))
    by_place = (grid == 0).sum(0)  # binomial at each of 4,096 places
    expected, spread = blocks * share[0], blocks * share[0] * (1 - share[0])
    value = (((by_place - expected) ** 2 / spread).sum() - 4096) / math.sqrt(2 * 4096)
    assert by_chance(float(value))
