"""A run edited in its state: other weights, sources, documents and steps from its position on.

    state = edit_state(state, back_to=40_000, skip_steps=[(40_100, 40_300)])
    loader.load_state_dict(state)

The state is JSON, and so is what comes back: nothing is opened. Ranges of steps and documents name
their first and their last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

from penstock.checks import at_least
from penstock.dataset.excluded import ALONE
from penstock.errors import ConfigError, StateMismatch
from penstock.loader.state import Address, Documented, Excluded, read_state, state_of
from penstock.loader.surgery import awaiting, awaits, declared_from, phases_of
from penstock.order import Plan, Stage, quantise

if TYPE_CHECKING:
    from penstock.loader.core import StatefulDataLoader

Pairs = Iterable[tuple[int, int] | int]  # the first and the last, or the only one


def edit_state(
    state: Mapping[str, Any],
    *,
    weights: Mapping[str, float] | None = None,
    add: Mapping[str, float] | None = None,
    remove: Sequence[str] = (),
    exclude: Mapping[str, Pairs] | Pairs | None = None,
    skip_steps: Pairs = (),
    back_to: int | None = None,
    run: StatefulDataLoader | None = None,
) -> dict[str, Any]:
    """A copy of a loader's state in which the run goes on otherwise.

    `back_to` comes first: the run goes back to that step, and the rest holds from there on.
    `weights` are shares of 1 for the sources they name, until the next declared phase; the others
    share what is left as they did before (where all are named, they are relative to each other).
    `add` gives new sources a share, in later phases too; `remove` takes sources out of all of
    them. `exclude` masks documents for good: {"web": [(120, 139), 7]}, or the list alone where
    there is no mixture. `skip_steps` leaves steps out; the others keep their numbers.

    With `run`, a loader of the run that goes on, the state is first loaded onto that with
    `allow="mixture"`, and what comes back is complete and checked against its data; later phases
    are then those it declares. Without, the run that loads an edit of sources says what they are.
    """
    original = _read(state)
    local = state.get("sampler", {})
    weights, add = dict(weights or {}), dict(add or {})
    if run is not None:
        run.load_state_dict(dict(state), allow="mixture")
        here = _read(run.state_dict())
        weights |= _new(add, original, here)
        remove = [name for name in remove if name not in here.surgery.retired]
        edit = _Edit(here, run.plan)
        add = {}
    else:
        edit = _Edit(original, plan_of(original))
    if back_to is not None:
        edit.go_back(back_to)
    edit.mix(weights, add, tuple(remove))
    edit.exclude(_documents(exclude, edit.at))
    edit.skip(_pairs(skip_steps, "skip_steps"))
    edited = edit.state(local)
    if run is not None:
        run.load_state_dict(edited)
        edited = run.state_dict()
    made: dict[str, Any] = json.loads(json.dumps(edited))
    return made


@dataclass(slots=True)
class _Edit:
    """The address that is edited, and the plan by which its steps are positions."""

    at: Address
    plan: Plan

    def go_back(self, step: int) -> None:
        at, now = self.at, self.plan.step_at(self.at.position)
        if at_least(0, step, "back_to") > now:
            raise ConfigError(
                f"the run is at step {now:,}: back_to names one before it, not {step}"
            )
        position = self.plan.position_of(step)
        if position >= at.position:
            return
        surgery = at.surgery
        if at.sources and position < surgery.since and awaits(at.identity):
            raise ConfigError(
                "this state was edited and never loaded, so what its run declares is unknown: "
                "load it once, or pass the run"
            )
        excluded = {
            name: _merged(each._replace(since=min(each.since, position)) for each in ranges)
            for name, ranges in surgery.excluded.items()
        }
        before = replace(
            at, position=position, surgery=replace(surgery, excluded=excluded), pending=None
        )
        if at.sources and not awaits(at.identity):
            phases = phases_of(at.identity["mixture"])
            was = [] if position < surgery.since else phases
            begun = tuple(
                s for s in at.stages if s.position <= position or s.start_step is not None
            )
            before = declared_from(
                replace(before, stages=begun), phases, was, self.plan.position_of
            )
        else:
            stages = [s for s in at.stages if s.position <= position or s.start_step is not None]
            before = replace(before, stages=tuple(stages))
        self.at = replace(before, under_way=False)

    def mix(
        self, weights: Mapping[str, float], add: Mapping[str, float], remove: tuple[str, ...]
    ) -> None:
        if not (weights or add or remove):
            return
        if not self.at.sources:
            raise ConfigError(
                "this state is of a single dataset, which has no sources to weigh, add or remove; "
                "exclude documents or skip steps, or begin a run with [[data.datasets]]"
            )
        if add or remove:
            self._come_and_go(add, remove)
        at = self.at
        _known(weights, [n for n in at.sources if n not in at.surgery.retired], at.surgery.retired)
        share = dict(weights) | dict(add)
        begun = [s for s in at.stages if s.position <= at.position]
        step = begun[-1].start_step if begun[-1].position == at.position else None
        now = Stage(at.position, _shared(at.sources, begun[-1], share, remove), step)
        later = [
            replace(s, weights=_shared(at.sources, s, add, remove)) if add or remove else s
            for s in at.stages
            if s.position > at.position
        ]
        lived = [s for s in begun if s.position < at.position]
        self.at = replace(at, stages=(*lived, now, *later), pending=None, under_way=False)

    def _come_and_go(self, add: Mapping[str, float], remove: tuple[str, ...]) -> None:
        """Sources among those of the state, and what is known of them in the identity."""
        at = self.at
        retired, sources = dict(at.surgery.retired), dict(at.identity.get("sources", {}))
        here = [name for name in at.sources if name in sources]
        if set(sources) - set(at.sources):
            raise ConfigError(
                f"sources are added and removed by name, and this state's sampler called them "
                f"{list(at.sources)}: build it with names=dataset.dataset_names"
            )
        _known(remove, here, retired)
        for name in add:
            if name in here:
                raise ConfigError(f"{name!r} is a source already: give it a weight instead")
        for name in remove:
            known = sources.pop(name)
            if known is not None:
                retired[name] = known
        for name in add:
            sources[name] = retired.pop(name, None)
        new = tuple(name for name in add if name not in at.sources)
        stages = [replace(s, weights=s.weights + (0,) * len(new)) for s in at.stages]
        mixture = at.identity["mixture"]
        self.at = replace(
            at,
            sources=at.sources + new,
            stages=tuple(stages),
            identity=dict(at.identity) | {"sources": sources, "mixture": awaiting(mixture)},
            surgery=replace(at.surgery, retired=retired),
        )

    def exclude(self, documents: Mapping[str, list[tuple[int, int]]]) -> None:
        at = self.at
        merged = dict(at.surgery.excluded)
        for name, ranges in documents.items():
            new = [Excluded(first, last + 1, at.position) for first, last in ranges]
            merged[name] = _merged([*merged.get(name, ()), *new])
        self.at = replace(at, surgery=replace(at.surgery, excluded=merged))

    def skip(self, steps: Sequence[tuple[int, int]]) -> None:
        at, plan = self.at, self.plan
        now = plan.step_at(at.position)
        ranges = list(at.surgery.skipped)
        for first, last in steps:
            if first < now:
                raise ConfigError(
                    f"the run is at step {now:,}, and {first:,} has been: skip steps from "
                    f"{now:,} on, or go back first (back_to)"
                )
            begin = max(plan.position_of(first), at.position)
            ranges.append((begin, plan.position_of(last + 1)))
        skipped: list[tuple[int, int]] = []
        for begin, end in sorted(ranges):
            if skipped and begin <= skipped[-1][1]:
                skipped[-1] = skipped[-1][0], max(end, skipped[-1][1])
            else:
                skipped.append((begin, end))
        self.at = replace(at, surgery=replace(at.surgery, skipped=tuple(skipped)))

    def state(self, local: Mapping[str, Any]) -> dict[str, Any]:
        at = self.at
        plan = Plan(
            self.plan.n, self.plan.segments, tail=self.plan.tail, skipped=at.surgery.skipped
        )
        position = plan.settle(at.position, plan.segment(at.position).size)
        segments = tuple(s for s in plan.segments if s.position < position)
        own = {key: local[key] for key in ("seed", "num_replicas", "rank") if key in local}
        return state_of(replace(at, position=position, segments=segments), plan, own)


def _read(state: Mapping[str, Any]) -> Address:
    if "lanes" in state or "pq_idx" in state:
        raise StateMismatch(
            "the state of a stream cannot be edited, since its rows have no places before they are "
            "read: prepare a store of the documents, or begin another stream"
        )
    found = read_state(state)
    if isinstance(found, Documented):
        raise StateMismatch(
            "this state has no position, only the documented keys: load it once, and edit what "
            "state_dict() gives"
        )
    return found


def plan_of(at: Address) -> Plan:
    """The plan that the state's own segments make, the last one going on."""
    sources = at.identity.get("sources")
    sizes = [at.identity] if sources is None else [each for each in sources.values() if each]
    n = sum(each.get("samples") or 0 for each in sizes)
    if not at.segments or not n:
        what = "what a step takes" if n else "how many samples there are"
        raise ConfigError(f"this state does not say {what}: pass run, the loader that goes on")
    return Plan(n, at.segments, tail=at.tail, skipped=at.surgery.skipped)


def _new(add: Mapping[str, float], before: Address, here: Address) -> dict[str, float]:
    """The shares of sources that the run has and the state had not."""
    for name in add:
        if name in before.sources and name not in before.surgery.retired:
            raise ConfigError(f"{name!r} is a source already: give it a weight instead")
        if name not in here.sources or name in here.surgery.retired:
            raise ConfigError(f"{name!r} is to be added, and the run has no such source")
    return dict(add)


def _known(names: Iterable[str], here: Sequence[str], retired: Mapping[str, Any]) -> None:
    for name in names:
        if name not in here:
            gone = " (it was removed; add it again)" if name in retired else ""
            raise ConfigError(f"{name!r} is no source of this state{gone}; it has {list(here)}")


def _shared(
    names: Sequence[str], stage: Stage, share: Mapping[str, float], remove: Sequence[str]
) -> tuple[int, ...]:
    """A stage's weights after shares were given and sources removed."""
    for name, value in share.items():
        if not isfinite(value) or value < 0:
            raise ConfigError(f"the weight of {name!r} is a number from 0 on, not {value}")
    old = dict(zip(names, stage.weights, strict=True))
    rest = {n: w for n, w in old.items() if w and n not in share and n not in remove}
    total, left = sum(share.values()), sum(rest.values())
    if rest and total >= 1:
        raise ConfigError(
            f"the shares {dict(share)} leave nothing of 1 for {list(rest)}: remove them, or name "
            "all sources, and weights are relative to each other"
        )
    if not rest and total <= 0:
        raise ConfigError(
            f"from position {stage.position:,} on no source would be left with a weight"
        )
    kept = {name: weight / left * (1 - total) for name, weight in rest.items()}
    return quantise([share.get(name, kept.get(name, 0.0)) for name in names])


def _documents(
    exclude: Mapping[str, Pairs] | Pairs | None, at: Address
) -> dict[str, list[tuple[int, int]]]:
    if exclude is None:
        return {}
    given = exclude if isinstance(exclude, Mapping) else {ALONE: exclude}
    sources = at.identity.get("sources")
    names = [ALONE] if sources is None else list(sources)
    for name in given:
        if name not in names:
            raise ConfigError(
                f"documents of {name!r} are to be excluded, and the sources of this state are "
                f"{names}"
            )
    return {name: _pairs(pairs, "exclude") for name, pairs in given.items()}


def _pairs(pairs: Pairs, what: str) -> list[tuple[int, int]]:
    """Ranges by their first and last."""
    found = []
    for pair in pairs:
        first, last = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (pair, pair)
        first, last = at_least(0, first, what), at_least(0, last, what)
        if last < first:
            raise ConfigError(f"{what} has ranges (first, last), not {(first, last)}")
        found.append((first, last))
    return found


def _merged(ranges: Iterable[Excluded]) -> tuple[Excluded, ...]:
    """Ranges in order and apart, each document from the earliest position it was given.

    >>> _merged([Excluded(0, 9, 50), Excluded(3, 5, 10), Excluded(9, 12, 50)])
    (Excluded(first=0, end=3, since=50), ...(first=3, end=5, since=10), ...(first=5, end=12, ...))
    """
    given = list(ranges)
    edges = sorted({edge for each in given for edge in (each.first, each.end)})
    found: list[Excluded] = []
    for first, end in pairwise(edges):
        since = [each.since for each in given if each.first <= first and end <= each.end]
        if since and found and (found[-1].end, found[-1].since) == (first, min(since)):
            found[-1] = found[-1]._replace(end=end)
        elif since:
            found.append(Excluded(first, end, min(since)))
    return tuple(found)
