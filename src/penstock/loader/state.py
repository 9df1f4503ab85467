"""Checkpoints: what a state says, and whether it belongs to this run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from json import dumps
from numbers import Integral
from typing import Any

import torch.distributed as dist

from penstock.errors import ConfigError, StateMismatch
from penstock.order import Segment, Stage
from penstock.order.identity import ABSENT, short

VERSION = 1
_END = 1 << 62  # of any axis that int64 can count


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A state that has been read: where to go on, what was lived, and what it belongs to."""

    position: int
    segments: tuple[Segment, ...]
    stages: tuple[Stage, ...]
    identity: Mapping[str, Any] = field(default_factory=dict)
    pending: tuple[int, ...] | None = None  # weights for the iteration after the one under way
    under_way: bool = False


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


def read_state(state: Any) -> Address | Documented:
    """A state as it was saved, or an error that says where it is not one.

    >>> read_state({"version": 1, "identity": {}, "position": -8})
    Traceback (most recent call last):
    penstock.errors.StateMismatch: this is not a state of a StatefulDataLoader: position is -8, ...
    """
    _require(isinstance(state, Mapping), "it", state, "a dict")
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
    _require(len(known - {0}) <= 1, "stages", state["stages"], "as many weights in each")
    return Address(
        position=position,
        segments=segments,
        stages=stages,
        identity=identity,
        pending=pending,
        under_way=state.get("under_way") is True,
    )


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
