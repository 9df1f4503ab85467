"""Checkpoints: what a state says, and whether it belongs to this run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from json import dumps
from numbers import Integral
from typing import Any, NamedTuple

import torch.distributed as dist

from penstock.errors import ConfigError, StateMismatch
from penstock.order import Plan, Segment, Stage
from penstock.order.identity import ABSENT, short
from penstock.order.plan import Tail

VERSION = 2
_END = 1 << 62  # of any axis that int64 can count


class Excluded(NamedTuple):
    """Documents [first, end) of a source, masked from a position on."""

    first: int
    end: int
    since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surgery:
    """What was changed in a run under way, and goes with it from state to state."""

    retired: Mapping[str, Any] = field(default_factory=dict)  # identities of sources that are gone
    skipped: tuple[tuple[int, int], ...] = ()  # ranges of positions, in order and apart
    excluded: Mapping[str, tuple[Excluded, ...]] = field(default_factory=dict)  # by source
    since: int = 0  # the position from which on the mixture is the one in the identity

    def excluded_at(self, position: int) -> dict[str, list[tuple[int, int]]]:
        """The documents that are masked at a position, as ranges by source."""
        found = {
            name: [(each.first, each.end) for each in ranges if each.since <= position]
            for name, ranges in self.excluded.items()
            if name not in self.retired
        }
        return {name: ranges for name, ranges in found.items() if ranges}

    def excluded_state(self) -> dict[str, Any]:
        """What the identity says of them; nothing where there are none."""
        ranges = {name: [list(each) for each in of] for name, of in self.excluded.items()}
        return {"excluded": ranges} if ranges else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A state that has been read: where to go on, what was lived, and what it belongs to."""

    position: int
    segments: tuple[Segment, ...]
    stages: tuple[Stage, ...]
    sources: tuple[str, ...] = ()  # of a mixture: all there ever were, as the stages' weights
    identity: Mapping[str, Any] = field(default_factory=dict)
    pending: tuple[int, ...] | None = None  # weights for the iteration after the one under way
    under_way: bool = False
    surgery: Surgery = field(default_factory=Surgery)
    tail: Tail = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """A state of the documented keys only."""

    epoch: int
    batches_yielded: int
    num_replicas: int | None
    seed: int | None


def stages_to_state(stages: Sequence[Stage]) -> list[list[Any]]:
    """Stages as lists: [position, weights, the step of the declared phase or None]."""
    return [[stage.position, list(stage.weights), stage.start_step] for stage in stages]


def state_of(address: Address, plan: Plan, local: Mapping[str, Any]) -> dict[str, Any]:
    """The state that an address is, with the documented keys; `local` is the sampler's own."""
    at, surgery = address.position, address.surgery
    epoch, segment = plan.epoch(at), plan.segment(at)
    state: dict[str, Any] = {
        "version": VERSION,
        "epoch": epoch,
        "batches_yielded": (at - epoch * plan.n) // segment.size,
        "sampler": {"epoch": epoch} | dict(local),
        "position": at,
        "step": plan.step_at(at),
        "segments": [[s.position, s.size, s.accumulation] for s in address.segments],
        "stages": stages_to_state(address.stages),
        "identity": dict(address.identity) | surgery.excluded_state(),
    }
    if address.sources:
        state["sources"] = list(address.sources)
    if address.pending:
        state |= {"pending": list(address.pending), "under_way": address.under_way}
    if surgery.retired:
        state["retired"] = dict(surgery.retired)
    if surgery.skipped:
        state["skipped"] = [list(each) for each in surgery.skipped]
    if surgery.since:
        state["since"] = surgery.since
    if address.tail == "pad":
        state["tail"] = "pad"
    return state


def read_state(state: Any) -> Address | Documented:
    """A state as it was saved, or an error that says where it is not one.

    >>> read_state({"version": 1, "identity": {}, "position": -8})
    Traceback (most recent call last):
    penstock.errors.StateMismatch: this is not a state of a StatefulDataLoader: position is -8, ...
    """
    _require(isinstance(state, Mapping), "it", state, "a dict")
    if "lanes" in state or "pq_idx" in state:
        raise StateMismatch(
            "this is the state of a stream: load it onto the stream it is of; what a "
            "StatefulDataLoader over stores reads has a position"
        )
    version = _whole(state.get("version", ABSENT if "position" in state else 0), "version")
    if version > VERSION:
        raise StateMismatch(
            f"this state has version {version}, and this Penstock reads up to {VERSION}: load it "
            "with the release that wrote it, or a newer one"
        )
    if "position" not in state:
        return _documented(state)
    position = _whole(state["position"], "position")
    identity = state.get("identity", ABSENT)
    _require(isinstance(identity, Mapping), "identity", identity, "a dict")
    surgery = _surgery(state, position)
    sources = _sources(state)
    try:
        segments = tuple(_segment(row) for row in _rows(state, "segments"))
        stages = tuple(_stage(row) for row in _rows(state, "stages"))
        pending = None
        if state.get("pending") is not None:
            pending = _stage([position, state["pending"], None]).weights
    except ConfigError as error:  # numbers that no stage can have
        raise StateMismatch(f"this is not a state of a StatefulDataLoader: {error}") from None
    starts = [*(segment.position for segment in segments), position]
    rising = all(a < b for a, b in pairwise(starts))
    _require(rising, "segments", starts, "a list that rises to the position")
    known = {len(weights) for weights in (*(stage.weights for stage in stages), pending or ())}
    known |= {len(sources)} if stages else set()
    _require(len(known - {0}) <= 1, "stages", state["stages"], "as many weights in each")
    return Address(
        position=position,
        segments=segments,
        stages=stages,
        sources=sources,
        identity={name: value for name, value in identity.items() if name != "excluded"},
        pending=pending,
        under_way=state.get("under_way") is True,
        surgery=surgery,
        tail="pad" if state.get("tail") == "pad" else "endless" if sources else "drop",
    )


def _sources(state: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that stages have weights for: in version 1 those of the identity's mixture."""
    mixture = state["identity"].get("mixture")
    if mixture is None:
        return ()
    _require(isinstance(mixture, Mapping), "identity.mixture", mixture, "a dict")
    names = state.get("sources", mixture.get("names", ABSENT))
    ok = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    _require(ok and len(set(names)) == len(names) > 0, "sources", names, "a list of names")
    return tuple(names)


def _surgery(state: Mapping[str, Any], position: int) -> Surgery:
    retired = state.get("retired", {})
    ok = isinstance(retired, Mapping) and all(isinstance(v, Mapping) for v in retired.values())
    _require(ok, "retired", retired, "a dict of dicts")
    since = _whole(state.get("since", 0), "since")
    _require(since <= position, "since", since, "a position that has been reached")
    excluded = state["identity"].get("excluded", {})
    _require(isinstance(excluded, Mapping), "identity.excluded", excluded, "a dict")
    skipped = _ranges(state.get("skipped", []), "skipped", 2)
    return Surgery(
        retired=retired,
        skipped=tuple((begin, end) for begin, end in skipped),
        excluded={
            name: tuple(Excluded(*row) for row in _ranges(rows, f"identity.excluded.{name}", 3))
            for name, rows in excluded.items()
        },
        since=since,
    )


def _ranges(rows: Any, name: str, length: int) -> list[tuple[int, ...]]:
    """Rows that begin with a range each, in order and apart."""
    what = f"a list of lists of {length}"
    _require(isinstance(rows, list | tuple), name, rows, what)
    for row in rows:
        _require(isinstance(row, list | tuple) and len(row) == length, name, rows, what)
    found = [tuple(_whole(value, name) for value in row) for row in rows]
    edges = [edge for row in found for edge in row[:2]]
    rising = all(row[0] < row[1] for row in found) and edges == sorted(edges)
    _require(rising, name, rows, "ranges in order")
    return found


def _documented(state: Mapping[str, Any]) -> Documented:
    sampler = state.get("sampler", {})
    _require(isinstance(sampler, Mapping), "sampler", sampler, "a dict")
    ranks, seed = sampler.get("num_replicas"), sampler.get("seed")
    return Documented(
        epoch=_whole(state.get("epoch", ABSENT), "epoch"),
        batches_yielded=_whole(state.get("batches_yielded", ABSENT), "batches_yielded"),
        num_replicas=None if ranks is None else _whole(ranks, "sampler.num_replicas", least=1),
        seed=seed,
    )


def _rows(state: Mapping[str, Any], name: str) -> Sequence[Any]:
    rows = state.get(name, ABSENT)
    ok = isinstance(rows, list | tuple) and all(isinstance(r, list | tuple) for r in rows)
    _require(ok and all(len(r) == 3 for r in rows), name, rows, "a list of lists of three")
    return rows  # type: ignore[no-any-return] # a list or a tuple, as just checked


def _segment(row: Sequence[Any]) -> Segment:
    return Segment(
        _whole(row[0], "a segment's position"),
        _whole(row[1], "a segment's batch size", least=1),
        _whole(row[2], "a segment's accumulation", least=1),
    )


def _stage(row: Sequence[Any]) -> Stage:
    weights = row[1]
    _require(
        isinstance(weights, list | tuple) and len(weights) > 0,
        "a stage's weights",
        weights,
        "a list",
    )
    return Stage(
        _whole(row[0], "a stage's position"),
        tuple(_whole(weight, "a stage's weight") for weight in weights),
        None if row[2] is None else _whole(row[2], "a stage's step"),
    )


def _whole(value: Any, name: str, *, least: int = 0) -> int:
    number = int(value) if isinstance(value, Integral) and value is not True else -1
    ok = least <= number < _END and value is not False
    _require(ok, name, value, f"a whole number from {least} on")
    return number


def _require(ok: bool, name: str, value: Any, wanted: str) -> None:
    if not ok:
        raise StateMismatch(
            f"this is not a state of a StatefulDataLoader: {name} is {short(value)}, where "
            f"{wanted} was expected. Pass what state_dict() gave, from a whole checkpoint"
        )


def digest(position: int, identity: Mapping[str, Any]) -> str:
    """Sixteen hex digits of a position and an identity.

    >>> digest(0, {}) == digest(0, {}), digest(0, {}) == digest(1, {})
    (True, False)
    """
    text = dumps([position, identity], sort_keys=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def check_ranks(position: int, identity: Mapping[str, Any]) -> None:
    """Compare positions and identities over torch.distributed; refuse, naming ranks that differ."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (position, digest(position, identity)))
    digests = [each for _, each in everyone]
    common = max(digests, key=lambda each: (digests.count(each), -digests.index(each)))
    odd = {rank: at for rank, (at, each) in enumerate(everyone) if each != common}
    if odd:
        at = everyone[digests.index(common)][0]
        raise StateMismatch(
            f"ranks have gone apart: {', '.join(f'rank {r} is at {p}' for r, p in odd.items())}, "
            f"the others at position {at}; where these agree, the data or settings differ. "
            "Load the same state on every rank, over the same data"
        )
