"""What becomes of a document: a record, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(slots=True)
class Built:
    """A record: an array for every key of the recipe, a list of arrays for a nested one."""

    values: dict[str, npt.NDArray[Any] | list[npt.NDArray[Any]]]
    tokens_in: int  # before truncation, of all token keys together, BOS and EOS among them
    truncated: int  # cut off by max_seq_len


@dataclass(slots=True)
class Dropped:
    """A document that makes no record. `rule` is short, `reason` is for people.

    >>> Dropped.because(Refused("min_chars", filtered=True)).reason
    'filtered: min_chars'
    """

    reason: str
    rule: str
    rejected: bool  # False: filtered, by a rule of the recipe

    @classmethod
    def because(cls, refused: Refused) -> Dropped:
        """The outcome that a refusal comes to."""
        kind = "filtered" if refused.filtered else "rejected"
        return cls(f"{kind}: {refused}", refused.rule, not refused.filtered)


class Refused(DataError):
    """One document that cannot be used; inside `prepare`, where it ends as a `Dropped`."""

    def __init__(self, rule: str, words: str = "", *, filtered: bool = False) -> None:
        super().__init__(words or rule)
        self.rule = rule
        self.filtered = filtered
