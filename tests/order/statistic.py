"""How far counts lie from what chance would give, in standard deviations.

Keys in these tests are fixed, so a test that passes once passes always; the limit says how unlucky
whoever next changes the order, or adds a key, would have to be. LIMIT is 6.5: a false alarm once in
2.5e10 values, so less than once in a million for the thousands of values looked at here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

LIMIT = 6.5


def chi_square(counts: npt.ArrayLike, expected: npt.ArrayLike | None = None) -> float:
    """Pearson's statistic as a standard normal value (Wilson and Hilferty); uniform by default."""
    found = np.asarray(counts, np.float64).reshape(-1)
    if expected is None:
        expected = np.full(len(found), found.sum() / len(found))
    wanted = np.asarray(expected, np.float64).reshape(-1)
    freedom = len(found) - 1
    ratio = float(((found - wanted) ** 2 / wanted).sum()) / freedom
    return float((ratio ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


def correlation(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Pearson's correlation times sqrt(samples): about standard normal for unrelated numbers."""
    return float(np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1]) * math.sqrt(len(a))


def by_chance(value: float) -> bool:
    """Whether a standard normal value may well have come about by chance."""
    return abs(value) < LIMIT
