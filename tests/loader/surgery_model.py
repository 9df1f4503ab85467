"""A mixture under surgery, the slow way: the axis is a list, and every source is walked in order.

Written from the design note, not from the code. Each stage is computed over the sources that there
were when it began, so that sources which come later are shown to move nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from tests.loader.reference import Run, _block

from penstock.order import Permutation, quantise
from penstock.order.hashing import key_of, subkeys

SEED = 5
Weights = Mapping[str, int]
Phases = list[tuple[int, Weights]]  # (step, weights by name without zeros), the first from step 0


@lru_cache(maxsize=512)
def block(weights: tuple[int, ...], start: int, number: int) -> list[int]:
    return _block(Run(sizes=(), schedule=(), seed=SEED), weights, start, number)


@lru_cache(maxsize=512)
def order_of(name: str, size: int, epoch: int) -> list[int]:
    key = int(subkeys(key_of("source", SEED, name), np.array([epoch]))[0])
    return Permutation(size, key)(np.arange(size)).tolist()


def shared(old: Weights, share: Mapping[str, float], remove: Sequence[str] = ()) -> Weights:
    """Shares of 1 for some; the rest share what is left as before."""
    rest = {n: w for n, w in old.items() if n not in share and n not in remove}
    left = 1 - sum(share.values())
    names = [*rest, *share]
    parts = [w / sum(rest.values()) * left for w in rest.values()]
    return dict(zip(names, quantise([*parts, *share.values()]), strict=True))


@dataclass
class Stage:
    position: int
    weights: Weights
    step: int | None  # of the declared phase; None: by hand
    names: list[str]  # that there were when it began


@dataclass
class Model:
    sizes: dict[str, int]
    names: list[str]  # of the run, as it is declared
    phases: Phases
    size: int = 8  # of a global batch
    accumulation: int = 1
    position: int = 0
    inside: int = 0  # batches delivered of the step under way
    since: int = 0
    starts: list[int] = field(default_factory=lambda: [0])  # where each step began
    skipped: list[tuple[int, int]] = field(default_factory=list)
    ever: list[str] = field(default_factory=list)  # every source there was, in order of coming
    stages: list[Stage] = field(default_factory=list)
    axis: list[tuple[str, int]] = field(default_factory=list)
    given: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.ever = list(self.names)
        self.stages = [self._stage(self._where(s), w, s) for s, w in self.phases]

    # --- the axis

    def at(self, position: int) -> tuple[str, int]:
        """Source and ordinal at a position."""
        while len(self.axis) <= position:
            at = len(self.axis)
            stage = [s for s in self.stages if s.position <= at][-1]
            number, place = divmod(at - stage.position, 4096)
            weights = tuple(stage.weights.get(name, 0) for name in stage.names)
            name = stage.names[block(weights, stage.position, number)[place]]
            self.axis.append((name, self.given[name]))
            self.given[name] += 1
        return self.axis[position]

    def sample(self, position: int) -> tuple[str, int]:
        name, ordinal = self.at(position)
        epoch, place = divmod(ordinal, self.sizes[name])
        return name, order_of(name, self.sizes[name], epoch)[place]

    def _cut(self, position: int) -> None:
        """What the axis holds from a position on is open again."""
        del self.axis[position:]
        self.given = Counter(name for name, _ in self.axis)

    # --- walking

    @property
    def step(self) -> int:
        return len(self.starts) - 1

    def __next__(self) -> tuple[int, int, list[tuple[str, int]]]:
        """Step, position and samples of the next global batch."""
        found = self.step, self.position, [self.sample(self.position + i) for i in range(self.size)]
        self.position += self.size
        self.inside += 1
        if self.inside == self.accumulation:
            self._begin(self.position)
        self._settle()
        return found

    def _begin(self, position: int) -> None:
        self.starts.append(position)
        self.position, self.inside = position, 0

    def _settle(self) -> None:
        """Leave out whole steps, those that touch what is skipped."""
        while self._touched(self.starts[-1], end := self._start(self.step + 1)):
            self._begin(end)

    def _touched(self, begin: int, end: int) -> bool:
        return any(begin < b and a < end for a, b in self.skipped)

    def _start(self, step: int) -> int:
        """Where a step begins, as it was or as it will be."""
        if step <= self.step:
            return self.starts[step]
        return self.starts[-1] + (step - self.step) * self.size * self.accumulation

    # --- changes

    def resize(self, size: int, accumulation: int) -> None:
        if (size, accumulation) == (self.size, self.accumulation):
            return
        if self.inside:
            self._begin(self.position)
        self.size, self.accumulation = size, accumulation
        self._settle()

    def edit(self, back_to: int | None, skip: Sequence[tuple[int, int]]) -> None:
        """Back to a step, and leave out others; steps are where they were in the run so far."""
        at = self.step if back_to is None else back_to
        position = self.position if back_to is None else self._start(at)
        begins = [self._start(step) for step in range(self.step + 60)]
        self.skipped += [(max(begins[a], position), begins[b + 1]) for a, b in skip]
        stays = position == self.position
        if not stays:
            self.position = position
            self._go_on(self.phases, self.phases, anew=position < self.since)
        while self._touched(begins[at], begins[at + 1]):
            at, position, stays = at + 1, begins[at + 1], False
        if not stays:
            self.position, self.inside, self.starts = position, 0, begins[: at + 1]

    def declare(self, names: list[str], phases: Phases) -> None:
        """Go on as a run that declares other sources, weights or phases."""
        self.ever += [name for name in names if name not in self.ever]
        if (set(names), phases) != (set(self.names), self.phases):
            self._go_on(phases, self.phases)
        self.names, self.phases = names, phases

    def _go_on(self, phases: Phases, before: Phases, *, anew: bool = False) -> None:
        at = self.position
        begun = [s for s in self.stages if s.position <= at]
        where = {step: self._where(step) for step, _ in [*phases, *before]}
        now = [phase for phase in phases if where[phase[0]] <= at][-1]
        was = [phase for phase in before if where[phase[0]] <= at][-1]
        there = {name for _, weights in phases for name in weights}
        if anew or now != was or not set(begun[-1].weights) <= there:
            begun = [s for s in begun if s.position < at] + [self._stage(at, now[1], now[0])]
            self.since = at
        ahead = {where[step]: self._stage(where[step], w, step) for step, w in phases}
        self.stages = begun + [ahead[p] for p in sorted(ahead) if p > at]
        self._cut(at)

    def weigh(self, share: Mapping[str, float]) -> None:
        self._by_hand(share, ())

    def swap(
        self, add: Mapping[str, float], remove: Sequence[str], names: list[str], phases: Phases
    ) -> None:
        """Sources come and go by an edit, and the run that loads it declares `phases`."""
        self.ever += [name for name in add if name not in self.ever]
        self._by_hand(add, remove)
        for stage in self.stages:
            if stage.position > self.position:
                stage.weights, stage.names = shared(stage.weights, add, remove), list(self.ever)
        self.ever += [name for name in names if name not in self.ever]
        self.names, self.phases, self.since = names, phases, self.position

    def _by_hand(self, share: Mapping[str, float], remove: Sequence[str]) -> None:
        at = self.position
        last = [s for s in self.stages if s.position <= at][-1]
        step = last.step if last.position == at else None
        now = self._stage(at, shared(last.weights, share, remove), step)
        self.stages = sorted(
            [*(s for s in self.stages if s.position != at), now], key=lambda s: s.position
        )
        self._cut(at)

    def _stage(self, position: int, weights: Weights, step: int | None) -> Stage:
        return Stage(position, weights, step, list(self.ever))

    def _where(self, step: int) -> int:
        known = [s.position for s in self.stages if s.step == step]
        return 0 if step == 0 else known[0] if known else self._start(step)
