"""Arguments that are whole numbers, checked in one way."""

from __future__ import annotations

from operator import index
from typing import Any

from penstock.errors import ConfigError


def whole(value: Any, name: str) -> int:
    """A whole number as Python's own.

    >>> whole(1.0, "rank")
    Traceback (most recent call last):
    penstock.errors.ConfigError: rank is a whole number, not 1.0
    """
    try:
        return index(value)
    except TypeError:
        raise ConfigError(f"{name} is a whole number, not {value!r}") from None


def at_least(least: int, value: Any, name: str) -> int:
    """A whole number from `least` on, which True is not.

    >>> at_least(1, 0, "accumulation")
    Traceback (most recent call last):
    penstock.errors.ConfigError: accumulation is a whole number >= 1, not 0
    """
    good = value is not True and value is not False and hasattr(value, "__index__")
    if not good or index(value) < least:
        raise ConfigError(f"{name} is a whole number >= {least}, not {value!r}")
    return index(value)
