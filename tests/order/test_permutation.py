"""A permutation is a bijection of any size, the one of law 1, for one index or many at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.order import reference

from penstock.errors import ConfigError, OutOfBounds
from penstock.order import Permutation, permute
from penstock.order.hashing import key_of, subkeys

keys = st.integers(0, 2**64 - 1)
around_powers = st.builds(
    lambda power, more: max(2**power + more, 1), st.integers(0, 63), st.sampled_from([-1, 0, 1])
)
sizes = around_powers | st.integers(1, 2**64) | st.just(2**64)


def is_permuted(n: int, key: int) -> bool:
    return bool((np.bincount(Permutation(n, key)(np.arange(n)), minlength=n) == 1).all())


@pytest.mark.parametrize("start", range(1, 300, 50))
def test_every_size_up_to_300_is_permuted(start: int) -> None:
    for n in range(start, start + 50):
        for key in (0, 1, 2**64 - 1):
            assert is_permuted(n, key)


@given(st.sampled_from([2**p + d for p in range(9, 17) for d in (-1, 0, 1)]), keys)
def test_sizes_around_powers_of_two_are_permuted(n: int, key: int) -> None:
    assert is_permuted(n, key)


@given(st.integers(300, 100_000), keys)
def test_larger_sizes_are_permuted(n: int, key: int) -> None:
    assert is_permuted(n, key)


@given(sizes, keys, st.data())
def test_no_two_indices_of_a_huge_permutation_meet_and_none_falls_outside(
    n: int, key: int, data: st.DataObject
) -> None:
    some = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=50))
    index = np.array(sorted({0, n - 1} | some), np.uint64)
    found = Permutation(n, key)(index).tolist()
    assert len(set(found)) == len(index)
    assert all(0 <= image < n for image in found)


@given(sizes, keys, st.data())
def test_it_is_the_permutation_of_the_law_for_any_size_up_to_2_to_the_64(
    n: int, key: int, data: st.DataObject
) -> None:
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4))
    found = Permutation(n, key)(np.array(index, np.uint64)).tolist()
    assert found == [reference.permuted(i, n, key) for i in index]


@given(st.lists(st.tuples(sizes, keys, st.floats(0, 1)), max_size=30))
def test_one_call_for_many_permutations_gives_what_single_calls_give(
    asked: list[tuple[int, int, float]],
) -> None:
    asked = [(min(n, 2**64 - 1), key, at) for n, key, at in asked]  # 2^64 fits in no array
    indices = [min(int(at * n), n - 1) for n, _, at in asked]
    n = np.array([n for n, _, _ in asked], np.uint64)
    key = np.array([key for _, key, _ in asked], np.uint64)
    found = permute(np.array(indices, np.uint64), n, key)
    singly = [
        int(Permutation(n, key)(np.array([i], np.uint64))[0])
        for i, (n, key, _) in zip(indices, asked, strict=True)
    ]
    assert found.dtype == np.uint64
    assert found.tolist() == singly


def test_one_size_with_many_keys_and_many_sizes_with_one_key() -> None:
    index = np.arange(500, dtype=np.uint64)
    many = subkeys(key_of("many"), np.arange(500))
    expected = [reference.permuted(int(i), 1000, int(k)) for i, k in zip(index, many, strict=True)]
    assert permute(index, 1000, many).tolist() == expected
    n = np.arange(1, 501)
    expected = [reference.permuted(int(i), int(m), 7) for i, m in zip(index, n, strict=True)]
    assert permute(index, n, 7).tolist() == expected
    assert permute(index[:0], n[:0], many[:0]).tolist() == []
    assert permute(index[:0], 5, 1).tolist() == []


def test_the_shape_and_order_of_the_indices_do_not_matter() -> None:
    shuffle = Permutation(100_003, key=5)
    straight = shuffle(np.arange(100_003))
    some = np.random.default_rng(0).integers(0, 100_003, (40, 50))
    assert np.array_equal(shuffle(some), straight[some])
    assert shuffle(np.array(7)).tolist() == straight[7]
    assert shuffle(np.zeros((3, 0), np.int64)).shape == (3, 0)
    assert shuffle(np.arange(200, dtype=np.uint8)).tolist() == straight[:200].tolist()


def test_the_indices_given_are_left_as_they_were() -> None:
    index = np.arange(10, dtype=np.uint64)
    Permutation(10, 1)(index)
    permute(index, 10, 1)
    assert index.tolist() == list(range(10))


def test_results_are_int64_wherever_they_fit() -> None:
    index = np.arange(2)
    assert Permutation(2**63, 1)(index).dtype == np.int64
    assert Permutation(2**63 + 1, 1)(index).dtype == np.uint64
    assert Permutation(0, 1)(index[:0]).dtype == np.int64


def test_what_is_not_in_the_range_is_refused() -> None:
    for n, index, found in [(10, [3, 10], 10), (10, [-1, 3], -1), (0, [0], 0), (2**63, [-5], -5)]:
        with pytest.raises(OutOfBounds, match=rf"range\({n}\) has no place for {found}$"):
            Permutation(n, 1)(np.array(index))
    for n in (-1, 2**64 + 1):
        with pytest.raises(ConfigError, match=rf"between 0 and 2\^64 elements, not {n}"):
            Permutation(n, 1)
    for key in (-1, 2**64):
        with pytest.raises(ConfigError, match="64 bits"):
            Permutation(5, key)
