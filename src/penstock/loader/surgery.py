"""A state meets a run that is not quite the one it was saved in.

    loader.load_state_dict(state, allow="mixture")

Before the saved position nothing changes: the stages that were lived stay as they are, over all
sources there ever were. A source that is new comes last among them, which moves no other; one that
is gone stays with weight 0, so that it goes on where it stopped if it comes back. From the position
on the run's own weights hold, where they are not those it had.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.errors import ConfigError, StateMismatch
from penstock.loader.state import Address
from penstock.order import Stage
from penstock.order.identity import check_identity

Allow = Literal["mixture"] | None
_HOW = (
    '. Where sources or weights are meant to change from here on, load_state_dict(state, allow="'
    'mixture") goes on with them'
)


@dataclass(frozen=True, slots=True)
class Phase:
    """Weights that a run declares, by name and without zeros."""

    start_step: int | None
    weights: Mapping[str, int]


def phases_of(mixture: Mapping[str, Any]) -> list[Phase]:
    """The declared phases of an identity's `mixture`."""
    return [
        Phase(step, {n: w for n, w in zip(mixture["names"], weights, strict=True) if w})
        for step, weights in mixture["weights"]
    ]


def awaits(identity: Mapping[str, Any]) -> bool:
    """Whether an edit left to the run that goes on which sources and weights it declares."""
    mixture = identity.get("mixture")
    return isinstance(mixture, Mapping) and mixture.get("names") is None


def awaiting(mixture: Mapping[str, Any]) -> dict[str, Any]:
    """An identity's mixture, its phases' steps apart, left to the run that goes on."""
    return {"names": None, "weights": [[step, None] for step, _ in mixture["weights"]]}


def continued(
    found: Address,
    own: Mapping[str, Any],
    position_of: Callable[[int], int],
    *,
    allow: Allow = None,
) -> Address:
    """The address in a run of the identity `own`, or StateMismatch naming what does not match."""
    if allow not in (None, "mixture"):
        raise ConfigError(f"allow is 'mixture' or None, not {allow!r}")
    saved, edited = _settled(found, own), awaits(found.identity)
    _check(saved, own, found.surgery.retired, allow)
    if "mixture" not in own:
        return found
    names: list[str] = own["mixture"]["names"]
    sources = (*found.sources, *(name for name in names if name not in found.sources))
    more = (0,) * (len(sources) - len(found.sources))
    stages = [replace(s, weights=s.weights + more) for s in found.stages]
    found = replace(
        found,
        sources=sources,
        stages=tuple(stages),
        pending=None if found.pending is None else found.pending + more,
        identity=own,
        surgery=replace(found.surgery, retired=_retired(found, saved, names)),
    )
    if not found.stages:
        raise StateMismatch("this state has no stages, and that of a mixture has them")
    if edited:  # what is in force was set by hand; from here on the run's phases are known
        found = replace(found, surgery=replace(found.surgery, since=found.position))
    elif saved.get("mixture") != own["mixture"]:
        phases, before = phases_of(own["mixture"]), phases_of(saved["mixture"])
        by_hand = [s for s in found.stages if s.start_step is None and s.position]
        found = declared_from(found, phases, before, position_of)
        if any(s.position == found.position and s not in found.stages for s in by_hand):
            warnings.warn(
                f"the weights set by hand at position {found.position:,} give way to those that "
                "this run declares: edit the state once it is on this run "
                "(`penstock state edit --run`)",
                stacklevel=3,
            )
    _check_weights(found, names)
    return found


def declared_from(
    at: Address,
    phases: Sequence[Phase],
    before: Sequence[Phase],
    position_of: Callable[[int], int],
) -> Address:
    """The address with the stages that `phases` declare from its position on.

    Where the phase in force is the one that was in force, so is what was set by hand since. Phases
    that the state knows begin where it says, others where `position_of` says.
    """
    known = {s.start_step: s.position for s in reversed(at.stages) if s.start_step is not None}

    def where(phase: Phase) -> int:
        step = phase.start_step or 0
        if step == 0:
            return 0
        return known[step] if step in known else position_of(step)

    def stage(phase: Phase, position: int) -> Stage:
        weights = tuple(phase.weights.get(name, 0) for name in at.sources)
        return Stage(position, weights, phase.start_step or 0)

    now = [phase for phase in phases if where(phase) <= at.position][-1]
    was = [phase for phase in before if where(phase) <= at.position][-1:]
    names = {name for phase in phases for name in phase.weights}
    begun = [s for s in at.stages if s.position <= at.position]
    set_by_hand = [*begun[-1:], *([Stage(0, at.pending)] if at.pending else [])]
    used = {
        name
        for s in set_by_hand
        for name, weight in zip(at.sources, s.weights, strict=True)
        if weight
    }
    stays = was == [now] and used <= names
    if not stays:
        begun = [s for s in begun if s.position < at.position] + [stage(now, at.position)]
    ahead = {where(phase): stage(phase, where(phase)) for phase in phases}
    later = [ahead[position] for position in sorted(ahead) if position > at.position]
    since = at.surgery.since if stays else at.position
    return replace(
        at,
        stages=(*begun, *later),
        pending=at.pending if stays else None,
        under_way=at.under_way and stays,
        surgery=replace(at.surgery, since=since),
    )


def _settled(found: Address, own: Mapping[str, Any]) -> dict[str, Any]:
    """The state's identity, what it leaves to the run filled in from there."""
    saved = dict(found.identity)
    if not awaits(saved) or "mixture" not in own:
        return saved
    steps = [step for step, _ in saved["mixture"]["weights"]]
    if steps == [step for step, _ in own["mixture"]["weights"]]:
        saved["mixture"] = own["mixture"]
    else:
        raise StateMismatch(
            f"the edited state has phases from the steps {steps} on, and this run from "
            f"{[step for step, _ in own['mixture']['weights']]}: load the state as it was before "
            'the edit with allow="mixture", and edit what state_dict() then gives'
        )
    here = own.get("sources", {})
    sources = {name: each for name, each in saved.get("sources", {}).items() if each is not None}
    for name in here:
        if name not in sources and name in found.sources:
            sources[name] = found.surgery.retired.get(name, here[name])
    saved["sources"] = sources
    return saved


def _check(
    saved: Mapping[str, Any], own: Mapping[str, Any], retired: Mapping[str, Any], allow: Allow
) -> None:
    """Refuse what differs and may not."""
    if "mixture" not in saved or "mixture" not in own:
        check_identity(saved, own)
        return
    bare = _common(saved, own, retired), _common(own, saved, retired)
    if allow == "mixture":
        check_identity(*bare)
        _check_named(saved, own)
        return
    try:
        check_identity(saved, own)
    except StateMismatch as error:
        how = _HOW if bare[0] == bare[1] else ""
        raise StateMismatch(f"{error}{how}") from None


def _common(
    of: Mapping[str, Any], other: Mapping[str, Any], retired: Mapping[str, Any]
) -> dict[str, Any]:
    """An identity without the mixture, and of the sources those that both sides know."""
    rest = {key: value for key, value in of.items() if key not in ("mixture", "sources")}
    if "sources" not in of:
        return rest
    mine, theirs = dict(retired) | dict(of["sources"]), set(other.get("sources", {})) | set(retired)
    return rest | {"sources": {name: each for name, each in mine.items() if name in theirs}}


def _check_named(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Sources come and go by name: a sampler that numbers them has to have as many."""
    same = set(saved.get("sources", {})) == set(own.get("sources", {}))
    if same and set(saved["mixture"]["names"]) == set(own["mixture"]["names"]):
        return
    if set(own["mixture"]["names"]) != set(own.get("sources", {})):
        raise StateMismatch(
            f"sources are added and removed by name, and the sampler calls them "
            f"{own['mixture']['names']}: build it with names=dataset.dataset_names"
        )


def _retired(found: Address, saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The identities of the sources that this run does not have."""
    known = dict(found.surgery.retired) | {
        name: each for name, each in saved.get("sources", {}).items() if each is not None
    }
    return {n: each for n, each in known.items() if n in found.sources and n not in names}


def _check_weights(found: Address, names: Sequence[str]) -> None:
    """Refuse stages ahead that ask for sources which the run does not have."""
    begun = [stage.position for stage in found.stages if stage.position <= found.position]
    for stage in found.stages:
        if stage.position >= begun[-1]:
            asked = [n for n, w in zip(found.sources, stage.weights, strict=True) if w]
            missing = [name for name in asked if name not in names]
            if missing:
                raise StateMismatch(
                    f"the state takes samples of {missing[0]!r} from position {stage.position:,} "
                    f"on, and the sources of this run are {list(names)}: add it to [data], or "
                    "remove it from the state (`penstock state edit --remove`)"
                )
