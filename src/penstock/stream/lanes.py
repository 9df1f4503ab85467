"""Lanes: each an endless list of rows and, at any time, the address of its next one.

`ChunkLane` packs closed chunks, `ConcatLane` cuts one long run of tokens, `CropLane` fills rows
from a buffer of waiting documents, as nanochat does. A lane takes blocks from `Ahead`, and asks for
the next one as soon as it has opened one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import StateMismatch
from penstock.pack import CropBuffer
from penstock.stream.ahead import NOW, Ahead
from penstock.stream.chunks import Rows
from penstock.stream.deal import At
from penstock.stream.feed import Block, Feed, Source

I64 = npt.NDArray[np.int64]
Out = npt.NDArray[Any]  # one row, to be filled
NO_CUTS = np.empty(0, np.int64)
TIDIED = 32  # batches that came, after which those of which nothing waits are let go of


@dataclass(slots=True)
class Tally:
    """Where this process's tokens went, since it began or loaded a state.

    tokens      = delivered + cropped + waiting
    rows × width = delivered + repeated + padding
    """

    rows: int = 0
    documents: int = 0  # came in, but for those that a state was in the middle of
    tokens: int = 0  # came in
    delivered: int = 0
    cropped: int = 0
    repeated: int = 0  # stand in a second row too, as its first token
    padding: int = 0
    trained: int = 0  # labels

    @property
    def waiting(self) -> int:
        """Tokens that came in and stand in no row yet."""
        return self.tokens - self.delivered - self.cropped

    def to_dict(self) -> dict[str, int]:
        """For JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {
            "waiting": self.waiting
        }


@dataclass(slots=True)
class Drawn:
    """What is known of a row besides its tokens."""

    used: int  # tokens that are not padding
    cuts: I64  # columns at which another document begins
    begun: int = 0  # documents whose first token stands in the row; of `ConcatLane`


class Lane(Protocol):
    """An endless list of rows."""

    tally: Tally
    last: At  # the unit that was read last

    def row(self, out: Out) -> Drawn | None:
        """Fill the next row; None where a pass over the documents ends first."""

    def mark(self) -> Any:
        """What `address` needs to tell later where the lane is now."""

    def address(self, mark: Any = None) -> list[Any]:
        """From where the next row can be made again, or that after the latest mark."""


class _Blocks:
    """A lane's blocks, made ahead: small ones in groups."""

    def __init__(self, lane: int, source: Source, ahead: Ahead, at: At, part: int) -> None:
        self._lane, self._ahead, self._most = lane, ahead, source.group
        self._least = 1  # tokens of a group: the first row waits for one block, not for many
        self._feed = Feed(lane, source, at, part)
        self._made: deque[Block | Exception] = deque()
        self._asked = False

    def ask(self, when: int) -> None:
        """Have the next ones made, where they are not yet, which will be needed at row `when`."""
        if not self._asked:
            # Of the feed alone: threads that held more would keep a forgotten stream alive.
            make = partial(_group, self._feed, self._least)
            self._ahead.want(self._lane, when=when, make=make)
            self._asked = True

    def take(self) -> Block:
        """The next block, of those that were asked for."""
        if not self._made:
            self.ask(NOW)
            self._made.extend(self._ahead.take(self._lane))
            self._asked = False
            self._least = min(4 * self._least + 1024, self._most)
        block = self._made.popleft()
        if isinstance(block, Exception):
            raise block
        return block


def _group(feed: Feed, least: int) -> list[Block | Exception]:
    """The next blocks, of so many tokens or more; last an error, which comes after them."""
    made: list[Block | Exception] = []
    size = 0
    while size < least:
        try:
            block = feed.next()
        except Exception as error:  # noqa: BLE001 - raised when those before it are used up
            made.append(error)
            break
        made.append(block)
        size += len(block.ids)
        if not len(block.ids):
            break  # an epoch's beginning; a lane of empty units alone would meet nothing else
    return made


@dataclass(slots=True)
class Seat:
    """What a lane is given: its number, what it reads, and when its rows are due."""

    lane: int
    source: Source
    ahead: Ahead
    tally: Tally
    turn: int  # the row of the stream that its next one is
    every: int  # from one of its rows to the next: the number of lanes


class ChunkLane:
    """Rows of closed chunks: the address is [epoch, unit, row]."""

    def __init__(self, seat: Seat, address: Sequence[int]) -> None:
        epoch, number, self._part, self._next = address
        self._at = self.last = epoch, number
        self.tally, self._turn, self._every = seat.tally, seat.turn, seat.every
        self._blocks = _Blocks(seat.lane, seat.source, seat.ahead, self._at, self._part)
        self._rows: Rows | None = None
        self._blocks.ask(self._turn)

    def row(self, out: Out) -> Drawn:
        """The next row of the open chunk, or the first of the next one."""
        rows = self._rows or self._opened()
        at = self._next
        out[:] = rows.tokens[at]
        used, cuts = rows.used[at], rows.cuts_of(at)
        tally = self.tally
        tally.rows += 1
        tally.delivered += used
        tally.padding += len(out) - used
        self._next = at + 1
        self._turn += self._every
        if self._next == len(rows):
            self._rows, self._part, self._next = None, self._part + 1, 0
        return Drawn(used, cuts)

    def _opened(self) -> Rows:
        block = self._blocks.take()
        rows: Rows = block.made
        self.last = block.at
        self._at, self._part = _met(block, self._at, self._part, self._next, len(rows), "row")
        self._rows = rows
        self._blocks.ask(self._turn + (len(rows) - self._next) * self._every)
        self.tally.documents += 0 if self._next else len(block)
        self.tally.tokens += sum(rows.used[self._next :])
        return rows

    def mark(self) -> Any:
        """The address."""
        return self.address()

    def address(self, mark: Any = None) -> list[Any]:
        """[epoch, unit, row], or [epoch, unit, chunk, row] from a unit's second chunk on."""
        return mark or _written(self._at, self._part, self._next)


class ConcatLane:
    """One run of all documents' tokens, cut into rows: the address is [epoch, unit, token].

    With `overlap` the next row begins with the last token of this one. In a `pass_` (an epoch) the
    row with its last tokens is padded, and then there are none; without, rows go on for ever.
    """

    def __init__(
        self, seat: Seat, address: Sequence[int], *, width: int, overlap: int, pad: int
    ) -> None:
        epoch, number, self._part, self._next = address
        self._at = epoch, number
        self.tally, self._turn, self._every = seat.tally, seat.turn, seat.every
        self._width, self._overlap, self._pad = width, overlap, pad
        self._blocks = _Blocks(seat.lane, seat.source, seat.ahead, self._at, self._part)
        self._held: deque[Block] = deque()  # the first is open; `_next` counts in it
        self.pass_: int | None = None
        self.last = self._at  # the unit that was read last

    @property
    def epoch(self) -> int:
        """The epoch of the next row's first token, as far as is known without reading."""
        return self._at[0]

    def row(self, out: Out) -> Drawn | None:
        """The next row; None where the pass has no more."""
        if self.ended():
            return None
        self._hold(self._width)
        used, begins = self._fill(out)
        if not used:
            return None
        tally = self.tally
        tally.rows += 1
        repeated = self._overlap if used == len(out) else 0
        tally.delivered += used - repeated
        tally.repeated += repeated
        tally.padding += len(out) - used
        out[used:] = self._pad
        self._advance(used - repeated)
        self._turn += self._every
        return Drawn(used, begins[begins > 0], len(begins))

    def ended(self) -> bool:
        """Whether the pass has no more tokens here."""
        if self.pass_ is None:
            return False
        if self._at[0] <= self.pass_:
            self._hold(1)
        return self._at[0] > self.pass_

    def _hold(self, count: int) -> None:
        """Take blocks until there are so many tokens, or the pass ends."""
        while self._left() < count and not self._past():
            block = self._blocks.take()
            self._blocks.ask(self._turn + self._every * (len(block.ids) // self._width))
            if not self._left():  # at most the beginning of an epoch, which had no token
                self._held.clear()
            first = 0 if self._held else self._next
            if not self._held:
                self._at, self._part = _met(
                    block, self._at, self._part, first, len(block.ids), "token"
                )
            self.tally.tokens += len(block.ids) - first
            self._held.append(block)
            self.last = block.at

    def _left(self) -> int:
        return sum(len(block.ids) for block in self._held) - (self._next if self._held else 0)

    def _past(self) -> bool:
        """Whether what is held reaches into a later pass."""
        return self.pass_ is not None and bool(self._held) and self._held[-1].at[0] > self.pass_

    def _fill(self, out: Out) -> tuple[int, I64]:
        used, begin, begins = 0, self._next, [NO_CUTS]
        for block in self._held:
            if self.pass_ is not None and block.at[0] > self.pass_:
                break
            count = min(len(block.ids) - begin, len(out) - used)
            out[used : used + count] = block.ids[begin : begin + count]
            lo, hi = np.searchsorted(block.offsets, [begin, begin + count])
            begins.append(block.offsets[lo:hi] - begin + used)
            used += count
            begin = 0
            if used == len(out):
                break
        found: I64 = np.unique(np.concatenate(begins))
        return used, found[found < used]

    def _advance(self, count: int) -> None:
        if not self._next:
            self.tally.documents += len(self._held[0])
        self._next += count
        while self._held and self._next >= len(self._held[0].ids):
            gone = self._held.popleft()
            self._next -= len(gone.ids)
            if self._held:
                self._at, self._part = self._held[0].at, self._held[0].part
                self.tally.documents += len(self._held[0]) if self._next else 0
            elif len(gone.ids):  # not an epoch's beginning
                self._part += 1

    def mark(self) -> Any:
        """The address."""
        return self.address()

    def address(self, mark: Any = None) -> list[Any]:
        """[epoch, unit, token], or [epoch, unit, chunk, token] from a unit's second chunk on."""
        return mark or _written(self._at, self._part, self._next)


class CropLane:
    """nanochat's rows: a buffer of waiting documents, of which the longest that fits comes next.

    The address is [[epoch, unit, batch], waiting]: what is read next, and of each batch that
    documents of are waiting [epoch, unit, batch, document, document, ...], in order of arrival.
    """

    def __init__(self, seat: Seat, address: Sequence[Any], *, capacity: int, least: int) -> None:
        (epoch, number, self._part), waiting = address
        self._at = epoch, number
        self.tally, self._turn, self._every = seat.tally, seat.turn, seat.every
        self._source = seat.source
        self._blocks = _Blocks(seat.lane, seat.source, seat.ahead, self._at, self._part)
        self._blocks.ask(self._turn)
        self._buffer = CropBuffer(capacity, least, self._refill)
        self._ids: dict[int, npt.NDArray[np.uint32]] = {}  # of those that wait
        self._firsts: list[int] = []  # of each batch, the number of its first document
        self._batches: list[tuple[int, int, int]] = []  # of each batch (epoch, unit, batch)
        self._gone: list[int] = []  # documents that no longer wait, since the latest mark
        self._kept, self._tidy = 0, 0  # batches, documents when what is let go was last let go
        self.last = self._at  # the unit that was read last
        self._restore(waiting)

    def row(self, out: Out) -> Drawn:
        """The next row, which is always full."""
        ids, tally, at = self._ids, self.tally, 0
        cuts = []
        for document, count in self._buffer.row():
            self._gone.append(document)
            tokens = ids.pop(document)
            if count < len(tokens):
                tally.cropped += len(tokens) - count
                tokens = tokens[:count]
            out[at : at + count] = tokens
            at += count
            cuts.append(at)
        assert at == len(out), "a stream has no end"
        tally.rows += 1
        tally.delivered += at
        self._turn += self._every
        return Drawn(at, np.array(cuts[:-1], np.int64))

    def _refill(self) -> list[int]:
        block = self._blocks.take()
        self._blocks.ask(self._turn)
        self.last = self._at = block.at
        self._part = block.part + 1
        self.tally.documents += len(block)
        return self._come(block, self._buffer.next_document, range(len(block)))

    def _come(self, block: Block, first: int, documents: Sequence[int]) -> list[int]:
        """Take in a batch of which these documents are there; their lengths."""
        self._firsts.append(first)
        self._batches.append((*block.at, block.part))
        ends = block.offsets.tolist()
        lengths = []
        for i, document in enumerate(documents):
            length = ends[i + 1] - ends[i]
            lengths.append(length)
            if length:
                self._ids[first + document] = block.ids[ends[i] : ends[i + 1]]
        self.tally.tokens += ends[-1] - ends[0]
        return lengths

    def mark(self) -> Any:
        """What is read next, and the number of the first document that has not come."""
        if len(self._firsts) > self._kept + TIDIED:
            self._let_go()
        self._gone = []
        return self._at, self._part, self._buffer.next_document

    def _let_go(self) -> None:
        """Forget batches of which nothing waits, and let the few that wait hold no whole batch."""
        kept = [g for g, _ in self._waiting(sorted(self._ids))]
        self._firsts = [self._firsts[g] for g in kept]
        self._batches = [self._batches[g] for g in kept]
        for document in [each for each in self._ids if each >= self._tidy]:
            self._ids[document] = self._ids[document].copy()
        self._kept, self._tidy = len(kept), self._buffer.next_document

    def _waiting(self, documents: list[int]) -> list[tuple[int, list[int]]]:
        """Of each batch that some of these are of: which batch, and which of its documents."""
        if not documents:
            return []
        numbers = np.array(documents)
        firsts = np.array(self._firsts)
        batch = firsts.searchsorted(numbers, side="right") - 1
        starts = np.flatnonzero(np.diff(batch, prepend=-1))
        which, inside = batch[starts].tolist(), (numbers - firsts[batch]).tolist()
        stops = [*starts[1:].tolist(), len(inside)]
        return [(g, inside[lo:hi]) for g, lo, hi in zip(which, starts.tolist(), stops, strict=True)]

    def address(self, mark: Any = None) -> list[Any]:
        """What is read next, and what waits."""
        at, part, documents = self._at, self._part, sorted(self._ids)
        if mark is not None:
            at, part, following = mark
            documents = sorted(n for n in {*self._ids, *self._gone} if n < following)
        waiting = [[*self._batches[g], *some] for g, some in self._waiting(documents)]
        return [[*at, part], waiting]

    def _restore(self, waiting: Sequence[Sequence[int]]) -> None:
        """Read again those documents that waited."""
        reading: tuple[At, Any] | None = None
        first, lengths = 0, []
        for epoch, number, part, *documents in waiting:
            at = epoch, number
            if reading is None or reading[0] != at:
                reading = at, self._source.read(at)
            docs = next((docs for found, docs in reading[1] if found == part), None)
            if docs is None or documents[-1] >= len(docs):
                raise StateMismatch(
                    f"this state waits for documents that unit {number} has not: it was saved over "
                    "other data"
                )
            block = self._source.block(at, part, docs.some(documents))
            sizes = self._come(block, first, documents)
            lengths += [(first + document, n) for document, n in zip(documents, sizes, strict=True)]
            first += documents[-1] + 1
        self._buffer.restore(first, lengths)


def _met(block: Block, at: At, part: int, place: int, count: int, what: str) -> tuple[At, int]:
    """Where a lane is when a block comes: in the middle of it only where its address says so."""
    if place and ((block.at, block.part) != (at, part) or place >= count):
        raise StateMismatch(
            f"this state is at {what} {place} of chunk {part} of unit {at[1]} in epoch {at[0]}, "
            "where there is none: it was saved over other data"
        )
    return block.at, block.part


def read_crop_address(lane: int, address: Any) -> list[Any]:
    """The address of a `CropLane`, checked."""
    try:
        following, waiting = address
        at, groups = _whole(following), [_whole(group) for group in waiting]
        good = len(at) == 3 and all(len(g) > 3 and g[3:] == sorted(set(g[3:])) for g in groups)
    except (TypeError, ValueError):
        good = False
    if not good:
        raise _no_address(lane, address, "[[epoch, unit, batch], waiting]")
    return [at, groups]


def read_address(lane: int, address: Any) -> list[int]:
    """An address [epoch, unit, place], or one with a part before the place, as four numbers."""
    try:
        found = _whole(address)
    except (TypeError, ValueError):
        found = []
    if len(found) not in (3, 4):
        raise _no_address(lane, address, "[epoch, unit, place]")
    return found if len(found) == 4 else [found[0], found[1], 0, found[2]]


def _whole(numbers: Any) -> list[int]:
    """A list of whole numbers from 0 on, or ValueError."""
    found = list(numbers)
    if not all(type(each) is int and 0 <= each < 1 << 62 for each in found):
        raise ValueError
    return found


def _no_address(lane: int, address: Any, wanted: str) -> StateMismatch:
    return StateMismatch(
        f"this is not a state of a stream: lane {lane} is at {str(address)[:60]}, where {wanted} "
        "was expected. Pass what state_dict() gave, from a whole checkpoint"
    )


def _written(at: At, part: int, place: int) -> list[int]:
    return [*at, part, place] if part else [*at, place]
