"""What a lane reads, endlessly: the documents of its units, tokenized.

    feed = Feed(lane=3, source=source, at=(0, 3), part=0)
    block = feed.next()                              # and so on, from that address

A block is a closed chunk of a unit, or a batch of so many documents; most units are one chunk.
Feeds skip what holds no token. A corpus in which no unit holds one is an error: a stream over it
would never give a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import MissingData
from penstock.order import Permutation
from penstock.order.hashing import key_of
from penstock.stream.deal import At, Deal
from penstock.stream.encoding import Encode
from penstock.stream.reading import Docs
from penstock.text.batches import Unit


@dataclass(slots=True)
class Block:
    """Documents of a unit, tokenized; `made` is what a policy made of them in the same thread."""

    at: At
    part: int  # of the unit's blocks
    ids: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]
    made: Any = None

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(slots=True)
class Source:
    """What all feeds of a process read: units, how they are dealt, cut and tokenized."""

    name: str  # for errors
    units: Sequence[Unit]
    deal: Deal
    parts: Callable[[Unit], Iterator[Docs]]
    encode: Encode
    seed: int
    shuffle: bool = False  # documents within a block
    make: Callable[[Block], Any] | None = None
    group: int = 1  # tokens made ahead together: small blocks are used up before threads can change
    passes: bool = False  # whether a block without a token stands where an epoch begins
    _empty: set[int] = field(default_factory=set)  # units found without a token

    def is_empty(self, at: At) -> bool:
        """Whether the unit there is known to hold no token; an error where all are."""
        if len(self._empty) == len(self.units):
            raise MissingData(f"{self.name} holds no document with a token: nothing to stream")
        return self.deal.unit(at) in self._empty

    def found_empty(self, at: At) -> None:
        """Remember a unit without a token."""
        self._empty.add(self.deal.unit(at))

    def read(self, at: At, *, skip: int = 0) -> Iterator[tuple[int, Docs]]:
        """The unit's parts from number `skip` on, each in the order in which it is tokenized."""
        for part, docs in enumerate(self.parts(self.units[self.deal.unit(at)])):
            if part >= skip:
                yield part, self._ordered(at, part, docs)

    def _ordered(self, at: At, part: int, docs: Docs) -> Docs:
        if not self.shuffle:
            return docs
        key = key_of("stream", self.seed, "documents", *at, part)
        return docs.some(Permutation(len(docs), key)(np.arange(len(docs))))

    def block(self, at: At, part: int, docs: Docs) -> Block:
        """Documents as a block."""
        ids, offsets = self.encode(docs.texts)
        block = Block(at, part, ids, offsets)
        if self.make is not None and len(ids):
            block.made = self.make(block)
        return block

    def beginning(self, at: At) -> Block:
        """Nothing, where an epoch begins: a lane in a pass learns there that it has ended."""
        return Block(at, 0, np.empty(0, np.uint32), np.zeros(1, np.int64))

    def check_not_empty(self) -> None:
        """Refuse a corpus without a token, after a pass that met none, by reading on to one."""
        for number in range(len(self.units) if self._empty else 0):
            at = 0, number
            if self.is_empty(at):
                continue
            parts = self.parts(self.units[self.deal.unit(at)])
            if any(len(self.encode(docs.texts)[0]) for docs in parts):
                return
        if self._empty:
            raise MissingData(f"{self.name} holds no document with a token: nothing to stream")


class Feed:
    """The blocks of a lane from an address on."""

    def __init__(self, lane: int, source: Source, at: At, part: int = 0) -> None:
        self._lane, self._source = lane, source
        self._at, self._skip = at, part
        self._open: Iterator[tuple[int, Docs]] | None = None
        self._found = self._passed = False

    def next(self) -> Block:
        """The next block with a token."""
        source = self._source
        while True:
            if self._passed:
                self._passed = False
                return source.beginning(self._at)
            if self._open is None:
                if source.is_empty(self._at):
                    self._go_on()
                    continue
                self._open = source.read(self._at, skip=self._skip)
                self._found = self._skip > 0
            part, docs = next(self._open, (0, None))
            if docs is None:
                if not self._found:
                    source.found_empty(self._at)
                self._go_on()
                continue
            block = source.block(self._at, part, docs)
            if len(block.ids):
                self._found = True
                return block

    def _go_on(self) -> None:
        before, self._at = self._at, self._source.deal.following(self._lane, self._at)
        self._passed = self._source.passes and self._at[0] > before[0]
        self._open, self._skip = None, 0
