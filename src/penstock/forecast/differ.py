"""Two runs side by side: what changes, from which step on, and the first batch that differs.

    found = difference(load_run("a.toml"), load_run("b.toml"))
    found.step, found.why                   # (1000, "a takes sample 7 of web where b takes ...")

Geometry comes first: the step from which batches have other sizes or places. Before it both runs
have the same positions, and the samples at them are compared, from where their stages part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dataset.tokens import TokenDataset
from penstock.errors import ConfigError
from penstock.forecast.core import load_state, sources_of
from penstock.forecast.spans import step_of
from penstock.loader import StatefulDataLoader
from penstock.loader.streaming import StreamLoader
from penstock.order import MixtureOrder, Plan
from penstock.order.weights import TOTAL
from penstock.run import RunConfig, open_run

AT_ONCE = 1 << 16
LOOKED_AT = 1 << 25  # positions compared one by one, at most
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing that is not the same, and the step from which it counts."""

    what: str
    step: int
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What changes between two runs; `step` None: no batch does, among those compared."""

    step: int | None
    why: str
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two runs."""

    run: RunConfig
    loader: StatefulDataLoader
    names: list[str]
    datasets: list[TokenDataset]

    @classmethod
    def of(cls, run: RunConfig, state: Mapping[str, Any] | None) -> _Side:
        loader = open_run(run)
        if isinstance(loader, StreamLoader):
            raise ConfigError("streams cannot be compared step by step: their rows are not known")
        if state is not None:
            load_state(loader, state)
        return cls(run, loader, *sources_of(loader))

    @property
    def plan(self) -> Plan:
        return self.loader.plan

    def contents(self) -> list[str]:
        """What decides each source's samples."""
        return [json.dumps(dataset.identity(), sort_keys=True) for dataset in self.datasets]

    def samples(self, positions: I64) -> tuple[I64, I64]:
        """(source, sample of it) at each position."""
        indices = self.loader.sampler.order.indices(positions)
        ends = np.cumsum([len(dataset) for dataset in self.datasets])
        source = np.searchsorted(ends, indices, "right")
        return source, indices - (ends - np.diff(ends, prepend=0))[source]

    def shares(self, step: int) -> dict[str, float]:
        """Of each source the share that is planned at a step."""
        order, stages = self.loader.sampler.order, self.loader.stages
        if not isinstance(order, MixtureOrder):
            return {self.names[0]: 1.0}
        position = self.plan.position_of(step)
        stage = [each for each in stages if each.position <= position][-1]
        of = dict(zip(order.names, stage.weights, strict=True))
        return {name: of[name] / TOTAL for name in self.names}


def difference(
    before: RunConfig, after: RunConfig, state: Mapping[str, Any] | None = None
) -> Difference:
    """What changes where one run takes the place of another, from their start or from a state."""
    a, b = _Side.of(before, state), _Side.of(after, state)
    first = max(a.loader.step, b.loader.step)
    found = sorted(_changes(a, b, first), key=_order)
    step, why = _first_difference(a, b)
    return Difference(step=step, why=why, changes=tuple(found))


def _order(change: Change) -> tuple[int, str]:
    return change.step, change.what


# --- the first batch that differs


def _first_difference(a: _Side, b: _Side) -> tuple[int | None, str]:
    end, why = _geometry(a, b)
    if a.loader.position != b.loader.position:
        return min(a.loader.step, b.loader.step), "they go on from different positions"
    begin = _parting(a, b)
    stop = _last(a, b) if end is None else a.plan.position_of(end)
    looked_at = min(stop, begin + LOOKED_AT)
    ids = _ids(a, b)
    for at in range(begin, looked_at, AT_ONCE):
        positions = np.arange(at, min(at + AT_ONCE, looked_at))
        (source, sample), (other, another) = a.samples(positions), b.samples(positions)
        differs = (ids[0][source] != ids[1][other]) | (sample != another)
        if differs.any():
            k = int(np.argmax(differs))
            here = f"sample {int(sample[k]):,} of {a.names[int(source[k])]}"
            there = f"sample {int(another[k]):,} of {b.names[int(other[k])]}"
            if here == there:
                there += ", whose content is another"
            step = step_of(a.plan, int(positions[k]))
            return (
                step,
                f"at position {int(positions[k]):,} the one takes {here}, the other {there}",
            )
    if looked_at < stop:
        step = step_of(a.plan, looked_at)
        return (
            None,
            f"the batches of all steps before {step:,} are the same; later ones were not compared",
        )
    if end is not None:
        return end, why
    return None, "all batches are the same"


def _geometry(a: _Side, b: _Side) -> tuple[int | None, str]:
    """The first step whose positions are not the same in both runs, and why; None if none is."""
    first = max(a.loader.step, b.loader.step)
    steps = {first}
    for side in (a, b):
        steps |= {segment.step for segment in side.plan.segments if segment.step > first}
        if side.plan.tail == "drop" and (a.plan.n, a.plan.tail) != (b.plan.n, b.plan.tail):
            epoch = side.plan.epoch(side.loader.position) + 1
            steps.add(side.plan.step_at(epoch * side.plan.n))
    ends = [run.steps for run in (a.run, b.run) if run.steps is not None]
    for step in sorted(step for step in steps if step < min(ends, default=step + 1)):
        at, other = a.plan.position_of(step), b.plan.position_of(step)
        here, there = a.plan.segment(at), b.plan.segment(other)
        if here.size != there.size:
            return step, f"a global batch has {here.size:,} samples, then {there.size:,}"
        if here.accumulation != there.accumulation:
            return step, (
                f"a step has {here.accumulation:,} global batches, then {there.accumulation:,}"
            )
        if at != other:
            return step, "an epoch ends earlier in one of them"
    return None, ""


def _parting(a: _Side, b: _Side) -> int:
    """A position before which all samples are the same, without looking at them."""
    begin, (one, other) = a.loader.position, (a.loader.sampler.order, b.loader.sampler.order)
    if a.contents() != b.contents() or one.seed != other.seed or type(one) is not type(other):
        return begin
    if not (isinstance(one, MixtureOrder) and isinstance(other, MixtureOrder)):
        return _last(a, b) if one.n == other.n else begin
    if one.names != other.names or one.sizes.tolist() != other.sizes.tolist():
        return begin
    stages, others = list(one.stages), list(other.stages)
    for here, there in zip(stages, others, strict=False):
        if (here.position, here.weights) != (there.position, there.weights):
            return max(begin, min(here.position, there.position))
    later = stages[len(others) :] + others[len(stages) :]
    return max(begin, later[0].position) if later else _last(a, b)


def _last(a: _Side, b: _Side) -> int:
    """Where the shorter of both runs ends; without steps, where both would be in another epoch."""
    known = [run.steps for run in (a.run, b.run) if run.steps is not None]
    if known:
        return a.plan.position_of(max(min(known), a.loader.step))
    return max((side.loader.epoch + 1) * side.plan.n for side in (a, b))


def _ids(a: _Side, b: _Side) -> tuple[I64, I64]:
    """A number for each source's content, the same where the content is."""
    known = {content: number for number, content in enumerate([*a.contents(), *b.contents()])}
    one, other = ([known[content] for content in side.contents()] for side in (a, b))
    return np.array(one), np.array(other)


# --- what was changed


def _changes(a: _Side, b: _Side, first: int) -> Iterator[Change]:
    one, other = a.run, b.run
    for name in ("seed", "seq_len", "world_size", "accumulation", "steps"):
        yield from _change(name, first, getattr(one, name), getattr(other, name))
    yield from _sizes(a, b, first)
    for f in fields(one.data):
        if f.name in ("datasets", "phases", "anneal_start_step", "anneal_weights"):
            continue
        yield from _change(f.name, first, getattr(one.data, f.name), getattr(other.data, f.name))
    yield from _sources(a, b, first)
    yield from _weights(a, b, first)


def _change(what: str, step: int, before: Any, after: Any) -> Iterator[Change]:
    if before != after:
        yield Change(what=what, step=step, before=str(before), after=str(after))


def _sizes(a: _Side, b: _Side, first: int) -> Iterator[Change]:
    steps = sorted({s.step for side in (a, b) for s in side.plan.segments if s.step > first})
    last = None
    for step in [first, *steps]:
        sizes = [side.plan.segment(side.plan.position_of(step)).size for side in (a, b)]
        if sizes[0] != sizes[1] and sizes != last:
            yield from _change("global batch", step, *sizes)
        last = sizes


def _sources(a: _Side, b: _Side, first: int) -> Iterator[Change]:
    here = dict(zip(a.names, zip(a.contents(), a.datasets, strict=True), strict=True))
    there = dict(zip(b.names, zip(b.contents(), b.datasets, strict=True), strict=True))
    for name in dict.fromkeys([*here, *there]):
        if name not in there or name not in here:
            said = [_said(side[name][1]) if name in side else "none" for side in (here, there)]
            yield from _change(f"source {name}", first, *said)
        elif here[name][0] != there[name][0]:
            said = [_said(side[name][1]) for side in (here, there)]
            if said[0] == said[1]:
                said = [
                    f"{words} (fingerprint {side[name][1].store.fingerprint[:8]})"
                    for words, side in zip(said, (here, there), strict=True)
                ]
            yield Change(what=f"content of {name}", step=first, before=said[0], after=said[1])


def _said(dataset: TokenDataset) -> str:
    return f"{len(dataset):,} samples of {dataset.layout()}"


def _weights(a: _Side, b: _Side, first: int) -> Iterator[Change]:
    """Shares and learning rates, at each step where either run begins a stage."""
    steps = sorted(
        {
            side.plan.step_at(stage.position)
            for side in (a, b)
            for stage in side.loader.stages
            if stage.position >= side.loader.position
        }
        | {first}
    )
    last: Any = None
    for step in steps:
        here, there = a.shares(step), b.shares(step)
        if here != there and (here, there) != last:
            for name in here.keys() & there.keys():
                shares = [f"{side[name]:.4%}" for side in (here, there)]
                if here[name] != there[name]:
                    what = f"share of {name}"
                    yield Change(what=what, step=step, before=shares[0], after=shares[1])
        last = here, there
        scales = [side.loader.config.lr_scale(step) for side in (a, b)]
        yield from _change("lr_scale", step, *scales)
