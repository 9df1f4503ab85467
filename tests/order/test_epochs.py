"""The order of a single dataset: one permutation an epoch, at any position."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.order import reference

from penstock.errors import ConfigError
from penstock.order import EpochOrder
from penstock.order.hashing import key_of, mix, subkeys

seeds = st.integers(-(2**63), 2**64)


@given(st.integers(1, 2**40), seeds, st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
def test_a_position_is_a_place_in_its_epoch_s_permutation(
    n: int, seed: int, positions: list[int]
) -> None:
    key = reference.key_of("source", seed, "data")
    expected = [reference.permuted(p % n, n, reference.subkey(key, p // n)) for p in positions]
    assert EpochOrder(n, seed).indices(np.array(positions)).tolist() == expected
    assert EpochOrder(n, seed, shuffle=False).indices(np.array(positions)).tolist() == [
        p % n for p in positions
    ]


@given(st.integers(1, 200), seeds)
def test_each_epoch_has_each_sample_once(n: int, seed: int) -> None:
    epochs = EpochOrder(n, seed).indices(np.arange(5 * n)).reshape(5, n)
    assert (np.sort(epochs) == np.arange(n)).all()


@given(st.integers(1, 50), st.lists(st.integers(0, 400), max_size=60))
def test_positions_come_in_any_order_from_any_epochs(n: int, positions: list[int]) -> None:
    order = EpochOrder(n, 3)
    whole = order.indices(np.arange(401))
    found = order.indices(np.array(positions, np.int64))
    assert found.tolist() == whole[positions].tolist() if positions else len(found) == 0
    assert found.dtype == np.int64


def test_positions_may_be_of_any_integer_type() -> None:
    order = EpochOrder(30, 3)
    expected = order.indices(np.arange(100)).tolist()
    for dtype in (np.uint8, np.int32, np.uint32, np.uint64):
        assert order.indices(np.arange(100).astype(dtype)).tolist() == expected


def test_a_seed_is_its_value_whatever_its_type() -> None:
    seed = 7
    expected = EpochOrder(1000, seed).indices(np.arange(100)).tolist()
    for kind in (np.int64, np.uint8):
        assert EpochOrder(1000, kind(seed)).indices(np.arange(100)).tolist() == expected  # type: ignore[arg-type]


def test_a_dataset_without_samples_has_no_order() -> None:
    with pytest.raises(ConfigError, match="without a single sample"):
        EpochOrder(0, 0).indices(np.arange(1))


def test_memory_does_not_grow_with_the_dataset_or_the_position() -> None:
    def peak(n: int, position: int) -> int:
        tracemalloc.start()
        EpochOrder(n, 0).indices(position + np.arange(4096))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(10_000, 0)
    for n, position in [(10_000, 0), (10**12, 10**15), (2**62, 2**62)]:
        assert peak(n, position) < 1 << 20


# ------------------------------------------------------------------------------- keys


@given(st.lists(st.integers() | st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
def test_keys_are_hashed_from_all_their_parts(parts: list[int | str]) -> None:
    assert key_of(*parts) == reference.key_of(*parts)
    assert key_of(*parts) != key_of(*parts, 0)
    assert key_of(*parts, 12) != key_of(*parts, "12")
    assert key_of(*parts, 1, 2) != key_of(*parts, 12)


def test_a_number_that_is_not_whole_makes_no_key() -> None:
    with pytest.raises(TypeError):
        key_of(1.5)  # type: ignore[arg-type]


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**63 - 1), max_size=5))
def test_keys_under_a_key_are_those_of_the_reference(key: int, numbers: list[int]) -> None:
    found = subkeys(key, np.array(numbers, np.int64))
    assert found.tolist() == [reference.subkey(key, number) for number in numbers]
    array = np.full(len(numbers), key, np.uint64)
    assert subkeys(array, np.array(numbers, np.uint64)).tolist() == found.tolist()


def test_mixing_loses_nothing() -> None:
    assert len(np.unique(mix(np.arange(2**20, dtype=np.uint64)))) == 2**20
