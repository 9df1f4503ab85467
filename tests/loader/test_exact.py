"""Stop anywhere, go on with other ranks, threads, processes: the batches stay the same ones.

Every batch of every rank is compared, bit for bit, with `reference.Simulation`, which walks the run
from its first batch on and knows nothing of ranks, workers or states.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.loader.reference import Run, Schedule, Simulation, take
from tests.loader.support import (
    Endless,
    Kind,
    assert_batch,
    loaders,
    make_kinds,
    through_json,
    weights_of,
    write_npy,
)

from penstock import DataConfig, MemoryMappedDataset, MixtureDataset

SINGLE = ("windows", "packed", "store", "store_packed", "seq", "sft", "dpo", "grpo")
ROWS = ("rows", "rows_crop", "rows_bos")
OTHERS = ("items", "tuples", "taking")
MIXED = ("mixture", "mixture_packed", "mixture_items", "mixture_sft", "mixture_rows")
ALL = SINGLE + ROWS + OTHERS + MIXED


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    return make_kinds(tmp_path_factory.mktemp("kinds"))


# ---------------------------------------------------------------------------------------- legs


@dataclass(frozen=True)
class Leg:
    """A stretch of a run in one set of processes."""

    world: int
    batches: int
    threads: int = 0
    prefetch: int = 2
    saver: int = 0
    iter_again_after: int | None = None
    workers: str = "auto"
    schedule: Schedule | None = None  # None: as it was
    accumulation: int | None = None


def live(kind: Kind, run: Run, legs: list[Leg]) -> Simulation:
    """Live a run leg by leg, each from the state of the one before, and check every batch."""
    simulation, state = Simulation(run), None
    schedule, accumulation = run.schedule, run.accumulation
    for leg in legs:
        schedule = leg.schedule or schedule
        accumulation = leg.accumulation or accumulation
        config = DataConfig(num_workers=leg.threads, prefetch_factor=leg.prefetch)
        ranks = loaders(
            kind,
            run,
            leg.world,
            schedule=schedule,
            accumulation=accumulation,
            config=config,
            workers="thread" if leg.workers == "auto" else leg.workers,
        )
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(state)
            simulation.resize(schedule, accumulation)
            if leg.schedule is None and leg.accumulation is None:
                assert same_address(ranks[0].state_dict(), state)
        iterators = [Endless(loader) for loader in ranks]
        for number in range(leg.batches):
            for loader in ranks:
                assert loader.position == simulation.position
                assert (loader.epoch, loader.step) == (simulation.epoch, simulation.step)
            assert_batch(kind, next(simulation), [next(iterator) for iterator in iterators])
            if number == leg.iter_again_after:
                for iterator in iterators:
                    iterator.again()
        saved = [through_json(loader.state_dict()) for loader in ranks]
        assert all(same_address(each, saved[0]) for each in saved)
        state = saved[leg.saver % leg.world]
    return simulation


def plain_run(kind: Kind, *, size: int, seed: int = 0) -> Run:
    """A run of one batch size, with two stages where there is a mixture."""
    phases = [(0, weights_of(*range(1, 1 + len(kind.sizes)))), (5, weights_of(1, *kind.sizes[1:]))]
    return Run(
        sizes=kind.sizes,
        names=kind.names,
        schedule=((0, size),),
        phases=tuple(phases) if kind.mixed else (),
        seed=seed,
        tail="endless" if kind.mixed else "drop",
    )


def same_address(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two states are the same but for what is local to a rank."""
    local = ("rank", "num_replicas")
    a, b = (
        {**s, "sampler": {k: v for k, v in s["sampler"].items() if k not in local}} for s in (a, b)
    )
    return a == b


def legs_of(worlds: list[int], most: int) -> st.SearchStrategy[list[Leg]]:
    leg = st.builds(
        Leg,
        world=st.sampled_from(worlds),
        batches=st.integers(0, most),
        threads=st.integers(0, 2),
        prefetch=st.integers(1, 3),
        saver=st.integers(0, 5),
        iter_again_after=st.none() | st.integers(0, most),
    )
    return st.lists(leg, min_size=1, max_size=5)


@st.composite
def runs(draw: st.DrawFn, kind: Kind) -> Run:
    """A run whose global batch sizes are 12 or 24, so that 1, 2, 3, 4 or 6 ranks share them."""
    schedule = [(0, draw(st.sampled_from([12, 24])))]
    for _ in range(draw(st.integers(0, 2))):
        step = schedule[-1][0] + draw(st.integers(1, 6))
        schedule.append((step, draw(st.sampled_from([12, 24, 36]))))
    phases: list[tuple[int, tuple[int, ...]]] = []
    if kind.mixed:
        weight = st.sampled_from([0.0, 1e-6, 0.3, 1.0, 5.0])
        step = 0
        for _ in range(draw(st.integers(1, 3))):
            weights = draw(st.lists(weight, min_size=len(kind.sizes), max_size=len(kind.sizes)))
            weights[draw(st.integers(0, len(weights) - 1))] = 1.0
            phases.append((step, weights_of(*weights)))
            step += draw(st.integers(1, 7))
    return Run(
        sizes=kind.sizes,
        names=kind.names,
        schedule=tuple(schedule),
        phases=tuple(phases),
        accumulation=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 3)),
        shuffle=draw(st.booleans()),
        tail="endless" if kind.mixed else "drop",
    )


RANDOM = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


# --------------------------------------------------------------------------------------- histories


@pytest.mark.parametrize("name", ALL)
@RANDOM
@given(data=st.data())
def test_a_run_stopped_anywhere_goes_on_the_same_on_any_number_of_ranks(
    kinds: dict[str, Kind], name: str, data: st.DataObject
) -> None:
    kind = kinds[name]
    live(kind, data.draw(runs(kind)), data.draw(legs_of([1, 2, 3, 4, 6], 9)))


@pytest.mark.parametrize("name", ["windows", "store_packed", "items", "mixture", "mixture_items"])
@RANDOM
@given(data=st.data())
def test_with_other_global_batches_the_flat_order_goes_on_inside_each_epoch(
    kinds: dict[str, Kind], name: str, data: st.DataObject
) -> None:
    kind = kinds[name]
    run = data.draw(runs(kind))
    legs = []
    for leg in data.draw(legs_of([1, 2, 3, 5], 7)):
        each = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=2))
        steps = [0, data.draw(st.integers(1, 20))]
        schedule = tuple((step, size * leg.world) for step, size in zip(steps, each, strict=False))
        accumulation = data.draw(st.integers(1, 3))
        legs.append(Leg(**{**vars(leg), "schedule": schedule, "accumulation": accumulation}))
    live(kind, run, [Leg(world=1, batches=data.draw(st.integers(0, 9))), *legs])


@pytest.mark.parametrize("name", ALL)
def test_every_state_of_a_run_goes_on_the_same(kinds: dict[str, Kind], name: str) -> None:
    kind = kinds[name]
    run = plain_run(kind, size=12, seed=7)
    states = []
    ranks = loaders(kind, run, 2)
    iterators = [Endless(loader) for loader in ranks]
    batches = take(run, 11)  # two epochs and a bit, of most kinds
    states.append(ranks[0].state_dict())
    for batch in batches:
        assert_batch(kind, batch, [next(iterator) for iterator in iterators])
        states.append(through_json(ranks[1].state_dict()))
    for done, state in enumerate(states):
        ranks = loaders(kind, run, 3)
        for loader in ranks:
            loader.load_state_dict(state)
        iterators = [Endless(loader) for loader in ranks]
        for batch in batches[done:]:
            assert_batch(kind, batch, [next(iterator) for iterator in iterators])


@pytest.mark.parametrize("name", ["windows", "items", "mixture_packed"])
def test_worker_processes_and_threads_take_turns_in_one_run(
    kinds: dict[str, Kind], name: str
) -> None:
    legs = [
        Leg(world=2, batches=3, threads=1, workers="process"),
        Leg(world=1, batches=4, threads=2),
        Leg(world=1, batches=5, threads=2, workers="process", prefetch=3, iter_again_after=2),
        Leg(world=3, batches=2),
    ]
    live(kinds[name], plain_run(kinds[name], size=12, seed=1), legs)


def test_orders_of_many_blocks_and_stages_that_end_inside_them(tmp_path: Path) -> None:
    """More positions than an order block has, so that blocks, groups and stages interleave."""
    sizes = (5000, 3100, 700)
    sources = [
        MemoryMappedDataset(write_npy(tmp_path / str(i), [n * 3 + 1], seed=i), 3)
        for i, n in enumerate(sizes)
    ]
    kind = Kind(
        name="many", dataset=MixtureDataset(sources, list("abc")), sizes=sizes, names=tuple("abc")
    )
    phases = (0, weights_of(6, 3, 1)), (3, weights_of(1, 0, 1e-6)), (21, weights_of(1, 1, 1))
    run = Run(
        sizes=sizes, names=kind.names, schedule=((0, 480), (9, 960)), phases=phases, tail="endless"
    )
    legs = [
        Leg(world=4, batches=2),
        Leg(world=1, batches=9, threads=1),
        Leg(world=3, batches=13),
        Leg(world=2, batches=6, schedule=((0, 500),)),
    ]
    live(kind, run, legs)
    single = Kind(name="one", dataset=sources[0], sizes=sizes[:1])
    live(single, Run(sizes=sizes[:1], schedule=((0, 480), (9, 960))), legs)


def test_the_simulation_itself_keeps_the_flat_order() -> None:
    """What the other global batches are compared with: contiguous, but for the tails."""
    simulation = Simulation(Run(sizes=(50,), schedule=((0, 8),)))
    delivered: list[tuple[int, int, int]] = []
    for size in (8, 8, 12, 12, 5, 5, 20, 7):
        simulation.resize(((0, size),), 1)
        both = next(simulation), next(simulation)
        delivered += [(each.epoch, each.position, each.position + size) for each in both]
    for (epoch, _, end), (after, start, _) in pairwise(delivered):
        assert start == end or (after == epoch + 1 and start == after * 50 and start - end < 20)
