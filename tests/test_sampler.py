"""The samplers people know: equal parts of one order, on every rank, from any place on."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from penstock.errors import ConfigError, StateMismatch
from penstock.order import EpochOrder, MixtureOrder, Stage, quantise
from penstock.ranks import rank_and_world
from penstock.sampler import (
    DistributedSampler,
    MixtureSampler,
    ResumableDistributedSampler,
)

Bare = DistributedSampler | MixtureSampler
Make = Callable[[int, int], Bare]  # from (rank, world)
RANKS = ("RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's environment."""
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)


def bounds(sizes: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(sizes, dtype=int).tolist()]


worlds = st.integers(1, 12)
positive = st.floats(1e-6, 1)


@st.composite
def samplers(draw: st.DrawFn) -> Make:
    """A DistributedSampler, or a MixtureSampler some of whose datasets may be empty."""
    shuffle, drop_last, seed = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 99))
    epoch = draw(st.integers(0, 3))
    if draw(st.booleans()):
        n = draw(st.integers(0, 50))

        def make(rank: int, world: int) -> Bare:
            sampler = DistributedSampler(range(n), world, rank, shuffle, seed, drop_last)
            sampler.set_epoch(epoch)
            return sampler

    else:
        sizes = draw(st.lists(st.integers(0, 15), min_size=1, max_size=4))
        weights = [draw(positive if size else positive | st.just(0.0)) for size in sizes]
        weights = weights if any(weights) else [1.0] * len(sizes)
        later = draw(st.none() | st.just([w + 0.5 for w in weights]))

        def make(rank: int, world: int) -> Bare:
            sampler = MixtureSampler(bounds(sizes), weights, world, rank, shuffle, seed, drop_last)
            sampler.set_epoch(epoch)
            if later:
                sampler.update_weights(later)
                iter(sampler)  # they begin at the epoch's start
            return sampler

    return make


def by_rank(make: Make, world: int, skip: int = 0) -> list[list[int]]:
    """What each rank's sampler gives after a skip."""
    made = [make(rank, world) for rank in range(world)]
    for sampler in made:
        sampler.set_skip(skip)
    return [list(sampler) for sampler in made]


# ------------------------------------------------------------------------------- lengths, parts


@given(samplers(), worlds, st.integers(0, 60))
def test_len_is_what_is_given_and_the_same_on_every_rank(make: Make, world: int, skip: int) -> None:
    n = make(0, 1).order.n
    drop_last = make(0, 1).drop_last
    expected = n // world if drop_last else -(-n // world)
    for rank in range(world):
        sampler = make(rank, world)
        assert len(sampler) == sampler.num_samples == expected
        sampler.set_skip(skip)
        assert len(sampler) == expected  # of the next full one
        assert len(list(sampler)) == max(expected - skip, 0)
        assert len(list(sampler)) == expected


@given(samplers(), worlds)
def test_ranks_dealt_one_each_in_turn_make_up_the_order_of_one(make: Make, world: int) -> None:
    """What does not go round is left out, or filled up from the epoch's first."""
    parts = by_rank(make, world)
    one = make(0, 1)
    whole = list(one)
    assert sorted(whole) == list(range(one.order.n)) or isinstance(one, MixtureSampler)
    dealt = [part[i] for i in range(len(parts[0])) for part in parts]
    assert dealt == [whole[i % len(whole)] for i in range(len(dealt))]
    assert abs(len(dealt) - len(whole)) < world


@given(samplers(), worlds, st.integers(0, 60))
def test_a_skip_gives_the_tail_once(make: Make, world: int, skip: int) -> None:
    full = by_rank(make, world)
    assert by_rank(make, world, skip) == [part[skip:] for part in full]
    again = make(0, world)
    again.set_skip(skip)
    again.set_skip(skip + 1)  # the last one counts
    assert list(again) == full[0][skip + 1 :]
    assert list(again) == full[0]


@given(samplers(), worlds)
def test_a_sample_is_the_order_s_at_its_position(make: Make, world: int) -> None:
    for rank in range(world):
        sampler = make(rank, world)
        start = sampler.position
        found = list(sampler)
        n = sampler.order.n
        places = (rank + world * np.arange(len(found))) % max(n, 1)
        assert start == n * sampler.state_dict()["epoch"]
        assert found == (sampler.order.indices(start + places).tolist() if n else [])


def test_an_iteration_keeps_the_epoch_and_weights_it_began_with() -> None:
    sampler = MixtureSampler([0, 5000, 10_000], [1, 1], 1, 0)
    expected = list(sampler)
    iterator = iter(sampler)
    found = [next(iterator)]
    sampler.set_epoch(3)
    sampler.set_skip(7)
    sampler.update_weights([1, 0])
    assert found + list(iterator) == expected


def test_a_dataset_that_grows_is_seen_at_the_next_iteration() -> None:
    data = [1, 2, 3]
    sampler = DistributedSampler(data, 1, 0)
    assert sorted(sampler) == [0, 1, 2]
    data.append(4)
    assert sorted(sampler) == [0, 1, 2, 3]


def test_epochs_and_seeds_give_other_orders_and_the_same_ones_the_same() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = DistributedSampler(range(100), 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    found = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(each) for each in found}) == 4
    assert order(1, 1) == found[3] == order(np.int64(1), np.int64(1))  # type: ignore[arg-type]


def test_the_documented_signatures() -> None:
    sampler = DistributedSampler(range(10))
    assert (sampler.num_replicas, sampler.rank, sampler.shuffle) == (1, 0, True)
    assert (sampler.seed, sampler.drop_last, len(sampler)) == (0, True, 10)
    positional = DistributedSampler(range(10), 3, 2, False, 7, False)
    assert list(positional) == [2, 5, 8, 1]
    mixture = MixtureSampler([0, 10, 30], [1.0, 1.0], 2, 1, False, 7, False, 2.0)
    assert (mixture.num_replicas, mixture.rank, mixture.drop_last) == (2, 1, False)
    resumable = ResumableDistributedSampler(range(10))
    assert (resumable.epoch, resumable.iter, resumable.seed) == (0, 0, 42)
    assert (resumable.drop_last, resumable.shuffle) == (False, True)


def test_what_cannot_be_meant_is_refused() -> None:
    sampler = DistributedSampler(range(10), 1, 0)
    with pytest.raises(ConfigError, match="set_skip takes a number of samples >= 0, not -1"):
        sampler.set_skip(-1)
    with pytest.raises(ConfigError, match="epochs are counted from 0"):
        sampler.set_epoch(-1)
    with pytest.raises(ConfigError, match="epochs are counted from 0"):
        ResumableDistributedSampler(range(10), start_epoch=-1)
    for rank, world in [(2, 2), (-1, 2), (0, 0), (0, -1)]:
        with pytest.raises(ConfigError, match="rank must lie in"):
            DistributedSampler(range(10), world, rank)
    with pytest.raises(TypeError):
        DistributedSampler(range(10), seed=1.5)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- mixtures


def test_a_sample_comes_again_only_when_its_dataset_is_used_up() -> None:
    """Over epochs and changes of weights."""
    sizes = [40, 70, 9]
    sampler = MixtureSampler(bounds(sizes), [1, 1, 1], 1, 0)
    seen = np.zeros(sum(sizes), int)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        if epoch in (2, 5):
            sampler.update_weights([epoch, 1, 0])
        for index in sampler:
            seen[index] += 1
            source = int(np.searchsorted(bounds(sizes), index, "right")) - 1
            mine = seen[bounds(sizes)[source] : bounds(sizes)[source + 1]]
            assert mine.max() - mine.min() <= 1


def test_counts_are_exact_at_every_4096_samples() -> None:
    sampler = MixtureSampler([0, 100, 4096 * 3], [0.25, 0.75], 1, 0)
    found = np.array(list(sampler))
    for block in range(3):
        assert (found[block * 4096 : (block + 1) * 4096] < 100).sum() == 1024


def test_weights_in_force_are_those_asked_for() -> None:
    sampler = MixtureSampler([0, 10, 20], [3, 1], 1, 0)
    assert sampler._probs == [0.75, 0.25]
    sampler.update_weights([0.0, 1.0])
    assert sampler._probs == [0.0, 1.0]
    assert all(index >= 10 for index in sampler)
    assert sampler._probs == [0.0, 1.0]


def test_temperature_flattens_sharpens_and_leaves_zero_at_zero() -> None:
    def probs(weights: list[float], temperature: float) -> list[float]:
        made = MixtureSampler([0, 9, 18, 27], weights, 1, 0, temperature=temperature)
        found = made._probs
        made.update_weights([1, 1, 1])
        made.update_weights(weights, temperature)
        assert made._probs == found
        return found

    assert probs([9, 1, 0], 1.0) == [w / 2**32 for w in quantise([9, 1, 0])]
    assert probs([9, 1, 0], 2.0) == [0.75, 0.25, 0.0]
    assert probs([3, 1, 0], 0.5) == [w / 2**32 for w in quantise([9, 1, 0])]
    assert probs([9, 1, 0], 1e9)[:2] == pytest.approx([0.5, 0.5], abs=1e-8)
    assert probs([9, 1, 0], 1e-9)[1:] == [2**-32, 0.0]


def test_a_dataset_without_samples_gives_none_whatever_its_weight() -> None:
    sampler = MixtureSampler([0, 50, 50, 100], [1, 8, 3], 1, 0)
    assert sampler._probs == [0.25, 0.0, 0.75]
    sampler.update_weights([3, 1, 1])
    assert sampler._probs == [0.75, 0.0, 0.25]
    assert len(list(sampler)) == 100
    with pytest.raises(ConfigError, match="all weight is on datasets without samples"):
        sampler.update_weights([0, 1, 0])
    nothing = MixtureSampler([0, 0, 0], [1, 1], 1, 0)
    assert (list(nothing), len(nothing)) == ([], 0)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([], "empty"),
        ([1.0, -0.5], "non-negative"),
        ([0.0, 0.0], "sum to > 0"),
        ([float("nan"), 1.0], "non-negative"),
        ([float("inf"), 1.0], "finite"),
        ([1.0], "Expected 2 weights"),
        ([1.0, 1.0, 1.0], "Expected 2 weights"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(
    weights: list[float], words: str, temperature: float
) -> None:
    with pytest.raises(ConfigError, match=words):
        MixtureSampler([0, 10, 20], weights, 1, 0, temperature=temperature)
    sampler = MixtureSampler([0, 10, 20], [1, 3], 1, 0)
    with pytest.raises(ConfigError, match=words):
        sampler.update_weights(weights, temperature)
    assert sampler._probs == [0.25, 0.75]


def test_a_mixture_of_nothing_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        MixtureSampler([0], [], 1, 0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_is_positive(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature must be positive"):
        MixtureSampler([0, 10], [1], 1, 0, temperature=temperature)


@pytest.mark.parametrize("sizes", [[], [5, 10], [0, 10, 5], [0, -1]])
def test_cumulative_sizes_start_at_zero_and_never_fall(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="cumulative_sizes start at 0"):
        MixtureSampler(sizes, [1.0] * max(len(sizes) - 1, 1), 1, 0)


def test_cumulative_sizes_and_weights_may_be_arrays() -> None:
    plain = MixtureSampler([0, 10, 30], [1.0, 3.0], 1, 0)
    arrays: list[Any] = [np.array([0, 10, 30], np.uint64), np.array([1, 3], np.float32)]
    made = MixtureSampler(arrays[0], arrays[1], 1, 0)
    assert list(made) == list(plain)
    assert json.loads(json.dumps(made.state_dict())) == made.state_dict() == plain.state_dict()


# ------------------------------------------------------------------------------- new weights


def test_new_weights_act_at_the_next_iteration_from_its_position_on() -> None:
    sampler = MixtureSampler([0, 5000, 10_000], [1, 1], 2, 0)
    sampler.set_epoch(1)
    sampler.set_skip(10)
    sampler.update_weights([1, 0])
    assert [stage.position for stage in sampler.stages] == [0]
    iterator = iter(sampler)
    assert sampler.stages[1:] == (Stage(10_020, (2**32, 0)),)
    assert all(index < 5000 for index in iterator)
    sampler.set_epoch(2)
    list(sampler)
    assert len(sampler.stages) == 2  # asked for once, begun once


def test_the_last_weights_asked_for_are_those_that_begin() -> None:
    sampler = MixtureSampler([0, 50, 100], [1, 1], 1, 0)
    sampler.update_weights([1, 0])
    sampler.update_weights([0, 1])
    assert all(index >= 50 for index in sampler)
    assert [stage.weights for stage in sampler.stages] == [(0, 2**32)]


@given(worlds, st.integers(0, 3), st.integers(0, 5))
def test_every_rank_begins_new_weights_at_the_same_position(
    world: int, epoch: int, skip: int
) -> None:
    made = [MixtureSampler([0, 30, 77], [1, 2], world, rank) for rank in range(world)]
    for sampler in made:
        sampler.set_epoch(epoch)
        sampler.set_skip(skip)
        sampler.update_weights([5, 1])
        iter(sampler)
    assert len({sampler.stages for sampler in made}) == 1


def test_a_declared_stage_acts_at_its_exact_position() -> None:
    stages = [Stage.of([1, 0]), Stage.of([0, 1], 33, start_step=3)]
    sampler = MixtureSampler([0, 50, 100], [], 1, 0, stages=stages)
    assert [index >= 50 for index in sampler] == [False] * 33 + [True] * 67
    assert sampler._probs == [1.0, 0.0]


def test_datasets_are_told_apart_by_name() -> None:
    named = MixtureSampler([0, 50, 100], [1, 1], 1, 0, names=["web", "code"])
    other = MixtureSampler([0, 50, 100], [1, 1], 1, 0, names=["code", "web"])
    web, again = [i for i in named if i < 50], [i - 50 for i in other if i >= 50]
    assert web[:40] == again[:40]
    assert named.identity() != other.identity()
    with pytest.raises(ConfigError, match="different names"):
        MixtureSampler([0, 50, 100], [1, 1], 1, 0, names=["web", "web"])


# ------------------------------------------------------------------------------- states


def test_a_state_has_the_documented_keys_and_is_json() -> None:
    keys = {"epoch": 5, "seed": 9, "num_replicas": 4, "rank": 3}
    for sampler in (
        DistributedSampler(range(100), 4, 3, seed=9),
        MixtureSampler([0, 50, 100], [1, 3], 4, 3, seed=9),
    ):
        sampler.set_epoch(5)
        state = json.loads(json.dumps(sampler.state_dict()))
        assert state.items() >= keys.items()
        assert state == sampler.state_dict()


def test_a_state_restores_the_epoch_and_leaves_the_rest_this_process_s_own() -> None:
    sampler = DistributedSampler(range(100), 4, 3, seed=9)
    sampler.load_state_dict({"epoch": 7, "seed": 1, "num_replicas": 2, "rank": 0})
    assert sampler.state_dict() == {"epoch": 7, "seed": 9, "num_replicas": 4, "rank": 3}
    sampler.load_state_dict({})
    assert sampler.state_dict()["epoch"] == 0


@pytest.mark.parametrize("pending", [False, True])
def test_a_state_carries_new_weights_begun_or_still_to_begin(pending: bool) -> None:
    def sampler() -> MixtureSampler:
        return MixtureSampler([0, 300, 700], [1, 1], 2, 1, seed=3)

    old = sampler()
    old.update_weights([1, 5])
    old.set_epoch(1)
    if not pending:
        iter(old)
    new = sampler()
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.state_dict() == old.state_dict()
    assert new._probs == old._probs
    assert list(new) == list(old)
    new.set_epoch(4)
    old.set_epoch(4)
    assert list(new) == list(old)


def test_a_state_of_the_documented_keys_leaves_the_weights_alone() -> None:
    sampler = MixtureSampler([0, 10, 20], [1, 3], 1, 0)
    sampler.update_weights([1, 1])
    sampler.load_state_dict({"epoch": 2, "seed": 0, "num_replicas": 1, "rank": 0})
    assert (sampler.state_dict()["epoch"], sampler._probs) == (2, [0.5, 0.5])


def test_a_state_of_another_mixture_is_refused_and_changes_nothing() -> None:
    sampler = MixtureSampler([0, 10, 20], [1, 3], 1, 0)
    before = sampler.state_dict()
    other = MixtureSampler([0, 10, 20, 30], [1, 3, 1], 1, 0)
    other.set_epoch(3)
    with pytest.raises(StateMismatch, match="has 3 datasets, this one has 2"):
        sampler.load_state_dict(other.state_dict())
    assert sampler.state_dict() == before


# ------------------------------------------------------------------------------- resumable


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ResumableDistributedSampler]:
    """A ResumableDistributedSampler of a given rank, as a launcher would set it."""

    def make(
        n: int, rank: int = 0, world: int = 1, **arguments: Any
    ) -> ResumableDistributedSampler:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        return ResumableDistributedSampler(range(n), **arguments)

    return make


def endless(sampler: ResumableDistributedSampler) -> Iterator[int]:
    """Epoch after epoch."""
    while True:
        yield from sampler


CASES = [
    (n, world, drop_last)
    for n in (1, 2, 5, 10, 23)
    for world in (1, 2, 3, 7)
    for drop_last in (False, True)
    if n // world or not drop_last
]


@pytest.mark.parametrize(("n", "world", "drop_last"), CASES)
def test_stopped_after_any_sample_it_goes_on_with_the_next(
    ranked: Callable[..., ResumableDistributedSampler], n: int, world: int, drop_last: bool
) -> None:
    """By `epoch` and `iter`, by its state, and by iterating the same one again: three epochs."""
    rank = world - 1
    one = ranked(n, rank, world, drop_last=drop_last)
    length = len(one)
    assert length == (n // world if drop_last else -(-n // world))
    whole = list(islice(endless(one), 3 * length))
    for stop in range(1, 2 * length + 1):
        sampler = ranked(n, rank, world, drop_last=drop_last)
        assert list(islice(endless(sampler), stop)) == whole[:stop]
        assert (sampler.epoch, sampler.iter) == divmod(stop, length)
        assert len(sampler) == length - stop % length
        assert sampler.position == sampler.epoch * n + sampler.iter * world
        rest = whole[stop : stop + length - stop % length]
        by_numbers = ranked(
            n,
            rank,
            world,
            start_epoch=sampler.epoch,
            start_iter=sampler.iter,
            drop_last=drop_last,
        )
        by_state = ranked(n, rank, world, drop_last=drop_last)
        by_state.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        assert by_state.state_dict() == by_numbers.state_dict() == sampler.state_dict()
        for resumed in (by_numbers, by_state, sampler):
            assert len(resumed) == len(rest)
            assert list(resumed) == rest
            assert resumed.epoch == stop // length + 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("n", "old", "new"), [(23, 2, 3), (23, 3, 2), (50, 4, 6), (50, 6, 4)])
def test_resumed_on_other_ranks_it_goes_on_in_the_same_flat_order(
    ranked: Callable[..., ResumableDistributedSampler], n: int, old: int, new: int, drop_last: bool
) -> None:
    flat = EpochOrder(n, 42).indices(np.arange(n)).tolist()
    for stop in range(1, n // old):
        states = []
        for rank in range(old):
            sampler = ranked(n, rank, old, drop_last=drop_last)
            list(islice(sampler, stop))
            states.append(sampler.state_dict())
        parts, again = [], []
        for rank in range(new):
            sampler = ranked(n, rank, new, drop_last=drop_last)
            sampler.load_state_dict(states[rank % old])
            assert sampler.position == stop * old
            again.append(sampler.state_dict())
            length = len(sampler)
            parts.append(list(sampler))
            assert len(parts[-1]) == length
        dealt = [part[i] for i in range(len(parts[0])) for part in parts]
        left = n - stop * old
        whole = left // new * new if drop_last else left
        assert dealt[:whole] == flat[stop * old :][:whole]
        assert len(dealt) == (whole if drop_last else -(-left // new) * new)
        kept = {"epoch", "seed", "offset"}
        for state in again:  # loading and saving loses nothing
            assert {k: state[k] for k in kept} == {k: states[0][k] for k in kept}


def test_what_is_too_little_for_the_new_ranks_is_dropped_where_tails_are(
    ranked: Callable[..., ResumableDistributedSampler],
) -> None:
    state = {"epoch": 3, "iter": 4, "seed": 42, "num_replicas": 2, "rank": 0}  # 8 of 10 given
    sampler = ranked(10, 1, 4, drop_last=True)
    sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.iter, len(sampler)) == (4, 0, 2)
    sampler = ranked(10, 1, 4, shuffle=False)
    sampler.load_state_dict(state)
    assert (sampler.epoch, list(sampler)) == (3, [9])


def test_start_iter_counts_modulo_the_rank_s_length(
    ranked: Callable[..., ResumableDistributedSampler],
) -> None:
    assert ranked(10, 1, 3, start_iter=9).iter == 9 % 4
    assert ranked(10, 1, 3, start_iter=9, drop_last=True).iter == 0
    assert ranked(10, start_iter=27, shuffle=False).iter == 7
    assert list(ranked(10, start_iter=27, shuffle=False)) == [7, 8, 9]
    assert ranked(0, start_iter=5).iter == 0


def test_every_epoch_has_every_sample_in_an_order_of_its_own() -> None:
    sampler = ResumableDistributedSampler(range(100))
    first, second = list(sampler), list(sampler)
    assert sampler.epoch == 2
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert list(ResumableDistributedSampler(range(100), start_epoch=1)) == second
    assert list(ResumableDistributedSampler(range(100), seed=43)) != first


def test_ranks_make_up_the_whole_and_pad_from_the_start(
    ranked: Callable[..., ResumableDistributedSampler],
) -> None:
    parts = [list(ranked(10, rank, 4, shuffle=False)) for rank in range(4)]
    assert parts == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    dropped = [list(ranked(10, rank, 4, shuffle=False, drop_last=True)) for rank in range(4)]
    assert dropped == [[0, 4], [1, 5], [2, 6], [3, 7]]
    few = [list(ranked(2, rank, 5, shuffle=False)) for rank in range(5)]
    assert few == [[0], [1], [0], [1], [0]]


@pytest.mark.parametrize(("n", "arguments"), [(0, {}), (3, {"drop_last": True})])
def test_without_samples_for_every_rank_it_gives_none_and_goes_to_the_next_epoch(
    ranked: Callable[..., ResumableDistributedSampler], n: int, arguments: dict[str, Any]
) -> None:
    sampler = ranked(n, 1, 4, **arguments)
    assert (len(sampler), list(sampler), sampler.epoch, sampler.iter) == (0, [], 1, 0)
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    assert sampler.state_dict() == state


def test_epoch_and_iter_are_live() -> None:
    sampler = ResumableDistributedSampler(range(5), shuffle=False)
    seen = [(sampler.epoch, sampler.iter, len(sampler)) for _ in sampler]
    assert seen == [(0, 1, 4), (0, 2, 3), (0, 3, 2), (0, 4, 1), (1, 0, 5)]


def test_setting_the_epoch_goes_to_its_start_unless_it_is_the_one_under_way() -> None:
    sampler = ResumableDistributedSampler(range(5), shuffle=False)
    list(islice(sampler, 2))
    sampler.set_epoch(0)
    assert list(islice(sampler, 1)) == [2]
    sampler.set_epoch(4)
    assert (list(sampler), sampler.epoch) == ([0, 1, 2, 3, 4], 5)


# ------------------------------------------------------------------------------- rank, world


@pytest.mark.parametrize("wrong", [2.0, "2", 1.5])
def test_ranks_epochs_and_skips_are_whole_numbers(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="num_replicas is a whole number, not"):
        DistributedSampler(range(9), wrong, 0)
    with pytest.raises(ConfigError, match="rank is a whole number, not"):
        DistributedSampler(range(9), 3, wrong)
    sampler = DistributedSampler(range(9), 3, 0)
    with pytest.raises(ConfigError, match="an epoch is a whole number, not"):
        sampler.set_epoch(wrong)
    with pytest.raises(ConfigError, match="a skip is a whole number, not"):
        sampler.set_skip(wrong)


def test_stages_that_are_none_are_no_state_of_a_mixture() -> None:
    sampler = MixtureSampler([0, 3, 9], [1, 1], 1, 0)
    for stages in ("x", [[0]], [[0, 5, None]]):
        with pytest.raises(StateMismatch, match="no state of a MixtureSampler: its stages are"):
            sampler.load_state_dict({"epoch": 0, "stages": stages})


def test_rank_and_world_come_from_arguments_then_the_environment_then_are_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rank_and_world() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert rank_and_world() == (3, 8)
    assert rank_and_world(1) == (1, 8)
    assert rank_and_world(None, 4) == (3, 4)
    assert rank_and_world(0, 1) == (0, 1)
    sampler = DistributedSampler(range(80), shuffle=False)
    assert list(sampler)[:2] == [3, 11]
    with pytest.raises(ConfigError, match=r"rank must lie in \[0, 2\)"):
        rank_and_world(None, 2)


def test_an_environment_that_is_not_a_number_matters_only_when_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "first")
    assert rank_and_world(0, 2) == (0, 2)
    with pytest.raises(ConfigError, match="RANK='first', which is not a number"):
        rank_and_world()


RANK_OF_TWO = """
import json, sys
import torch.distributed as dist
from penstock.errors import ConfigError
from penstock.sampler import DistributedSampler, MixtureSampler, ResumableDistributedSampler
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
found = {}
for name, sampler in {
    "distributed": DistributedSampler(range(6), shuffle=False),
    "mixture": MixtureSampler([0, 2, 6], [1, 2], shuffle=False),
    "resumable": ResumableDistributedSampler(range(6), shuffle=False),
    "given": DistributedSampler(range(6), num_replicas=3, rank=2, shuffle=False),
}.items():
    found[name] = [sampler.rank, sampler.num_replicas, list(sampler)]
group = dist.new_group([1])
try:
    sampler = ResumableDistributedSampler(range(6), shuffle=False, process_group=group)
    found["group"] = [sampler.rank, sampler.num_replicas, list(sampler)]
except ConfigError as error:
    found["group"] = str(error)
print(json.dumps(found))
dist.destroy_process_group()
"""


def test_rank_and_world_come_from_torch_distributed_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # torch.distributed knows better
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_OF_TWO, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    for rank in range(2):
        for name in ("distributed", "resumable"):
            assert found[rank][name] == [rank, 2, [rank, rank + 2, rank + 4]]
        assert found[rank]["mixture"][:2] == [rank, 2]
        assert found[rank]["given"] == [2, 3, [2, 5]]
    assert found[0]["group"] == "this process is no member of the process_group given"
    assert found[1]["group"] == [0, 1, [0, 1, 2, 3, 4, 5]]


# ------------------------------------------------------------------------------- costs


HUGE: list[Callable[[], Any]] = [
    lambda: DistributedSampler(range(10**12), 64, 5),
    lambda: DistributedSampler(range(10**12), 64, 5, shuffle=False, drop_last=False),
    lambda: MixtureSampler([0, 10**12, 3 * 10**12], [1, 1], 64, 5),
    lambda: ResumableDistributedSampler(range(10**12), start_epoch=7, start_iter=10**11),
]


@pytest.mark.parametrize("make", HUGE)
def test_memory_does_not_grow_with_the_samples(make: Callable[[], Any]) -> None:
    def start() -> None:
        sampler = make()
        assert len(sampler) >= 10**10
        assert len(set(islice(sampler, 100))) == 100

    start()
    tracemalloc.start()
    start()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


@pytest.mark.parametrize("order", [EpochOrder, MixtureOrder])
def test_positions_are_computed_as_they_are_needed_and_few_at_first(
    order: type[EpochOrder] | type[MixtureOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    compute = order.indices

    def counted(self: Any, positions: Any) -> Any:
        asked.append(len(positions))
        return compute(self, positions)

    monkeypatch.setattr(order, "indices", counted)
    sampler: Bare = DistributedSampler(range(10**6), 10, 0)
    if order is MixtureOrder:
        sampler = MixtureSampler([0, 10**6], [1], 10, 0)
    iterator = iter(sampler)
    assert asked == []
    next(iterator)
    assert asked == [16]
    assert len(list(iterator)) + 1 == sum(asked) == 10**5
    assert asked[:8] == [16 * 2**i for i in range(8)]
    assert set(asked[8:-1]) == {4096}


def test_no_random_state_is_touched() -> None:
    np.random.seed(1)  # noqa: NPY002 - the global state is what is looked at
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
    for make in HUGE:
        list(islice(make(), 10))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index] # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_torch_s_own_loader_takes_them() -> None:
    for sampler in (
        DistributedSampler(range(20), 2, 1, shuffle=False),
        MixtureSampler([0, 20], [1], 2, 1, shuffle=False),
    ):
        loader: DataLoader[int] = DataLoader(list(range(20)), 5, sampler=sampler)  # type: ignore[arg-type]
        assert [batch.tolist() for batch in loader] == [[1, 3, 5, 7, 9], [11, 13, 15, 17, 19]]
        assert len(loader) == 2
