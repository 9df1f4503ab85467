"""What became of every document and token of a prepare run; it adds up.

documents = kept + filtered (by rule) + rejected (by reason)
tokens_in = tokens + truncated_tokens             of the documents that were kept

>>> tally = Tally(documents=3, kept=2, filtered={"min_chars": 1}, tokens_in=9, tokens=9)
>>> (tally + tally).documents, tally.balanced
(6, True)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of a run, or of a part of it."""

    bytes: int = 0  # of input, as it lies on disk
    documents: int = 0  # came in, those that could not be read among them
    kept: int = 0
    tokens_in: int = 0  # of kept documents, before anything was cut
    tokens: int = 0  # written, over all keys of tokens
    trained: int = 0  # of them, those that are trained on
    truncated_documents: int = 0
    truncated_tokens: int = 0
    records: int = 0  # written: more than documents, where long ones were split
    rows: int = 0  # packed rows; 0 where nothing was packed
    padding: int = 0  # cells of those rows that would be padding
    filtered: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)

    @property
    def rejects(self) -> int:
        """Documents that were rejected, for whatever reason."""
        return sum(self.rejected.values())

    @property
    def balanced(self) -> bool:
        """Whether it adds up, as it always should."""
        gone = sum(self.filtered.values()) + self.rejects
        return (
            self.documents == self.kept + gone
            and self.tokens_in == self.tokens + self.truncated_tokens
        )

    def __add__(self, other: Tally) -> Tally:
        summed: dict[str, Any] = {}
        for each in fields(self):
            a, b = getattr(self, each.name), getattr(other, each.name)
            both = a + b if isinstance(a, int) else dict(Counter(a) + Counter(b))
            summed[each.name] = both
        return Tally(**summed)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, reasons in order."""
        plain = asdict(self)
        for name in ("filtered", "rejected"):
            plain[name] = dict(sorted(plain[name].items()))
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is."""

    bytes: int
    total: int
    tally: Tally
    workers: int
