"""A rank's share of a stream: its lanes, and the row at which its next batch begins.

Row g of the stream is lane g mod L's next one. A rank that begins at row g0 takes every W-th row
from g0 + rank on, and so owns the lanes with (lane − g0) mod W = rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, StateMismatch
from penstock.stream.ahead import Ahead
from penstock.stream.deal import At, Turns
from penstock.stream.feed import Source
from penstock.stream.lanes import (
    ChunkLane,
    ConcatLane,
    CropLane,
    Drawn,
    Lane,
    Seat,
    Tally,
    read_address,
    read_crop_address,
)

LANES = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How rows are made, as far as a lane has to know."""

    name: str  # "chunked" | "concat" | "best_fit_crop"
    width: int  # tokens of a row
    pad: int = 0
    overlap: int = 0  # of concat
    buffer_size: int = 1000  # of best_fit_crop

    def lane(self, seat: Seat, address: list[Any]) -> Lane:
        """A lane from an address on."""
        address = self.read(seat.lane, address)
        match self.name:
            case "chunked":
                return ChunkLane(seat, address)
            case "concat":
                return ConcatLane(
                    seat, address, width=self.width, overlap=self.overlap, pad=self.pad
                )
        return CropLane(seat, address, capacity=self.width, least=self.buffer_size)

    def begin(self, at: At) -> list[Any]:
        """The address of the first row that begins in a unit."""
        return [[*at, 0], []] if self.name == "best_fit_crop" else [*at, 0]

    def read(self, lane: int, address: Any) -> list[Any]:
        """An address from a state, checked."""
        if self.name == "best_fit_crop":
            return read_crop_address(lane, address)
        return read_address(lane, address)

    def units(self, address: list[Any]) -> list[At]:
        """Where in the deal an address that was read is, and what it waits for is from."""
        if self.name == "best_fit_crop":
            following, waiting = address
            return [(each[0], each[1]) for each in (following, *waiting)]
        return [(address[0], address[1])]


def check_world(lanes: int, world: int) -> None:
    """Refuse a number of ranks that cannot have the same number of lanes each."""
    if lanes % world:
        sizes = [n for n in range(1, lanes + 1) if lanes % n == 0]
        shown = ", ".join(map(str, sizes[:24])) + (", …" if len(sizes) > 24 else "")
        raise ConfigError(
            f"{lanes} lanes cannot be dealt evenly to {world} ranks: run {shown} ranks, or begin "
            f"anew with a number of lanes that {world} divides"
        )


class Share:
    """The lanes of one rank, made when the first row is drawn."""

    def __init__(
        self,
        source: Callable[[], Source],
        policy: Policy,
        *,
        lanes: int,
        rank: int,
        world: int,
        threads: int,
    ) -> None:
        check_world(lanes, world)
        self._open, self._policy, self._threads = source, policy, threads
        self.lanes, self.rank, self.world = lanes, rank, world
        self.part = (0, 1)  # of this rank's lanes: which of how many workers' they are
        self.row = 0  # of the stream, at which the next batch begins
        self.tally = Tally()
        self._addresses: dict[int, list[Any]] | None = None
        self._lanes: dict[int, Lane] = {}
        self._turn = rank  # the row of the stream that is this rank's next one
        self._source: Source | None = None
        self._ahead: Ahead | None = None
        self._live: dict[int, ConcatLane] = {}  # of a pass, with rows to come
        self._pass: tuple[int, dict[int, Lane]] | None = None  # which, and of which lanes
        self._before = 0, Tally()  # the row and the tally before the latest draw
        self._marks: dict[int, Any] = {}  # of each lane that it drew from

    @property
    def source(self) -> Source:
        """What is read, opened when it is first asked for."""
        if self._source is None:
            self._source = self._open()
        return self._source

    def own(self) -> list[int]:
        """This rank's lanes (or a worker's part of them), in the order of their turns."""
        return self._own(self.row)

    def _own(self, row: int) -> list[int]:
        first = row + self.rank
        worker, workers = self.part
        mine = range(first % self.world, self.lanes, self.world)[worker::workers]
        return sorted(mine, key=lambda lane: (lane - first) % self.lanes)

    def load(self, row: int, addresses: Mapping[int, Any]) -> None:
        """Go on at a row, each lane at its address."""
        own = sorted(self._own(row))
        missing = [lane for lane in own if lane not in addresses]
        if missing:
            raise StateMismatch(
                f"this state has no address of {_some(missing)}: rank {self.rank} of {self.world} "
                "needs them; join the states of all ranks with merge_states, and load that"
            )
        for lane in own:
            for at in self._policy.units(self._policy.read(lane, addresses[lane])):
                if not self.source.deal.has(lane, at):
                    raise StateMismatch(
                        f"this state has lane {lane} at unit {at[1]} of epoch {at[0]}, which is "
                        "none of that lane's: it is damaged, or was saved over other data"
                    )
        self.rest()
        self.row = row
        self._addresses = deepcopy({lane: addresses[lane] for lane in own})
        self.tally = Tally()

    def begin_epoch(self, epoch: int) -> None:
        """Have every lane begin an epoch; of streams whose units are dealt in turn."""
        deal = self.source.deal
        assert isinstance(deal, Turns)
        self.rest()
        self._addresses = {
            lane: self._policy.begin(deal.in_epoch(lane, epoch)) for lane in sorted(self.own())
        }

    def divide(self, worker: int, workers: int) -> None:
        """Keep one worker's part of the lanes, each from where it is."""
        addresses = self.addresses()
        self.rest()
        self.part = worker, workers
        self._addresses = {lane: addresses[lane] for lane in sorted(self.own())}

    def rest(self) -> None:
        """Let go of threads and of what waits; the next row is made from addresses."""
        if self._lanes:
            self._let_go(self.addresses())

    def undo(self) -> None:
        """Take the latest draw back: its rows come again."""
        marks = self._marks
        addresses = {lane: found.address(marks.get(lane)) for lane, found in self._lanes.items()}
        if not self._lanes:  # at rest since something failed: of lanes whose marks are addresses
            addresses = self.addresses() | marks
        self.row, self.tally = self._before
        self._let_go(addresses)

    def _let_go(self, addresses: dict[int, list[Any]]) -> None:
        self._addresses, self._lanes = addresses, {}
        self.tally.tokens = self.tally.delivered + self.tally.cropped  # what waited comes in again
        if self._ahead is not None and self._ahead.alive:
            self._ahead.close()
        self._ahead = None

    def addresses(self) -> dict[int, list[Any]]:
        """Of each of this rank's lanes the address of its next row."""
        if self._lanes:
            return {lane: found.address() for lane, found in sorted(self._lanes.items())}
        if self._addresses is not None:
            return deepcopy(self._addresses)
        deal = self.source.deal
        return {lane: self._policy.begin(deal.first(lane)) for lane in sorted(self.own())}

    def last_read(self) -> At:
        """The unit that was read last by the lane of the row last drawn."""
        lane = (self._turn - self.world) % self.lanes
        if lane in self._lanes:
            return self._lanes[lane].last
        return self.source.deal.first(self.own()[0])

    def draw(self, count: int, dtype: npt.DTypeLike) -> tuple[npt.NDArray[Any], list[Drawn]]:
        """This rank's next `count` rows: (count, width) tokens, and what is known of each."""
        self.started()
        tokens = np.empty((count, self._policy.width), dtype)
        drawn = []
        self.begin()
        for out in tokens:
            found = self._row(self._turn % self.lanes, out)
            assert found is not None, "only a pass ends"
            drawn.append(found)
            self._turn += self.world
        self.row += count * self.world
        return tokens, drawn

    def begin(self) -> None:
        """Begin a draw: what `undo` takes back is what is drawn from here on."""
        self._before, self._marks = (self.row, replace(self.tally)), {}

    def _row(self, number: int, out: npt.NDArray[Any]) -> Drawn | None:
        """A lane's next row. A failure takes the whole draw back, so that another try is one."""
        lane = self._lanes[number]
        try:
            if number not in self._marks:
                self._marks[number] = lane.mark()
            return lane.row(out)
        except BaseException:
            self.undo()
            raise

    # --- passes, of `ConcatLane`s alone

    def row_of(self, epoch: int, dtype: npt.DTypeLike) -> tuple[npt.NDArray[Any], Drawn] | None:
        """The next row of an epoch; None where all documents of it that are this rank's were read.

        Lanes have their turns though some have ended, so that ranks keep their lanes whatever the
        others do.
        """
        if not self.has_more(epoch):
            return None
        out = np.empty(self._policy.width, dtype)
        try:
            drawn = self._living(epoch)[self._turn % self.lanes].row(out)
        except BaseException:
            self.rest()  # so that another try is one
            raise
        assert drawn is not None
        self._pass_turn(self._turn + self.world)
        return out, drawn

    def has_more(self, epoch: int) -> bool:
        """Whether there is one more row of an epoch; it is the next lane's that has one."""
        live = self._living(epoch)
        begin = self._turn
        try:
            while live:
                lane = self._turn % self.lanes
                if lane in live:
                    self._marks.setdefault(lane, live[lane].mark())
                    if not live[lane].ended():
                        return True
                live.pop(lane, None)
                self._pass_turn(self._turn + self.world)
        except BaseException:
            self._pass_turn(begin)
            self.rest()
            raise
        self._pass_turn(begin)  # the next epoch's first row comes after this one's last
        return False

    def _living(self, epoch: int) -> dict[int, ConcatLane]:
        """The lanes that are not known to have ended an epoch."""
        lanes = self.started()
        if self._pass != (epoch, lanes):
            self._pass, self._live = (epoch, lanes), {}
            for number, lane in lanes.items():
                assert isinstance(lane, ConcatLane)
                lane.pass_ = epoch
                self._live[number] = lane
            self._align(epoch)
        return self._live

    def _align(self, epoch: int) -> None:
        """Begin an epoch with the lane of its first unit, or this rank's next one after that.

        So the order of its rows is the same whenever the epochs before it ended.
        """
        deal = self.source.deal
        assert isinstance(deal, Turns)
        if all(
            lane.address() == self._policy.begin(deal.in_epoch(number, epoch))
            for number, lane in self._live.items()
        ):
            first = epoch * deal.units
            ahead = (self._turn - first) % self.world
            self._pass_turn(self._turn + (first + ahead - self._turn) % self.lanes)

    def _pass_turn(self, turn: int) -> None:
        self.row += turn - self._turn
        self._turn = turn

    # --- lanes

    def started(self) -> dict[int, Lane]:
        """The lanes, at work: anew in a forked child, which has none of its parent's threads."""
        if self._ahead is not None and self._ahead.forked:
            self.rest()
            self._source = None  # a thread of the parent may hold one of its locks
        if not self._lanes:
            self._turn = self.row + self.rank
            ahead = Ahead(self._threads, self._threads + 2)
            try:
                self._lanes = self._made(ahead)
            except BaseException:
                ahead.close()
                raise
            self._ahead = ahead
        return self._lanes

    def _made(self, ahead: Ahead) -> dict[int, Lane]:
        addresses, lanes = self.addresses(), {}
        for lane in self.own():
            seat = Seat(
                lane=lane,
                source=self.source,
                ahead=ahead,
                tally=self.tally,
                turn=self._turn + (lane - self._turn) % self.lanes,
                every=self.lanes,
            )
            lanes[lane] = self._policy.lane(seat, addresses[lane])
        return lanes


def _some(lanes: list[int]) -> str:
    shown = ", ".join(map(str, lanes[:8]))
    more = f" and {len(lanes) - 8} more" if len(lanes) > 8 else ""
    return f"lane{'s' if len(lanes) > 1 else ''} {shown}{more}"
