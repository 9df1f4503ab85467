"""How rows are made of documents: the options of a packing, checked once.

>>> Packing(capacity=2049, strategy="bfd_split").strategy       # AstrAI's names are known
'best_fit_decreasing'
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from typing import Any, Literal, get_args

from penstock.errors import ConfigError

Strategy = Literal["concat", "best_fit_crop", "best_fit_decreasing"]
Overflow = Literal["truncate", "truncate_start", "split"]
Bos = Literal["never", "continued", "every"]
Last = Literal["pad", "drop"]

ALIASES: dict[str, tuple[Strategy, Overflow]] = {
    "simple": ("concat", "truncate"),
    "bfd": ("best_fit_decreasing", "truncate"),
    "bfd_split": ("best_fit_decreasing", "split"),
}
CHUNK_ROWS = 1000  # rows' worth of tokens in a closed chunk: 0.16% padding at 2,048 tokens a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How rows are made of documents: everything besides their lengths that decides it.

    `overflow` is what becomes of documents longer than a row: "truncate" keeps their start,
    "truncate_start" their end, "split" cuts them into rows. By default best_fit_decreasing
    truncates, and the others have no need to. `bos` puts a BOS before pieces that continue a
    document, or before every piece. `overlap` of 1 begins each row of concat with the last token
    of the row before. `last` says what becomes of a last row that is not full, where rows are.

    `chunk_rows` closes best_fit_decreasing after that many rows' worth of tokens (None: all
    documents together). `buffer_size` and `refill` are nanochat's buffer and tokenizer batch;
    refills end where one of `groups` (row groups, in documents from the first on) does.
    """

    capacity: int
    strategy: str = "best_fit_decreasing"
    overflow: Overflow | None = None
    bos: Bos = "never"
    overlap: int = 0
    last: Last = "pad"
    chunk_rows: int | None = None
    buffer_size: int = 1000
    refill: int = 128
    groups: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("capacity", "overlap", "chunk_rows", "buffer_size", "refill"):
            self._put(**{name: _whole(getattr(self, name), name)})
        if self.groups is not None:
            self._put(groups=tuple(_whole(group, "a group") for group in self.groups))
            if min(self.groups, default=0) < 0:
                raise ConfigError(f"groups are numbers of documents, not {self.groups}")
        known = (*get_args(Strategy), *ALIASES)
        if self.strategy not in known:
            near = get_close_matches(str(self.strategy), known, n=1)
            hint = f" (meant: {near[0]}?)" if near else ""
            raise ConfigError(f"packing is one of {', '.join(known)}, not {self.strategy!r}{hint}")
        if self.strategy in ALIASES:
            strategy, overflow = ALIASES[self.strategy]
            self._put(strategy=strategy, overflow=self.overflow or overflow)
        elif self.strategy == "best_fit_decreasing" and self.overflow is None:
            self._put(overflow="truncate")
        for mistake in _mistakes(self):
            raise ConfigError(mistake)

    def _put(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _whole(value: Any, name: str) -> int | None:
    """A number as Python's own; None stays what it is."""
    if value is None:
        return None
    if value is True or value is False or not isinstance(value, Integral):
        raise ConfigError(f"{name} is a whole number, not {value!r}")
    return int(value)


def _mistakes(packing: Packing) -> Iterator[str]:
    for name, allowed in (
        ("overflow", (*get_args(Overflow), None)),
        ("bos", get_args(Bos)),
        (
            "last",
            get_args(Last),
        ),
    ):
        if getattr(packing, name) not in allowed:
            choices = ", ".join(str(each) for each in allowed)
            yield f"{name} is one of {choices}, not {getattr(packing, name)!r}"
    for name in ("capacity", "buffer_size", "refill", "chunk_rows"):
        value = getattr(packing, name)
        least = 1 + (name == "capacity" and packing.bos != "never")
        if value is None and name == "chunk_rows":
            continue
        if value is None or value < least:
            yield f"{name} is a whole number >= {least}, not {value!r}"
    if packing.strategy == "concat" and packing.bos != "never":
        yield "concat puts no BOS into its stream: use bos='never', or store documents with one"
    if packing.strategy == "best_fit_crop" and packing.bos == "continued":
        yield "best_fit_crop continues no document: bos is 'never' or 'every'"
    if packing.strategy == "best_fit_crop" and packing.overflow is not None:
        yield "best_fit_crop crops long documents by its own policy: leave overflow out"
    if packing.strategy == "concat" and packing.overflow == "split":
        yield "concat splits documents wherever rows end: leave overflow out"
    if packing.overlap not in (0, 1) or (packing.overlap and packing.strategy != "concat"):
        yield "overlap is 0 or, for concat, 1"
    if packing.overlap and packing.capacity == 1:
        yield "rows of one token cannot overlap by it"
