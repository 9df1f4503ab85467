"""Weights become shares of 1 and integers that sum to 2^32, by the same arithmetic everywhere."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.order import reference

from penstock.errors import ConfigError
from penstock.order import Stage, check_weights, quantise, shares

TOTAL = 2**32

weight_lists = st.lists(
    st.one_of(
        st.just(0.0),
        st.floats(1e-6, 1.0),
        st.floats(0, exclude_min=True, allow_infinity=False),
    ),
    min_size=1,
    max_size=8,
).filter(any)
temperatures = st.one_of(st.floats(0.1, 10), st.floats(0, exclude_min=True, allow_infinity=False))


# ------------------------------------------------------------------------------- integers


@given(weight_lists)
def test_weights_become_integers_by_largest_remainder(weights: list[float]) -> None:
    assert list(quantise(weights)) == reference.quantised(weights)


@given(weight_lists)
def test_the_integers_sum_to_2_to_the_32_and_only_zero_becomes_zero(weights: list[float]) -> None:
    found = quantise(weights)
    assert sum(found) == TOTAL
    assert [bool(count) for count in found] == [bool(weight) for weight in weights]
    assert all(isinstance(count, int) for count in found)


@given(weight_lists)
def test_each_integer_is_within_one_of_its_share_or_one_where_that_is_too_little(
    weights: list[float],
) -> None:
    scale = Fraction(TOTAL) / sum(map(Fraction, weights))
    exact = [Fraction(weight) * scale for weight in weights]
    tiny = sum(0 < share < 1 for share in exact)  # what these get above their share, others pay
    for count, share in zip(quantise(weights), exact, strict=True):
        assert share - 1 - tiny < count < max(share + 1, Fraction(2))


@given(weight_lists, st.randoms(use_true_random=False))
def test_weights_in_another_order_become_the_same_integers_but_for_ties(
    weights: list[float], rng: random.Random
) -> None:
    order = list(range(len(weights)))
    rng.shuffle(order)
    shuffled = quantise([weights[i] for i in order])
    found = sorted(zip(weights, quantise(weights), strict=True))
    again = sorted((weights[i], count) for i, count in zip(order, shuffled, strict=True))
    if 1 in shuffled:  # lifted, perhaps; the largest pay, and of two as large the first
        assert all(abs(a - b) <= 1 for (_, a), (_, b) in zip(found, again, strict=True))
    else:
        assert found == again


@given(weight_lists, st.integers(-30, 30))
def test_the_integers_depend_on_ratios_only(weights: list[float], exponent: int) -> None:
    scaled = [weight * 2.0**exponent for weight in weights]
    assume(all(w / 2.0**exponent == v for w, v in zip(scaled, weights, strict=True)))
    assume(max(scaled) < float("inf"))
    assert quantise(scaled) == quantise(weights)


@pytest.mark.parametrize("smallest", [1e-6, 1e-12, 1e-300])
def test_a_thousand_sources(smallest: float) -> None:
    """Weights of all magnitudes; 999 of them tiny; all alike."""
    rng = random.Random(0)
    for weights in [
        [smallest ** rng.random() for _ in range(1000)],
        [1.0, *[smallest] * 999],
        [smallest] * 1000,
    ]:
        found = quantise(weights)
        assert list(found) == reference.quantised(weights)
        assert sum(found) == TOTAL
        assert min(found) >= 1


def test_what_the_smallest_need_is_paid_by_the_largest_in_turn() -> None:
    assert quantise([1, 1, *[1e-300] * 3]) == (2**31 - 2, 2**31 - 1, 1, 1, 1)
    assert quantise([1, 1, *[1e-300] * 7]) == (2**31 - 4, 2**31 - 3, *[1] * 7)
    assert quantise([1e-300, 0, 1]) == (1, 0, TOTAL - 1)


def test_numbers_of_any_type_are_weights() -> None:
    kinds: list[Any] = [int, float, np.float64, np.float32, np.int64, Fraction]
    for kind in kinds:
        weights = [kind(9), kind(1), kind(0)]
        assert quantise(weights) == quantise([9.0, 1.0, 0.0])
        assert shares(weights, kind(2)) == (0.75, 0.25, 0.0)
        array: Any = np.array(weights)
        assert quantise(array) == quantise(weights)
        assert shares(array) == shares(weights)


@pytest.mark.parametrize("make", [quantise, shares, Stage.of])
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([], "empty"),
        ([1.0, -0.5], "non-negative"),
        ([0.0, 0.0], "sum to > 0"),
        ([-0.0], "sum to > 0"),
        ([1.0, float("nan")], "finite and non-negative"),
        ([1.0, float("inf")], "finite and non-negative"),
    ],
)
def test_weights_that_no_mixture_can_have_are_refused(
    make: Callable[[list[float]], object], weights: list[float], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make(weights)
    with pytest.raises(ConfigError, match=f"^here: .*{words}"):
        check_weights(weights, "here")


def test_a_stage_has_integers_that_sum_to_2_to_the_32() -> None:
    assert Stage.of([3, 1], 5, 7) == Stage(5, (3 * 2**30, 2**30), 7)
    for position, weights in [(-1, (TOTAL,)), (0, (1, 2)), (0, ()), (0, (TOTAL + 1, -1))]:
        with pytest.raises(ConfigError, match=r"sum to 2\^32"):
            Stage(position, weights)


# ------------------------------------------------------------------------------- temperature


@given(weight_lists, temperatures)
def test_shares_sum_to_one_and_keep_zeros_ties_and_order(
    weights: list[float], temperature: float
) -> None:
    found = shares(weights, temperature)
    assert abs(sum(found) - 1) < 1e-10
    assert [bool(share) for share in found] == [bool(weight) for weight in weights]
    ranked = sorted(zip(weights, found, strict=True))
    assert [share for _, share in ranked] == sorted(found)
    assert len(set(ranked)) == len({weight for weight, _ in ranked})


@given(weight_lists, st.sampled_from([(1.0, 1), (0.5, 2), (0.25, 4)]))
def test_shares_are_those_of_exact_arithmetic(
    weights: list[float], power: tuple[float, int]
) -> None:
    temperature, exponent = power
    powers = [Fraction(weight) ** exponent for weight in weights]
    for share, p in zip(shares(weights, temperature), powers, strict=True):
        exact = p / sum(powers)
        assert abs(Fraction(share) - exact) <= max(
            exact * Fraction(1, 10**11), Fraction(1, 10**300)
        )


@given(weight_lists, temperatures, st.integers(-20, 20))
def test_shares_depend_on_ratios_only(
    weights: list[float], temperature: float, exponent: int
) -> None:
    scaled = [weight * 2.0**exponent for weight in weights]
    assume(all(w / 2.0**exponent == v for w, v in zip(scaled, weights, strict=True)))
    assume(max(scaled) < float("inf"))
    assert shares(scaled, temperature) == shares(weights, temperature)


@given(weight_lists, st.floats(1, 10), st.floats(1, 10))
def test_a_higher_temperature_never_gives_the_largest_more(
    weights: list[float], a: float, b: float
) -> None:
    assert max(shares(weights, max(a, b))) <= max(shares(weights, min(a, b)))


def test_shares_at_the_limits() -> None:
    assert shares([7.0, 1e-300, 0.0], 1e300) == (0.5, 0.5, 0.0)
    assert shares([7.0, 6.9], 1e-300) == (1.0, sys.float_info.min)
    assert shares([5e-324, 1.7e308]) == (sys.float_info.min, 1.0)
    assert shares([1.7e308, 1.7e308], 5e-324) == (0.5, 0.5)


def test_shares_are_the_same_digits_on_every_machine() -> None:
    """The first 12 of mpmath's at 50 digits."""
    assert shares([0.7, 0.2, 0.1], 1.3) == (0.622926494499, 0.237641848861, 0.13943165664)
    assert shares([1.0, 3.0, 1e-6], 0.7) == (0.172295365012, 0.827704634526, 4.62216051265e-10)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_is_positive_and_finite(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature must be positive"):
        shares([1.0], temperature)
