"""What a state belongs to, compared with what it is loaded onto."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.errors import StateMismatch


def check_identity(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a state of another run, naming each field that differs.

    >>> check_identity({"seed": 1, "order": 1}, {"seed": 2, "order": 1})
    Traceback (most recent call last):
    penstock.errors.StateMismatch: this state belongs to another run: seed was 1 and is 2 here. ...
    """
    if found := differing(saved, own):
        raise StateMismatch(
            f"this state belongs to another run: {found}. Load it with the data and settings it "
            "was saved with"
        )


def differing(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Each field that differs, in words; of many the first five.

    >>> differing({"seed": 1, "order": {"a": 1}}, {"seed": 1, "order": {"a": 2}})
    'order.a was 1 and is 2 here'
    """
    found = [
        f"{name[:60]} was {short(then)} and is {short(now)} here"
        for name, then, now in _differences(saved, own)
    ]
    return "; ".join(found[:5]) + (f" (and {len(found) - 5} more)" if len(found) > 5 else "")


def _differences(saved: Any, own: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        for key in [*saved, *(key for key in own if key not in saved)]:
            path = f"{name}.{key}" if name else str(key)
            yield from _differences(saved.get(key, ABSENT), own.get(key, ABSENT), path)
    elif saved != own:
        yield name, saved, own


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


def short(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
