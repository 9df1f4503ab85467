"""Weights as shares of 1 and as integers: the same on every machine.

    >>> quantise(shares([3, 1]))
    (3221225472, 1073741824)

The integers are what a stage is: everything after them is exact.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from heapq import heapify, heapreplace
from math import isfinite

from penstock.errors import ConfigError

TOTAL = 1 << 32


def check_weights(weights: Sequence[float], what: str) -> None:
    """Refuse weights that no mixture can have, in words."""
    if not len(weights):
        raise ConfigError(f"{what}: the list of weights is empty; give one weight for each source")
    if not all(isfinite(w) and w >= 0 for w in weights):
        raise ConfigError(f"{what}: weights must be finite and non-negative, got {list(weights)}")
    if not any(w > 0 for w in weights):
        raise ConfigError(f"{what}: weights must sum to > 0, got {list(weights)}")


def quantise(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as integers that sum to 2^32, by largest remainder; a positive one gets at least 1.

    >>> quantise([3, 1, 0])
    (3221225472, 1073741824, 0)
    >>> quantise([1e-12, 1])
    (1, 4294967295)
    """
    check_weights(weights, "a mixture")
    exact = [Fraction(float(w)) for w in weights]
    scale = TOTAL / sum(exact)
    shares = [w * scale for w in exact]
    counts = [max(int(share), 1) if share else 0 for share in shares]
    by_remainder = sorted(range(len(counts)), key=lambda i: (counts[i] - shares[i], i))
    left = TOTAL - sum(counts)
    for i in by_remainder[: max(left, 0)]:
        counts[i] += 1
    largest = [(-count, i) for i, count in enumerate(counts)]
    heapify(largest)
    for _ in range(-left):  # many weights too small for a share of their own: the largest pays
        count, i = largest[0]
        counts[i] -= 1
        heapreplace(largest, (count + 1, i))
    return tuple(counts)


def shares(weights: Sequence[float], temperature: float = 1.0) -> tuple[float, ...]:
    """`w ** (1 / temperature)`, summing to 1, in 12 digits: zero stays zero, and nothing else is.

    >>> shares([9.0, 1.0, 0.0], temperature=2.0)
    (0.75, 0.25, 0.0)

    In decimal, whose ln and exp are correctly rounded: a float's power may end in another bit on
    another machine, and shares decide the order of a run.
    """
    if not (isfinite(temperature) and temperature > 0):
        raise ConfigError(f"a mixture's temperature must be positive, got {temperature}")
    check_weights(weights, "a mixture")
    with localcontext(Context(prec=30)):
        top, heat = Decimal(float(max(weights))), Decimal(float(temperature))
        powers = [Decimal(float(w)) / top for w in weights]
        if heat != 1:
            powers = [(p.ln() / heat).exp() if p else p for p in powers]
        total = sum(powers)
        exact = [float(f"{p / total:.11e}") for p in powers]
    least = sys.float_info.min  # a share too small for a float is still not zero
    return tuple(max(e, least) if w else 0.0 for e, w in zip(exact, weights, strict=True))
