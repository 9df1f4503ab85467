"""Runs that are edited on the way: what was lived stays, what comes is what the edit says."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.support import IN_PROCESS, Endless, Taking, through_json
from tests.loader.surgery_model import SEED, Model, Phases

from penstock import (
    ConfigError,
    DistributedSampler,
    MixtureDataset,
    MixtureSampler,
    OutOfBounds,
    Stage,
    StatefulDataLoader,
    StateMismatch,
    edit_state,
)
from penstock.order import quantise

SIZES = {"a": 13, "b": 40, "c": 300, "d": 23, "e": 90}


def ranks(model: Model, world: int) -> list[StatefulDataLoader]:
    """The loaders of the run that a model declares, as `build_dataloader` makes them."""
    names = model.names
    step = model.size * model.accumulation
    stages = [
        Stage(k * step, tuple(weights.get(name, 0) for name in names), k)
        for k, weights in model.phases
    ]
    made = []
    for rank in range(world):
        dataset = MixtureDataset([Taking(SIZES[name]) for name in names], names)
        sampler = MixtureSampler(
            dataset.cumulative_sizes, [], world, rank, seed=SEED, names=names, stages=stages
        )
        made.append(
            StatefulDataLoader(
                dataset,
                model.size // world,
                sampler,
                IN_PROCESS,
                accumulation=model.accumulation,
            )
        )
    return made


class Trained:
    """A run of all its ranks beside the model of it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.delivered: list[tuple[int, list[tuple[str, int]]]] = []  # (position, samples)
        self.world = 1
        self._open(None)

    def _open(self, state: dict[str, Any] | None, **options: Any) -> None:
        self.loaders = ranks(self.model, self.world)
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(state, **options)
        self.iterators = [Endless(loader) for loader in self.loaders]
        first = self.loaders[0]
        if state is not None:
            saved = through_json(first.state_dict())
            again = ranks(self.model, self.world)[0]
            again.load_state_dict(saved)
            assert again.state_dict() == saved
        assert (first.position, first.step) == (self.model.position, self.model.step)

    def state(self) -> dict[str, Any]:
        states = [through_json(loader.state_dict()) for loader in self.loaders]
        for rank, state in enumerate(states):
            assert state == states[0] | {"sampler": states[0]["sampler"] | {"rank": rank}}
        return states[-1]

    def train(self, batches: int) -> None:
        begin, counts = self.model.position, Counter[str]()
        planned = self.loaders[0].plan
        for loader in self.loaders:
            loader._reset_stats()
        for _ in range(batches):
            steps = {loader.step for loader in self.loaders}
            step, position, samples = next(self.model)
            assert steps == {step}
            got: list[Any] = [None] * len(samples)
            for rank, iterator in enumerate(self.iterators):
                batch = next(iterator)
                indices = batch["input_ids"][:, 0].tolist()
                sources = [self.model.names[k] for k in batch["dataset_idx"].tolist()]
                got[rank :: self.world] = list(zip(sources, indices, strict=True))
            assert got == samples
            self.delivered.append((position, samples))
            counts.update(name for name, _ in samples)
        order = self.loaders[0].sampler.order
        end = self.loaders[0].position
        expected = dict(zip(order.names, order.given(planned.kept(begin, end)), strict=True))
        assert {n: c for n, c in expected.items() if c} == dict(counts)
        stats = self.loaders[0].stats()["samples_by_source"]
        assert {n: c for n, c in stats.items() if c} == dict(counts)

    def resume(self, world: int, size: int, accumulation: int) -> None:
        state, self.world = self.state(), world
        self.model.resize(size, accumulation)
        self._open(state)

    def declare(self, names: list[str], phases: Phases) -> None:
        state = self.state()
        self.model.declare(names, phases)
        self._open(state, allow="mixture")

    def edit(self, allow: bool = False, **edits: Any) -> None:
        state = self.state()
        before = json.dumps(state)
        edited = edit_state(state, **edits)
        assert json.dumps(state) == before
        assert len(json.dumps(edited)) < 4000
        if "weights" in edits:
            self.model.weigh(edits["weights"])
        self._open(through_json(edited), **({"allow": "mixture"} if allow else {}))


def _weights(random: Random, names: list[str]) -> dict[str, int]:
    chosen = random.sample(names, random.randint(1, len(names)))
    return dict(zip(chosen, quantise([random.choice([1, 2, 5]) for _ in chosen]), strict=True))


def _phases(random: Random, names: list[str], step: int) -> Phases:
    later = [random.randint(1, step + 12)] if random.random() < 0.4 else []
    return [(k, _weights(random, names)) for k in (0, *later)]


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_any_history_of_edits_gives_what_a_list_of_the_axis_gives(random: Random) -> None:
    names = random.sample(list(SIZES), random.randint(1, 4))
    model = Model(SIZES, names, _phases(random, names, 0))
    run = Trained(model)
    rewound = False
    for _ in range(random.randint(2, 7)):
        run.train(random.randint(1, 9))
        what = random.choice(["resume", "size", "declare", "weigh", "swap", "skip", "back"])
        if what == "resume":
            run.resume(random.choice([1, 2, 4]), model.size, model.accumulation)
        elif what == "size":
            run.resume(run.world, random.choice([4, 8, 12]), random.choice([1, 2, 3]))
        elif what == "declare":
            names = random.sample(list(SIZES), random.randint(1, 4))
            run.declare(names, _phases(random, names, model.step))
        elif what == "weigh":
            share = {random.choice(model.names): random.choice([0.25, 0.5])}
            in_force = [s for s in model.stages if s.position <= model.position][-1]
            if set(in_force.weights) - set(share):
                run.edit(weights=share)
        elif what == "swap":
            _swap(run, random)
        else:
            back = random.randint(0, model.step) if what == "back" else None
            first = random.randint(model.step if back is None else back, model.step + 6)
            skip = [(first, first + random.randint(0, 5))] if random.random() < 0.8 else []
            if model.position and not (back == 0 and not skip):
                state = run.state()
                rewound |= back is not None
                model.edit(back, skip)
                edited = edit_state(state, back_to=back, skip_steps=skip)
                model._settle()
                run._open(through_json(edited))
    run.train(3)
    if not rewound:
        _each_source_in_its_order(run)


def _swap(run: Trained, random: Random) -> None:
    """Sources added and removed by an edit, then the run that declares what there is then."""
    model = run.model
    fresh = [name for name in SIZES if name not in model.names]
    add = {n: random.choice([0.1, 0.3]) for n in random.sample(fresh, min(len(fresh), 1))}
    remove = random.sample(model.names, random.randint(0, 1))
    stages = [s for s in model.stages if s.position > model.position]
    stages.append([s for s in model.stages if s.position <= model.position][-1])
    if not add or any(not set(s.weights) - set(remove) for s in stages):
        return
    state = run.state()
    edited = edit_state(state, add=add, remove=remove)
    names = [n for n in model.names if n not in remove] + list(add)
    random.shuffle(names)
    model.swap(add, remove, names, [(step, _weights(random, names)) for step, _ in model.phases])
    run._open(through_json(edited), **random.choice([{}, {"allow": "mixture"}]))


def _each_source_in_its_order(run: Trained) -> None:
    """Without a way back, a source gives ordinal after ordinal, but for those that were skipped."""
    model = run.model
    delivered = defaultdict(list)
    for position, samples in run.delivered:
        for i in range(len(samples)):
            name, ordinal = model.at(position + i)
            delivered[name].append(ordinal)
    seen = {position + i for position, samples in run.delivered for i in range(len(samples))}
    left_out = [p for p in range(model.position) if p not in seen]
    for name, ordinals in delivered.items():
        assert ordinals == sorted(set(ordinals))  # nothing twice
        gaps = set(range(ordinals[-1])) - set(ordinals)
        assert gaps <= {model.at(p)[1] for p in left_out if model.at(p)[0] == name}
