"""The state of a stream: each lane's address, and how the ranks' states become one.

    {"version": 1, "row": 480, "step": 30, "lanes": {"0": [0, 0, 2], …}, "identity": {…}}

A rank knows its own lanes. `merge_states` joins the states that all ranks saved after the same
batch; what it gives loads at any number of ranks that divides the lanes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError, StateMismatch
from penstock.order.identity import check_identity, short

VERSION = 1
LOCAL = ("rank", "world_size", "rank_docs_consumed")
_DECIMAL = re.compile("[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Saved:
    """A state that has been read."""

    row: int
    step: int
    lanes: dict[int, Any]
    identity: Mapping[str, Any]


def read_stream_state(state: Any) -> Saved:
    """A state as it was saved, or an error that says where it is not one.

    >>> read_stream_state({"version": 1, "row": -1})
    Traceback (most recent call last):
    penstock.errors.StateMismatch: this is not a state of a stream: row is -1, ...
    """
    _require(isinstance(state, Mapping), "it", state, "a dict")
    version = state.get("version")
    _require(_whole(version), "version", version, "a number")
    if version > VERSION:
        raise StateMismatch(
            f"this state has version {version}, and this Penstock reads up to {VERSION}: load it "
            "with the release that wrote it, or a newer one"
        )
    for name in ("row", "step"):
        _require(_whole(state.get(name)), name, state.get(name), "a whole number from 0 on")
    lanes, identity = state.get("lanes"), state.get("identity")
    _require(isinstance(identity, Mapping), "identity", identity, "a dict")
    good = isinstance(lanes, Mapping) and all(_DECIMAL.fullmatch(str(lane)) for lane in lanes)
    _require(good, "lanes", lanes, "a dict of each lane's address")
    assert isinstance(lanes, Mapping)
    assert isinstance(identity, Mapping)
    return Saved(
        state["row"], state["step"], {int(lane): at for lane, at in lanes.items()}, identity
    )


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all ranks, saved after the same batch, as one that any number of ranks loads.

    >>> a = {"version": 1, "row": 4, "step": 2, "lanes": {"0": [0, 0, 2]}, "identity": {}}
    >>> b = {**a, "lanes": {"1": [0, 1, 2]}}
    >>> merge_states([b, a])["lanes"]
    {'0': [0, 0, 2], '1': [0, 1, 2]}
    """
    states = [] if isinstance(states, Mapping) else list(states)
    if not states:
        raise ConfigError("merge_states takes the list of all ranks' states, and there is none")
    read = [read_stream_state(state) for state in states]
    rows = [each.row for each in read]
    passes = [state["pass"] for state in states if "pass" in state]
    if len(set(rows)) > 1 and len(passes) < len(states):
        raise StateMismatch(
            f"these states were saved after different batches: they are at rows "
            f"{', '.join(map(str, sorted(set(rows))[:8]))}. Join those of one checkpoint"
        )
    lanes: dict[int, Any] = {}
    for each in read:
        check_identity(each.identity, read[0].identity)
        for lane, address in each.lanes.items():
            if lanes.setdefault(lane, address) != address:
                raise StateMismatch(
                    f"two of these states know lane {lane}, at {short(lanes[lane])} and at "
                    f"{short(address)}: join the states of one run's ranks, each once"
                )
    merged = {k: v for k, v in states[0].items() if k not in LOCAL}
    if passes:  # whose ranks skip lanes that have ended; lanes know how far they are
        merged |= {"row": min(rows), "pass": min(passes), "epoch": min(passes)}
    return merged | {"lanes": {str(lane): lanes[lane] for lane in sorted(lanes)}}


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _require(good: bool, name: str, value: Any, wanted: str) -> None:
    if not good:
        raise StateMismatch(
            f"this is not a state of a stream: {name} is {short(value)}, where {wanted} was "
            "expected. Pass what state_dict() gave, from a whole checkpoint"
        )
