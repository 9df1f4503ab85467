"""Settings as they are typed in a recipe: each is checked by one function, which names it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from penstock.errors import ConfigError

ACTIONS = ("train", "mask", "$role", "value")
ROLE_ACTIONS = ("train", "mask")


def shown(value: Any) -> str:
    """A value as errors show it: short, with its type.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxx...xxxxxxxxxxxxx' (str)"
    """
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def text(value: Any, where: str) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} must be text, found {shown(value)}")
    return value


def truth(value: Any, where: str) -> bool:
    """True or false, and not 0 or 1."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, found {shown(value)}")
    return value


def count(value: Any, where: str, *, least: int = 1) -> int:
    """An integer, at least `least`.

    >>> count(True, "max_chars")
    Traceback (most recent call last):
    penstock.errors.ConfigError: max_chars must be an integer >= 1, found True (bool)
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{where} must be an integer >= {least}, found {shown(value)}")
    return value


def optional_count(value: Any, where: str) -> int | None:
    """The same, or no limit: null, for which TOML has "none"."""
    if value is None or value == "none":
        return None
    try:
        return count(value, where)
    except ConfigError as error:
        raise ConfigError(f'{error} (no limit is null, or "none")') from None


def choice(value: Any, known: Sequence[str], where: str) -> str:
    """One of a few words.

    >>> choice("trian", ACTIONS, "action")
    Traceback (most recent call last):
    penstock.errors.ConfigError: action must be one of train, mask, $role, value, found 'trian'
    (str) (meant: train?)
    """
    if isinstance(value, str) and value in known:
        return value
    near = get_close_matches(str(value).lower(), known, n=1)
    hint = f" (meant: {near[0]}?)" if near else ""
    raise ConfigError(f"{where} must be one of {', '.join(known)}, found {shown(value)}{hint}")


def check_keys(given: Iterable[Any], known: Sequence[str], table: str) -> None:
    """Refuse keys that mean nothing here, with what they are nearest to."""
    for key in given:
        if key in known:
            continue
        near = get_close_matches(str(key).lower(), known, n=1)
        hint = f"meant: {near[0]}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"unknown key {f'{table}.' if table else ''}{key} ({hint})")
